"""Train from one YAML file: python tools/train.py CONFIG [--key value …]; see --help."""

import sys

from mmpreproj.training.cli import main
from mmpreproj.training.console import run_tool

if __name__ == "__main__":
    sys.exit(run_tool(main))
