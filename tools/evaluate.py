"""Final figures of a trained model: python tools/evaluate.py RUN_OR_CHECKPOINT; see --help."""

from mmpreproj.training.inference import evaluate_main

if __name__ == "__main__":
    evaluate_main()
