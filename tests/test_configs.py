"""Every YAML in configs/: parsed with full type checks, its model and data module built."""

from pathlib import Path

import pytest
import torch
import yaml

from mmpreproj.analysis.study import Study
from mmpreproj.training import build
from mmpreproj.training.cli import TrainCLI

CONFIGS = Path(__file__).parents[1] / "configs"
STUDIES = sorted((CONFIGS / "studies").glob("*.yaml"))
RUNS = sorted(set(CONFIGS.rglob("*.yaml")) - set(STUDIES))


def name(path):
    return str(path.relative_to(CONFIGS))


def built(arguments, tmp_path):
    """Module and data module of a command line; weights are not fetched."""
    cli = TrainCLI([*arguments, "--run.root", str(tmp_path), "--trainer.accelerator", "cpu"])
    h = cli.model.hparams
    model = build.build_model(
        h.model, h.num_classes or 10, h.model_args, preproj=cli.model.preproj_config
    )
    return cli, model


@pytest.mark.parametrize("path", RUNS, ids=name)
def test_configs_are_valid_and_build(path, tmp_path):
    cli, model = built(["--config", str(path)], tmp_path)
    size = build.input_config(model)["input_size"]
    with torch.no_grad():
        assert model.eval()(torch.zeros(1, *size)).shape == (1, 10)
    if cli.model.hparams.freeze_base:
        build.freeze(model)
    assert cli.datamodule.batch_size > 0


@pytest.mark.parametrize("path", STUDIES, ids=name)
def test_studies_are_valid_and_their_arms_build(path, tmp_path):
    study = Study.read(path)
    counts = {}
    for run in study.runs():
        if run.seed == study.seeds[0]:
            config, *settings = run.arguments
            _, model = built(["--config", config, *settings], tmp_path)
            counts[run.arm] = sum(p.numel() for p in model.parameters())
    if path.stem == "cifar10":  # the wider MLP is there to match the method's parameters
        assert (
            abs(counts["wider-mlp"] / counts["method"] - 1)
            < 1e-3
            < 1 - counts["without"] / counts["method"]
        )


def test_arms_of_the_cifar10_study_change_one_line():
    base = yaml.safe_load((CONFIGS / "cifar10" / "vit.yaml").read_text())
    shared = base["model"]["init_args"]["model_args"].items()
    for settings in Study.read(CONFIGS / "studies" / "cifar10.yaml").arms.values():
        assert set(settings) <= {"model.init_args.model_args"}
        for model_args in settings.values():
            assert shared <= model_args.items()
