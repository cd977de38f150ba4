"""Classes of your own pictures: python tools/predict.py RUN_OR_CHECKPOINT FILE…; see --help."""

import sys

from mmpreproj.training.cli import run_tool
from mmpreproj.training.inference import predict_main

if __name__ == "__main__":
    sys.exit(run_tool(predict_main))
