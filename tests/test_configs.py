"""Every YAML in configs/: parsed with full type checks, its model and data module built."""

from pathlib import Path

import pytest
import torch
import yaml
from text_data import character_tokenizer

from mmpreproj.backbones import building
from mmpreproj.backbones.lm import new_language_model
from mmpreproj.studies.study import Study
from mmpreproj.training import LanguageModel
from mmpreproj.training.cli import TrainCLI

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[1] / "configs"
STUDIES = sorted((CONFIGS / "studies").glob("*.yaml"))
RUNS = sorted(set(CONFIGS.rglob("*.yaml")) - set(STUDIES))


def name(path):
    return str(path.relative_to(CONFIGS))


def parsed(arguments, tmp_path):
    """The command line's modules, built as far as nothing is fetched or loaded."""
    return TrainCLI([*arguments, "--run.root", str(tmp_path), "--trainer.accelerator", "cpu"])


def built(cli):
    """The model of the module, without its weights; None where it comes from elsewhere."""
    h = cli.model.hparams
    if isinstance(cli.model, LanguageModel):
        if h.model is not None:
            return None
        tokenizer = character_tokenizer()
        return new_language_model(h.model_type, h.model_args, tokenizer, cli.model.preproj_config)
    if h.model.startswith("hf:"):
        return None
    return building.build_model(
        h.model, h.num_classes or 10, h.model_args, preproj=cli.model.preproj_config
    )


@pytest.mark.parametrize("path", RUNS, ids=name)
def test_configs_are_valid_and_build(path, tmp_path):
    cli = parsed(["--config", str(path)], tmp_path)
    assert cli.datamodule.batch_size > 0
    model = built(cli)
    if model is None:
        return
    if cli.model.hparams.freeze_base:
        building.freeze(model)
    with torch.no_grad():
        if isinstance(cli.model, LanguageModel):
            assert model.eval()(torch.zeros(1, 8, dtype=torch.long)).logits.shape == (1, 8, 32)
        else:
            size = building.input_config(model)["input_size"]
            assert model.eval()(torch.zeros(1, *size)).shape == (1, 10)


@pytest.mark.parametrize("path", STUDIES, ids=name)
def test_studies_are_valid_and_their_arms_build(path, tmp_path):
    study, *others = Study.read_all(path)
    if others:
        return  # each is a file of its own here
    counts = {}
    for run in [*study.choosing_runs(), *study.runs()]:
        if run.candidate is not None or run.seed == study.seeds[0]:
            model = built(parsed(["--config", run.arguments[0], *run.arguments[1:]], tmp_path))
            if model is not None:
                counts[run.arm] = sum(p.numel() for p in model.parameters())
    if "wider-mlp" in counts:  # it is there to match the method's parameters
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
