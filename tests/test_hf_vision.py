"""Hugging Face's image and video models: bit-identical, probed, recomputed, with their heads."""

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset
from training_data import TinyData, trainer

transformers = pytest.importorskip("transformers")

from hf_models import (  # noqa: E402
    CASES,
    CLASSES,
    CLIPS,
    HEADS,
    built,
    inputs,
    logits,
    saved,
    transformers_logits,
)
from transformers_models import IMAGE, randomise  # noqa: E402

import mmpreproj  # noqa: E402
from mmpreproj import PreProjConfig  # noqa: E402
from mmpreproj.backbones import building  # noqa: E402
from mmpreproj.training import ImageClassifier, VideoClassifier  # noqa: E402
from mmpreproj.training.recipe import OptimizerConfig, make_optimizer  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_loaded_logits_are_those_of_transformers_and_attached_bit_identical(case, tmp_path):
    theirs = saved(case, tmp_path)
    model = built(tmp_path, preproj=PreProjConfig()).eval()
    x = inputs(model)
    expected = transformers_logits(theirs, x)
    assert expected.shape == (2, CLASSES) and expected.std() > 0.01
    assert torch.equal(logits(model, x), expected)
    assert model.num_classes == CLASSES
    # divided attention: two in each of the blocks; V-JEPA 2's pooler has a block of its own
    sites = {"timesformer": 4, "vjepa2": 3}.get(case, 2)
    assert len(mmpreproj.preproj_modules(model)) == sites
    mmpreproj.detach(model)
    assert torch.equal(logits(model, x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_trainable_parameter_gets_a_gradient(case, tmp_path):
    saved(case, tmp_path)
    model = built(tmp_path, preproj=PreProjConfig(init_std=0.1))
    model(inputs(model)).square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    for module in mmpreproj.preproj_modules(model).values():
        assert all(p.grad.abs().max() > 0 for p in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_frozen_only_the_method_and_the_head_train(case, tmp_path):
    saved(case, tmp_path)
    model = built(tmp_path, preproj=PreProjConfig())
    building.freeze(model)
    building.set_frozen_modes(model.train())
    heads = tuple(f"model.{path}." for path in HEADS.get(case, ["classifier"]))
    expected = {n for n, _ in model.named_parameters() if ".preproj." in n or n.startswith(heads)}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == expected
    modes = {name: module.training for name, module in model.named_modules()}
    assert all(modes[path.rstrip(".")] for path in heads)
    trains = [name for name, on in modes.items() if on]
    assert all(".preproj" in n or n.startswith(tuple(h.rstrip(".") for h in heads)) for n in trains)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(2):  # W_up moves in the second step
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs(model)), torch.tensor([0, 3])).backward()
        optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    # the bias of a key shifts all of a row's scores alike: softmax does not see it
    assert expected - moved <= {n for n in expected if n.endswith("k_proj.bias")}
    assert moved <= expected


@pytest.mark.slow
@pytest.mark.parametrize("case", ["vit", "dinov2"])
def test_a_frozen_probe_runs_through_the_lightning_module(case, tmp_path):
    theirs = saved(case, tmp_path / "base")
    module = ImageClassifier(
        f"hf:{tmp_path / 'base'}",
        pretrained=True,
        preproj=PreProjConfig(),
        freeze_base=True,
        grad_checkpointing=True,
        optimizer={"opt": "adamw", "lr": 1e-2},
        schedule={"sched": "none"},
    )
    running = trainer(tmp_path)
    running.fit(module, TinyData(n=12, n_val=4))
    state = {key: t for key, t in module.model.state_dict().items() if "classifier" not in key}
    base = theirs.state_dict()
    for key, tensor in state.items():
        if ".preproj." not in key:
            assert torch.equal(tensor, base[key.removeprefix("model.")]), key
    assert module.model.num_classes == 3
    for preproj in mmpreproj.preproj_modules(module.model).values():
        assert all(getattr(preproj, part).weight.abs().sum() > 0 for part in ("down", "skip"))
    running.save_checkpoint(tmp_path / "a.ckpt")
    again = ImageClassifier.load_from_checkpoint(tmp_path / "a.ckpt")
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(logits(again.eval(), x), logits(module.eval(), x))


class TinyClips(LightningDataModule):
    """Random clips of three classes; two views of each in evaluation."""

    label_sets = {"class": ["a", "b", "c"]}

    def __init__(self):
        super().__init__()
        self.data_config = None
        self.targets = torch.arange(6).remainder(3)[:, None]

    def _loader(self, *shape):
        return DataLoader(TensorDataset(torch.randn(6, *shape), self.targets), batch_size=3)

    def train_dataloader(self):
        return self._loader(3, 4, 16, 16)

    def val_dataloader(self):
        return []

    def test_dataloader(self):
        return self._loader(2, 3, 4, 16, 16)


@pytest.mark.slow
@pytest.mark.parametrize("case", CLIPS)
def test_video_models_are_probed_through_the_lightning_module(case, tmp_path):
    theirs = saved(case, tmp_path / "base").state_dict()
    module = VideoClassifier(
        f"hf:{tmp_path / 'base'}",
        pretrained=True,
        preproj=PreProjConfig(),
        freeze_base=True,
        optimizer={"opt": "adamw", "lr": 1e-2},
        schedule={"sched": "none"},
    )
    data = TinyClips()
    running = trainer(tmp_path)
    running.fit(module, data)
    running.test(module, data, verbose=False)
    assert data.data_config["input_size"] == [3, 4, 16, 16]
    heads = tuple(f"model.{path}." for path in HEADS.get(case, ["classifier"]))
    for key, tensor in module.model.state_dict().items():
        if ".preproj." not in key and not key.startswith(heads):
            assert torch.equal(tensor, theirs[key.removeprefix("model.")]), key
    for preproj in mmpreproj.preproj_modules(module.model).values():
        assert all(getattr(preproj, part).weight.abs().sum() > 0 for part in ("down", "skip"))


def test_dinov3_gets_the_classifier_of_dinov2s_evaluation(tmp_path):
    config = transformers.DINOv3ViTConfig(**IMAGE, num_register_tokens=2)
    trunk = randomise(transformers.DINOv3ViTModel(config)).eval()
    trunk.save_pretrained(tmp_path)
    model = built(tmp_path, 3, preproj=PreProjConfig()).eval()
    x = torch.randn(2, 3, 16, 32)
    with torch.no_grad():
        tokens = trunk(x).last_hidden_state
        pooled = torch.cat([tokens[:, 0], tokens[:, 3:].mean(1)], 1)  # 1 class token, 2 registers
        head = model.get_classifier()
        assert torch.equal(model(x), head(pooled))
    assert tokens.shape[1] == 3 + 2 * 4  # not square: 2 x 4 patches
    building.freeze(model)
    rest = {n for n, p in model.named_parameters() if p.requires_grad and ".preproj." not in n}
    assert rest == {"model.classifier.weight", "model.classifier.bias"}


# ---- gradient checkpointing, heads, layer decay --------------------------------------------------


class Calls:
    """How often a module ran, from now on."""

    def __init__(self, module):
        self.n = 0
        module.register_forward_hook(self)

    def __call__(self, *args):
        self.n += 1


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_checkpointing_recomputes_every_block_frozen_or_not(case, frozen, tmp_path):
    saved(case, tmp_path)
    model = built(tmp_path, preproj=PreProjConfig(init_std=0.1))
    if frozen:
        building.freeze(model)
    x, found = inputs(model), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.train()
        if frozen:
            building.set_frozen_modes(model)
        attentions = mmpreproj.preproj_modules(model).values()
        counts = [Calls(module) for module in attentions]
        model.zero_grad()
        torch.manual_seed(1)  # BEiT drops paths by default
        model(x).square().sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append(([count.n for count in counts], gradients))
    assert set(found[0][0]) == {1} and set(found[1][0]) == {2}
    assert found[0][1].keys() == found[1][1].keys()
    for name, gradient in found[0][1].items():
        assert torch.equal(found[1][1][name], gradient), name


def test_checkpointing_leaves_a_frozen_base_without_drop_path(tmp_path):
    saved("dinov2", tmp_path, drop_path_rate=0.5)
    model = built(tmp_path, preproj=PreProjConfig())
    building.freeze(model)
    model.set_grad_checkpointing()
    building.set_frozen_modes(model.train())
    x = inputs(model, batch=8)
    assert torch.equal(logits(model, x), logits(model.eval(), x))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["deit_distilled", "vjepa2"])
def test_a_reset_head_keeps_precision_and_leaves_the_rest(case, tmp_path):
    saved(case, tmp_path)
    model = built(tmp_path, preproj=PreProjConfig(init_std=0.1)).bfloat16().eval()
    kept = {n: p.clone() for n, p in model.named_parameters() if "classifier" not in n}
    model.reset_classifier(7)
    x = inputs(model)
    assert logits(model, x).shape == (2, 7) and logits(model, x).dtype == torch.bfloat16
    model.reset_classifier(0)
    assert not any("classifier" in name for name in building.classifier_names(model))
    assert model.num_classes == 0 and logits(model, x).shape == (2, model.num_features)
    model.reset_classifier(4)
    assert logits(model, x).shape == (2, 4)
    assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in kept.items())


def test_a_model_without_classes_gives_features(tmp_path):
    saved("vit", tmp_path)
    model = built(tmp_path, 0)
    assert model(inputs(model)).shape == (2, 32)


@pytest.mark.parametrize("case", ["vit", "clip", "videomae", "vjepa2"])
def test_layer_decay_falls_from_the_head_to_the_embeddings(case, tmp_path):
    saved(case, tmp_path)
    model = built(tmp_path)
    optimizer = make_optimizer(model, OptimizerConfig(opt="sgd", lr=1.0, layer_decay=0.5))
    scales = {id(p): g["lr_scale"] for g in optimizer.param_groups for p in g["params"]}
    found = {name: scales[id(p)] for name, p in model.named_parameters()}
    assert found["model.classifier.weight"] == 1.0
    blocks = [n for n in found if ".layer.1." in n or ".layers.1." in n]
    assert blocks and {found[n] for n in blocks} == {0.5}
    first = [n for n in found if ".layer.0." in n or ".layers.0." in n]
    assert {found[n] for n in first} == {0.25}
    assert {s for n, s in found.items() if "embeddings." in n} == {0.125}
