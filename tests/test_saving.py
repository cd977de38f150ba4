"""Adapter folders: what is written, and what loading refuses."""

import json

import pytest
import torch
from helpers import images, perturb, tiny
from safetensors.torch import load_file, save_file

from mmpreproj import PreProjConfig, attach, detach, freeze_base, load, preproj_modules, save

FAMILY = "vit_small_patch16_rope_224"


@pytest.fixture
def base():
    return tiny(FAMILY)


@pytest.fixture
def saved(base, tmp_path):
    """(folder, the base's state dict, an input, the saved model's output)"""
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    model = perturb(attach(base, PreProjConfig(layers=[-1])))
    x = images(model)
    with torch.no_grad():
        return save(model, tmp_path / "adapter"), weights, x, model(x)


def fresh(weights, **kwargs):
    model = tiny(FAMILY, **kwargs)
    model.load_state_dict(weights)
    return model


def test_only_the_new_parameters_are_written_and_come_back_exactly(saved):
    folder, weights, x, expected = saved
    files = ["README.md", "preproj.json", "preproj.safetensors"]
    assert sorted(p.name for p in folder.iterdir()) == files
    assert set(load_file(folder / "preproj.safetensors")) == {
        f"blocks.1.attn.preproj.{part}.weight" for part in ("up", "down", "skip")
    }
    model = load(fresh(weights), folder)
    assert list(preproj_modules(model)) == ["blocks.1.attn.preproj"]
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    detach(model)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_the_config_names_the_base(saved):
    described = json.loads((saved[0] / "preproj.json").read_text())
    assert described["config"]["layers"] == [-1]
    base = described["base"]
    assert base["name"] == "vit_small_patch16_rope_224.naver_in1k"
    assert (base["architecture"], base["width"], base["depth"]) == ("Eva", 384, 2)
    assert base["fingerprint"].startswith("sha256:")


def test_a_head_that_trained_is_saved_and_restored(base, tmp_path):
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    model = freeze_base(perturb(attach(base)), also=["head"])
    with torch.no_grad():
        model.head.weight.add_(1.0)
    folder = save(model, tmp_path)
    other = load(fresh(weights), folder)
    assert torch.equal(other.head.weight, model.head.weight)
    again = save(other, tmp_path / "again")
    assert (again / "preproj.json").read_text() == (folder / "preproj.json").read_text()


def test_the_same_base_in_another_precision_is_the_same_base(saved):
    folder, weights, _, _ = saved
    model = load(fresh(weights).to(torch.bfloat16), folder)
    new = load_file(folder / "preproj.safetensors")["blocks.1.attn.preproj.up.weight"]
    assert torch.equal(model.blocks[1].attn.preproj.up.weight, new.to(torch.bfloat16))


def test_other_weights_are_refused_unless_allowed(saved):
    folder, weights, _, _ = saved
    weights = {**weights, "blocks.0.mlp.fc1.weight": weights["blocks.0.mlp.fc1.weight"] + 0.1}
    model = fresh(weights)
    with pytest.raises(ValueError, match="with other weights than this model .* allow_other_base"):
        load(model, folder)
    assert not preproj_modules(model)
    assert preproj_modules(load(model, folder, allow_other_base=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, kwargs, told",
    [
        ("vit", {}, "'architecture': 'Eva', 'width': 384.* 'VisionTransformer', 'width': 192"),
        (FAMILY, {"depth": 3}, "'depth': 2.*'depth': 3"),
        (FAMILY, {"embed_dim": 192}, "'width': 384.*'width': 192"),
    ],
)
def test_another_architecture_is_refused_with_both(saved, family, kwargs, told):
    model = tiny(family, **kwargs)
    with pytest.raises(ValueError, match=told):
        load(model, saved[0], allow_other_base=True)
    assert not preproj_modules(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, told",
    [
        (lambda t: t.pop("blocks.1.attn.preproj.up.weight"), "missing: blocks.1.*up.weight"),
        (lambda t: t.update(stray=torch.ones(2)), "unknown: stray"),
        (
            lambda t: t.update({"blocks.1.attn.preproj.skip.weight": torch.ones(2, 2)}),
            r"another shape .*skip.weight \(384, 384\) \(2, 2\)",
        ),
        (
            lambda t: t.update({"blocks.1.attn.preproj.skip.weight": torch.ones(384, 384).int()}),
            r"no finite numbers .*skip.weight \(torch.int32\)",
        ),
        (
            lambda t: t["blocks.1.attn.preproj.up.weight"].fill_(torch.nan),
            r"no finite numbers .*up.weight \(torch.float32\)",
        ),
        (
            lambda t: t.update({"blocks.1.attn.preproj.up.weight": torch.ones(3, 384)}),
            r"its own config: expansion is 1.25, but .*up.weight is \(3, 384\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_changed(saved, change, told):
    folder, weights, _, _ = saved
    tensors = load_file(folder / "preproj.safetensors")
    change(tensors)
    save_file(tensors, folder / "preproj.safetensors")
    model = fresh(weights)
    with pytest.raises(ValueError, match=told):
        load(model, folder)
    assert not preproj_modules(model)


def test_filling_in_an_attached_model_needs_the_same_config(saved):
    folder, weights, x, expected = saved
    model = attach(fresh(weights), PreProjConfig(layers=[-1]))
    with torch.no_grad():
        assert torch.equal(load(model, folder)(x), expected)
    with pytest.raises(ValueError, match="but the model carries PreProjConfig"):
        load(attach(fresh(weights)), folder)


def test_folders_that_are_none_are_refused(base, tmp_path):
    with pytest.raises(ValueError, match="not attached to Eva"):
        save(base, tmp_path)
    with pytest.raises(ValueError, match="compiled: give the model inside"):
        save(torch.compile(base), tmp_path)
    with pytest.raises(FileNotFoundError, match="has no preproj.json"):
        load(base, tmp_path)
    attach(base)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; save takes a folder"):
        save(base, tmp_path / "file")


def test_a_model_that_lost_a_block_is_not_saved(base, tmp_path):
    attach(base)
    detach(base.blocks[0])
    with pytest.raises(ValueError, match="'blocks.0.attn.preproj' does not agree"):
        save(base, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "content, told",
    [
        ("{", "cannot be read"),
        ('{"format": 99}', "format 99, this version of mmpreproj reads 1"),
        ('{"format": 1}', r"no \['also', 'base', 'config'\]"),
        ("[" * 100_000 + "]" * 100_000, "preproj.json is not read: its JSON is nested too deeply"),
        ("null", "preproj.json holds None, which is no object"),
    ],
)
def test_a_broken_config_says_so(saved, content, told):
    folder, weights, _, _ = saved
    (folder / "preproj.json").write_text(content)
    with pytest.raises(ValueError, match=told):
        load(fresh(weights), folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "field, value, told",
    [
        ("base", None, "base must be an object, found None"),
        ("also", "head", "also must be paths, found 'head'"),
        ("config", {"expansion": 10**400}, "expansion must be a number above 0, found 1000"),
        ("config", {"attention": 1}, "attention must be a path with a [*] for the block, found 1"),
        ("config", {"expansion": 1e12}, "expansion is 1000000000000.0, but .*weight is .*480"),
        ("config", {"layers": [7]}, "does not fit this model: .*no block 7"),
    ],
)
def test_a_config_of_other_types_or_sizes_says_so_and_nothing_is_changed(saved, field, value, told):
    folder, weights, _, _ = saved
    described = json.loads((folder / "preproj.json").read_text())
    (folder / "preproj.json").write_text(json.dumps(described | {field: value}))
    model = fresh(weights)
    with pytest.raises(ValueError, match=f"{folder}.*{told}"):
        load(model, folder)
    assert "preproj_attachment" not in vars(model) and not preproj_modules(model)


def test_a_load_that_fails_leaves_an_earlier_freeze_base_as_it_was(saved):
    folder, weights, _, _ = saved
    model = freeze_base(fresh(weights), also=["head"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight.add_(0.1)  # another base
    with pytest.raises(ValueError, match="with other weights"):
        load(model, folder)
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"head.weight", "head.bias"}
    model = freeze_base(attach(model, PreProjConfig(layers=[-1])), also=["head"])
    detach(model)
    assert all(p.requires_grad for p in model.parameters())  # what freeze_base began with


def test_a_truncated_weight_file_says_so(saved):
    folder, weights, _, _ = saved
    file = folder / "preproj.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        load(fresh(weights), folder)


def test_a_folder_from_before_a_stack_was_known_loads_onto_the_stacks_it_has(tmp_path):
    transformers_models = pytest.importorskip("transformers_models")
    model = perturb(attach(transformers_models.tiny("t5"), PreProjConfig(within="encoder")))
    weights = {k: v for k, v in model.state_dict().items() if "preproj" not in k}
    folder = save(model, tmp_path / "adapter")
    described = json.loads((folder / "preproj.json").read_text())
    del described["config"]["within"]  # as it was written when no decoder was known
    (folder / "preproj.json").write_text(json.dumps(described))
    other = transformers_models.tiny("t5")
    other.load_state_dict(weights)
    load(other, folder)
    assert list(preproj_modules(other)) == list(preproj_modules(model))
    x = transformers_models.inputs(model)
    assert torch.equal(*(transformers_models.outputs(m, x) for m in (model, other)))
    save(other, tmp_path / "again")
    tensors = load_file(folder / "preproj.safetensors")
    for name in [name for name in tensors if ".block.1." in name]:
        del tensors[name]
    save_file(tensors, folder / "preproj.safetensors")  # half a stack is a fault
    with pytest.raises(ValueError, match="does not fit this model|was saved from"):
        load(detach(other), folder)
