"""Final figures of a trained model: python tools/evaluate.py RUN_OR_CHECKPOINT; see --help."""

import sys

from mmpreproj.training.cli import run_tool
from mmpreproj.training.evaluate import evaluate_main

if __name__ == "__main__":
    sys.exit(run_tool(evaluate_main))
