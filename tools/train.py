"""Train from one YAML file: python tools/train.py CONFIG [--key value …]; see --help."""

from mmpreproj.training.cli import main

if __name__ == "__main__":
    main()
