"""Classes of your own pictures and clips, prompts continued: see python tools/predict.py --help."""

import sys

from mmpreproj.training.cli import run_tool
from mmpreproj.training.predict import predict_main

if __name__ == "__main__":
    sys.exit(run_tool(predict_main))
