import json
import pickle

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset
from training_data import TinyData, trainer

transformers = pytest.importorskip("transformers")

from transformers_models import BASE, BERT, IMAGE, V_JEPA, VIDEO, randomise  # noqa: E402

import mmpreproj  # noqa: E402
from mmpreproj import PreProjConfig  # noqa: E402
from mmpreproj.backbones.hf_families import FAMILIES  # noqa: E402
from mmpreproj.backbones.hf_inputs import PREPROCESSOR_FILES, input_of  # noqa: E402
from mmpreproj.backbones.hf_vision import create_hf_classifier  # noqa: E402
from mmpreproj.training import ImageClassifier, VideoClassifier, build  # noqa: E402
from mmpreproj.training.recipe import OptimizerConfig, make_optimizer  # noqa: E402

CLASSES = 5
TOWERS = {"text_config": dict(BERT), "vision_config": dict(IMAGE)}
JOINT = {**VIDEO, "attention_type": "joint_space_time"}

# transformers' class of the saved model, and its configuration's class and keywords
IMAGES = {
    "beit": (
        "BeitForImageClassification",
        ("BeitConfig", {**IMAGE, "use_relative_position_bias": True, "use_mask_token": True}),
    ),
    "clip": ("CLIPForImageClassification", ("CLIPConfig", TOWERS)),
    "deit": ("DeiTForImageClassification", ("DeiTConfig", IMAGE)),
    "deit_distilled": ("DeiTForImageClassificationWithTeacher", ("DeiTConfig", IMAGE)),
    "dinov2": ("Dinov2ForImageClassification", ("Dinov2Config", IMAGE)),
    "siglip": ("SiglipForImageClassification", ("SiglipConfig", TOWERS)),
    "vit": ("ViTForImageClassification", ("ViTConfig", IMAGE)),
}
CLIPS = {
    "timesformer": ("TimesformerForVideoClassification", ("TimesformerConfig", VIDEO)),
    "timesformer_joint": ("TimesformerForVideoClassification", ("TimesformerConfig", JOINT)),
    "videomae": ("VideoMAEForVideoClassification", ("VideoMAEConfig", VIDEO)),
    "vivit": (
        "VivitForVideoClassification",
        ("VivitConfig", {**VIDEO, "tubelet_size": [2, 8, 8]}),
    ),
    "vjepa2": (
        "VJEPA2ForVideoClassification",
        ("VJEPA2Config", {**BASE, **V_JEPA, "num_pooler_layers": 1}),
    ),
}
CASES = {**IMAGES, **CLIPS}
# What stands outside of the trunk, read off the modelling code
HEADS = {
    "beit": ["beit.pooler", "classifier"],
    "deit_distilled": ["cls_classifier", "distillation_classifier"],
    "videomae": ["fc_norm", "classifier"],
    "vjepa2": ["pooler", "classifier"],
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


def reference(case, **changed):
    """A random classifier of transformers' own, as it would be fine-tuned somewhere."""
    model, (config, keywords) = CASES[case]
    config = getattr(transformers, config)(**{**keywords, **changed})
    config.num_labels = CLASSES
    return randomise(getattr(transformers, model)(config)).eval()


def saved(case, folder, **changed):
    model = reference(case, **changed)
    model.save_pretrained(folder)
    return model


def built(folder, num_classes=CLASSES, model_args=None, pretrained=True, **keywords):
    return build.build_model(f"hf:{folder}", num_classes, model_args, pretrained, **keywords)


def inputs(model, batch=2):
    dtype = next(model.parameters()).dtype
    return torch.randn(batch, *build.input_config(model)["input_size"], dtype=dtype)


@torch.no_grad()
def transformers_logits(model, x):
    """x as our models take it: [B, C, H, W] or [B, C, T, H, W]."""
    x = x if x.ndim == 4 else x.permute(0, 2, 1, 3, 4)
    return model(**{model.main_input_name: x}).logits


@torch.no_grad()
def logits(model, x):
    return model(x)


@pytest.mark.parametrize("case", CASES)
def test_loaded_logits_are_those_of_transformers_and_attached_bit_identical(case, tmp_path):
    theirs = saved(case, tmp_path)
    model = built(tmp_path, preproj=PreProjConfig()).eval()
    x = inputs(model)
    expected = transformers_logits(theirs, x)
    assert expected.shape == (2, CLASSES) and expected.std() > 0.01
    assert torch.equal(logits(model, x), expected)
    assert model.num_classes == CLASSES
    sites = 4 if case == "timesformer" else 2  # divided attention: two in each of the blocks
    assert len(mmpreproj.preproj_modules(model)) == sites
    mmpreproj.detach(model)
    assert torch.equal(logits(model, x), expected)


@pytest.mark.parametrize("case", CASES)
def test_every_trainable_parameter_gets_a_gradient(case, tmp_path):
    saved(case, tmp_path)
    model = built(tmp_path, preproj=PreProjConfig(init_std=0.1))
    model(inputs(model)).square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    for module in mmpreproj.preproj_modules(model).values():
        assert all(p.grad.abs().max() > 0 for p in module.parameters())


@pytest.mark.parametrize("case", CASES)
def test_frozen_only_the_method_and_the_head_train(case, tmp_path):
    saved(case, tmp_path)
    model = built(tmp_path, preproj=PreProjConfig())
    build.freeze(model)
    build.set_frozen_modes(model.train())
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
    build.freeze(model)
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


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_checkpointing_recomputes_every_block_frozen_or_not(case, frozen, tmp_path):
    saved(case, tmp_path)
    model = built(tmp_path, preproj=PreProjConfig(init_std=0.1))
    if frozen:
        build.freeze(model)
    x, found = inputs(model), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.train()
        if frozen:
            build.set_frozen_modes(model)
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
    build.freeze(model)
    model.set_grad_checkpointing()
    build.set_frozen_modes(model.train())
    x = inputs(model, batch=8)
    assert torch.equal(logits(model, x), logits(model.eval(), x))


@pytest.mark.parametrize("case", ["deit_distilled", "vjepa2"])
def test_a_reset_head_keeps_precision_and_leaves_the_rest(case, tmp_path):
    saved(case, tmp_path)
    model = built(tmp_path, preproj=PreProjConfig(init_std=0.1)).bfloat16().eval()
    kept = {n: p.clone() for n, p in model.named_parameters() if "classifier" not in n}
    model.reset_classifier(7)
    x = inputs(model)
    assert logits(model, x).shape == (2, 7) and logits(model, x).dtype == torch.bfloat16
    model.reset_classifier(0)
    assert not any("classifier" in name for name in build.classifier_names(model))
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


# ---- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_classifier_of_another_width_is_fresh_and_the_rest_is_loaded(case, tmp_path):
    theirs = saved(case, tmp_path).state_dict()
    model = built(tmp_path, 3)
    own = model.state_dict()
    fresh = {key for key in own if "classifier." in key}
    for key in own.keys() - fresh:
        assert torch.equal(own[key], theirs[key.removeprefix("model.")]), key
    std = 32**-0.5 if case in ("clip", "siglip") else 0.02  # of transformers, width 32
    for key in fresh:
        assert own[key].shape[0] == 3
        limit = 5 * std if key.endswith("weight") else 0.0  # the saved ones: 0.2, biases too
        assert own[key].abs().max() <= limit, key


def test_weights_of_the_trunk_alone_leave_the_whole_head_fresh(tmp_path):
    for case, base in (("videomae", "videomae"), ("vjepa2", "vjepa2"), ("vit", "vit")):
        theirs = getattr(saved(case, tmp_path / "headed"), base)
        theirs.save_pretrained(tmp_path / case)
        model = built(tmp_path / case, 3)
        own = getattr(model.model, base).state_dict()
        for key, tensor in own.items():
            assert torch.equal(tensor, theirs.state_dict()[key]), key
        assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
def test_the_image_tower_of_a_whole_model_is_taken(family, tmp_path):
    config = getattr(transformers, f"{family}Config")(**TOWERS)
    whole = randomise(getattr(transformers, f"{family}Model")(config))
    whole.save_pretrained(tmp_path)
    model = built(tmp_path, 3)
    theirs = whole.vision_model.state_dict()
    for key, tensor in model.model.vision_model.state_dict().items():
        assert torch.equal(tensor, theirs[key]), key


def edit(folder, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_missing_tensor_of_the_trunk_or_half_a_head_is_named(tmp_path):
    saved("vjepa2", tmp_path)
    lost = "pooler.cross_attention_layer.mlp.fc1.weight"
    edit(tmp_path, lambda tensors: tensors.pop(lost))
    with pytest.raises(ValueError, match=f"do not make up the model: 1 tensors.*{lost}"):
        built(tmp_path)
    saved("videomae", tmp_path)
    lost = "videomae.encoder.layer.1.attention.value.weight"
    edit(tmp_path, lambda tensors: tensors.pop(next(k for k in tensors if k.startswith(lost[:30]))))
    with pytest.raises(ValueError, match="do not make up the model: 1 tensors.*layer.1.attention"):
        built(tmp_path)


def test_weights_saved_with_the_method_in_them_are_refused(tmp_path):
    mmpreproj.attach(reference("vit")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tensors of the method beside the base's.*mmpreproj.save"):
        built(tmp_path)


def test_half_precision_weights_become_float32(tmp_path):
    theirs = reference("vit").to(torch.float16)
    theirs.save_pretrained(tmp_path)
    for pretrained in (True, False):
        model = built(tmp_path, pretrained=pretrained)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        same = torch.equal(model.model.vit.layernorm.weight, theirs.vit.layernorm.weight.float())
        assert same == pretrained


def test_without_pretrained_the_weights_are_drawn_by_the_seed(tmp_path):
    saved("vit", tmp_path)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(built(tmp_path, pretrained=False))
    x = inputs(models[0])
    assert torch.equal(logits(models[0].eval(), x), logits(models[1].eval(), x))


def test_code_in_a_weights_file_is_not_run(tmp_path):
    saved("vit", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    marker = tmp_path / "ran"

    class Payload:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Payload()}, protocol=2))
    with pytest.raises(ValueError, match="weights of hf:.* cannot be loaded"):
        built(tmp_path)
    assert not marker.exists()


def test_code_that_comes_with_a_configuration_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}})
    )
    (tmp_path / "own.py").write_text("open('ran', 'w')")
    with pytest.raises(ValueError, match="without running code"):
        built(tmp_path)
    assert not (tmp_path / "ran").exists()


# ---- fields, sizes, frames ----------------------------------------------------------------------


def test_fields_of_the_configuration_can_be_changed(tmp_path):
    saved("timesformer", tmp_path / "divided")
    args = {"attention_type": "joint_space_time", "hidden_dropout_prob": 0.3, "num_frames": 4}
    model = built(tmp_path / "divided", model_args=args)
    assert not any("temporal" in name for name, _ in model.named_parameters())
    assert model.model.timesformer.embeddings.pos_drop.p == 0.3
    saved("vjepa2", tmp_path / "rotary")  # no tables of positions: weights fit every size
    model = built(tmp_path / "rotary", model_args={"num_frames": 6, "img_size": 24})
    assert build.input_config(model)["input_size"] == [3, 6, 24, 24]
    saved("clip", tmp_path / "towers")
    args = {"image_size": 24, "attention_dropout": 0.2}
    model = built(tmp_path / "towers", model_args=args, pretrained=False)
    assert model.config.vision_config.image_size == 24
    assert logits(model, inputs(model)).shape == (2, CLASSES)


@pytest.mark.parametrize(
    ("case", "args", "message"),
    [
        ("videomae", {"num_frame": 8}, "no field 'num_frame'; close matches: num_frames"),
        ("videomae", {"num_frames": "many"}, "does not take model_args=.*num_frames"),
        ("videomae", {"num_frames": 5}, "5 frames do not divide into tubelets of 2"),
        ("vit", {"image_size": 20}, "20x20 px do not divide into patches of 8x8"),
        ("vit", {"num_frames": 4}, "no field 'num_frames'"),
        ("vit", {"img_size": 24, "image_size": 32}, "gives image_size twice"),
        ("vit", {"num_labels": 4}, "model_args holds num_labels"),
        ("vit", {"hidden_act": "spline"}, "cannot be built: .*spline"),
        ("dinov2", {"image_size": [16, 24]}, "square images only, found 16x24"),
        ("timesformer", {"attention_type": "space_only"}, "space_only gives logits for each frame"),
        ("timesformer", {"attention_type": "spiral"}, "spiral"),
    ],
)
def test_fields_that_do_not_fit_name_themselves(case, args, message, tmp_path):
    saved(case, tmp_path)
    with pytest.raises(ValueError, match=message):
        built(tmp_path, model_args=args, pretrained=False)


def test_tables_of_another_size_are_refused_with_both_shapes(tmp_path):
    for case, args, shapes in (
        ("vit", {"image_size": 24}, r"position_embeddings.*\[1, 5, 32\].*\[1, 10, 32\]"),
        ("vivit", {"num_frames": 8}, r"position_embeddings.*\[1, 9, 32\].*\[1, 17, 32\]"),
        ("timesformer", {"num_frames": 8}, r"time_embeddings.*\[1, 4, 32\].*\[1, 8, 32\]"),
    ):
        saved(case, tmp_path / case)
        with pytest.raises(ValueError, match=shapes):
            built(tmp_path / case, model_args=args)
    # VideoMAE's table is computed, not learned: its weights fit any number of frames
    theirs = saved("videomae", tmp_path / "videomae")
    model = built(tmp_path / "videomae", model_args={"num_frames": 8}).eval()
    longer = reference("videomae", num_frames=8)
    longer.load_state_dict(theirs.state_dict())
    x = inputs(model)
    assert x.shape[2] == 8 and torch.equal(logits(model, x), transformers_logits(longer, x))


@pytest.mark.parametrize("frames", [2, 8])
@pytest.mark.parametrize("case", ["videomae", "vivit", "timesformer"])
def test_another_number_of_frames_is_refused_where_the_model_is_fixed(case, frames, tmp_path):
    saved(case, tmp_path)
    model = built(tmp_path)
    with pytest.raises(ValueError, match=f"clips of 4 frames, found {frames}"):
        model(torch.randn(1, 3, frames, 16, 16))
    with pytest.raises(ValueError, match=f"clips of 4 frames, found {frames}"):
        build.check_image_size(model, {"input_size": [3, frames, 16, 16]})
    build.check_image_size(model, {"input_size": [3, 4, 16, 16]})


@pytest.mark.parametrize("frames", [2, 8])
@pytest.mark.parametrize("case", ["vjepa2", "timesformer_joint"])
def test_models_that_adapt_to_other_frames_equal_one_built_for_them(case, frames, tmp_path):
    theirs = saved(case, tmp_path)
    model = built(tmp_path).eval()
    key = "frames_per_clip" if case == "vjepa2" else "num_frames"
    other = reference(case, **{key: frames})
    state = theirs.state_dict()
    table = "timesformer.embeddings.time_embeddings"
    if table in state:  # the nearest of the 4 frames: frame i of n is i · 4 / n
        state[table] = state[table][:, [i * 4 // frames for i in range(frames)]]
    other.load_state_dict(state)
    x = torch.randn(2, 3, frames, 16, 16)
    assert torch.equal(logits(model, x), transformers_logits(other, x))
    build.check_image_size(model, {"input_size": [3, frames, 16, 16]})


def test_inputs_of_another_kind_or_size_are_refused(tmp_path):
    saved("vjepa2", tmp_path / "clips")
    saved("vit", tmp_path / "images")
    video, image = built(tmp_path / "clips"), built(tmp_path / "images")
    for model, shape, message in (
        (video, (1, 3, 3, 16, 16), "tubelets of 2, found 3 frames"),
        (video, (1, 3, 4, 24, 24), "takes 16x16 px, found 24x24"),
        (video, (1, 3, 16, 16), r"takes clips \[B, 3, T, H, W\], found \[1, 3, 16, 16\]"),
        (video, (1, 4, 3, 16, 16), r"takes clips \[B, 3, T, H, W\], found \[1, 4, 3, 16, 16\]"),
        (image, (1, 3, 24, 16), "takes 16x16 px, found 24x16"),
        (image, (1, 3, 4, 16, 16), r"takes images \[B, 3, H, W\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(torch.randn(shape))
    with pytest.raises(ValueError, match="the data give clips, HFClassifier takes images"):
        build.check_image_size(image, {"input_size": [3, 4, 16, 16]})
    with pytest.raises(ValueError, match="the data give images, HFClassifier takes clips"):
        build.check_image_size(video, {"input_size": [3, 16, 16]})
    with pytest.raises(ValueError, match="takes 16x16 px, found 32x32"):
        build.check_image_size(image, {"input_size": [3, 32, 32]})


def test_sizes_that_are_not_square_run_where_the_model_takes_them(tmp_path):
    for case, args in (("vit", {"image_size": [16, 24]}), ("videomae", {"image_size": [24, 16]})):
        saved(case, tmp_path / case)
        model = built(tmp_path / case, model_args=args, pretrained=False)
        assert build.input_config(model)["input_size"][-2:] == args["image_size"]
        assert logits(model, inputs(model)).shape == (2, CLASSES)
    theirs = saved("dinov2", tmp_path / "dinov2")
    model = built(tmp_path / "dinov2").eval()
    x = torch.randn(2, 3, 16, 32)
    assert torch.equal(logits(model, x), transformers_logits(theirs, x))
    with pytest.raises(ValueError, match="patches of 8x8 px, found 16x20 px"):
        model(torch.randn(1, 3, 16, 20))


# ---- what it is fed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "BitImageProcessor",  # DINOv2's
        "CLIPImageProcessor",
        "SiglipImageProcessor",
        "ViTImageProcessor",
        "VideoMAEVideoProcessor",
        "VivitImageProcessor",
        "VivitVideoProcessor",
    ],
)
def test_mean_and_std_give_what_the_processor_gives(name, tmp_path):
    processor = getattr(transformers, name)()
    processor.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.json")
    assert file.name in PREPROCESSOR_FILES
    found = input_of(json.loads(file.read_text()))
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    fed = [frame.permute(1, 2, 0).numpy() for frame in pixels]
    clip = "Video" in name or "Vivit" in name
    out = processor(
        [fed] if clip else fed, do_resize=False, do_center_crop=False, return_tensors="pt"
    )["pixel_values"]
    mean, std = (torch.tensor(found[key]).view(3, 1, 1) for key in ("mean", "std"))
    ours = (pixels / 255 - mean) / std
    torch.testing.assert_close(ours, out.reshape(ours.shape).float(), rtol=0, atol=1e-5)


def test_size_crop_and_interpolation_come_from_the_preprocessing_file(tmp_path):
    saved("dinov2", tmp_path)
    crop = {"height": 32, "width": 32}
    settings = {"size": {"shortest_edge": 40}, "crop_size": crop, "do_center_crop": True}
    settings |= {"resample": 3, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(settings))
    config = build.input_config(built(tmp_path))
    assert config["input_size"] == [3, 32, 32]  # DINOv2 adapts: what it is fed, not its table's
    assert (config["crop_pct"], config["crop_mode"]) == (0.8, "center")
    assert config["interpolation"] == "bicubic"
    assert config["mean"] == pytest.approx([0.1, 0.2, 0.3])
    assert config["std"] == pytest.approx([0.4, 0.5, 0.6])
    file.write_text(json.dumps({"size": {"height": 20, "width": 20}, "resample": 2}))
    saved("vit", tmp_path)
    config = build.input_config(built(tmp_path))
    assert config["input_size"] == [3, 16, 16]  # fixed, whatever the file says
    assert (config["crop_pct"], config["crop_mode"]) == (1.0, "squash")
    assert config["interpolation"] == "bilinear" and config["mean"] == [0.5, 0.5, 0.5]
    file.write_text("[1")
    with pytest.raises(ValueError, match="preprocessor_config.json cannot be read"):
        built(tmp_path)


def test_input_configs_are_plain_types(tmp_path):
    for case in ("vit", "videomae"):
        saved(case, tmp_path / case)
        config = build.input_config(built(tmp_path / case))
        assert json.loads(json.dumps(config)) == config
    assert config["input_size"] == [3, 4, 16, 16]


# ---- names --------------------------------------------------------------------------------------


def test_names_without_the_prefix_say_what_to_write():
    with pytest.raises(ValueError, match="write hf:MCG-NJU/videomae-base"):
        build.check_name("MCG-NJU/videomae-base")
    build.check_name("hf:MCG-NJU/videomae-base")
    with pytest.raises(ValueError, match="'hf:' is not a timm model"):
        build.check_name("hf:")


def test_weights_of_a_file_are_for_timms_models(tmp_path):
    with pytest.raises(ValueError, match="go with timm's models.*pretrained: true"):
        built(tmp_path, pretrained=False, weights=tmp_path / "model.safetensors")


def test_what_is_not_there_is_told(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        create_hf_classifier(tmp_path / "none", 3)
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        create_hf_classifier(tmp_path, 3)
    monkeypatch.setattr("mmpreproj.backbones.hub.reachable", lambda endpoint: False)
    with pytest.raises(ConnectionError, match="someone/no-such-model is no local folder"):
        create_hf_classifier("someone/no-such-model", 3, pretrained=True)
    saved("vit", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="weights of hf:.* cannot be loaded"):
        built(tmp_path)


def test_what_is_in_the_hubs_cache_needs_no_network(tmp_path, monkeypatch):
    theirs = saved("vit", tmp_path)

    def cached(repository, file, **keywords):
        assert repository == "someone/tiny"
        return str(tmp_path / file) if (tmp_path / file).exists() else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    monkeypatch.setattr("mmpreproj.backbones.hub.reachable", lambda endpoint: pytest.fail("asked"))
    model = build.build_model("hf:someone/tiny", CLASSES, pretrained=True).eval()
    x = inputs(model)
    assert torch.equal(logits(model, x), transformers_logits(theirs, x))


def test_another_architecture_names_those_that_are_supported(tmp_path):
    transformers.ResNetConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type 'resnet'; supported are .*videomae"):
        built(tmp_path)
    assert {name.split("_")[0] for name in CASES} | {"dinov3"} == {
        name.split("_")[0] for name in FAMILIES
    }
