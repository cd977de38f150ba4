"""attach and detach on transformers' architectures: identity, names, and the method's formula."""

import copy
import pickle

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from helpers import perturb  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers_models import (  # noqa: E402
    CASES,
    DECODERS,
    DEPTH,
    TIMESFORMER,
    WIDTH,
    inputs,
    outputs,
    tiny,
)

import mmpreproj  # noqa: E402
from mmpreproj import (  # noqa: E402
    PreProjConfig,
    attach,
    attach_block,
    detach,
    freeze_base,
    preproj_modules,
)

ALL = {**CASES, "timesformer": TIMESFORMER}
POST_NORM = {"olmo2", "opt_350m", "bert", "roberta", "electra", "deberta_v2", "distilbert", "bart"}


def expected_names(case):
    attentions = [case.attention]
    if case is TIMESFORMER:  # the temporal attention runs first
        attentions.insert(0, "temporal_attention")
    return [
        f"{block.format(index)}.{attention}.preproj"
        for block in case.blocks
        for index in range(DEPTH)
        for attention in attentions
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_attach_leaves_outputs_bit_identical_and_detach_gives_the_base_back(name, recwarn):
    model = tiny(ALL[name])
    x = inputs(model)
    before = outputs(model, x)
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]

    assert attach(model) is model
    assert torch.equal(outputs(model, x), before)
    assert list(preproj_modules(model)) == expected_names(ALL[name])
    assert [key for key in model.state_dict() if "preproj" not in key] == keys
    warned = any("is post-norm" in str(warning.message) for warning in recwarn)
    assert warned == (name in POST_NORM)

    perturb(model)
    assert not torch.allclose(outputs(model, x), before)
    detach(model)
    assert torch.equal(outputs(model, x), before)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == classes
    assert not any("preproj" in attribute for m in model.modules() for attribute in vars(m))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "bert", "dinov2", "gpt2"])
def test_bit_identity_holds_in_bfloat16_and_new_parameters_follow(name):
    model = tiny(name, torch.bfloat16)
    x = inputs(model)
    before = outputs(model, x)
    attach(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(outputs(model, x), before)


class Record:
    """What a submodule was called with and what it returned, in the model under test."""

    def __init__(self, model, path):
        module = model.get_submodule(path)
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.behind)

    def before(self, module, args, kwargs):
        self.args, self.kwargs = args, kwargs
        self.input = first(args) if args else kwargs["hidden_states"]

    def behind(self, module, args, output):
        self.output = first(output).clone()  # Falcon adds to its MLP's output in place


def first(value):
    return value[0] if isinstance(value, tuple) else value


def parts(model, path):
    """W_up, W_down and W_skip of one site, as matrices."""
    new = model.get_submodule(f"{path}.preproj")
    return new.up.weight, new.down.weight, new.skip.weight


def pre_projected(x_hat, w_up, w_down):
    return x_hat + F.silu(x_hat @ w_up.T) @ w_down.T


def assert_close(found, expected):
    """float64 carries 1e-16 a rounding; the rest is head-room for sums over a few dozen terms."""
    assert found.numel() == expected.numel()
    error = (found.reshape(expected.shape) - expected).abs().max() / expected.abs().max()
    assert error < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_residual_stream_after_attention_is_the_formula(name):
    """x + A(x̃) + W_skip · x̃, from modules of an untouched copy of the base and the new matrices."""
    case = CASES[name]
    base = tiny(case, torch.float64)
    model = perturb(attach(copy.deepcopy(base)))
    blocks = [block.format(index) for block in case.blocks for index in range(DEPTH)]
    seen = {
        path: [
            Record(model, path),
            Record(model, f"{path}.{case.attention}"),
            Record(model, f"{path}.{case.after or case.mlp}"),
        ]
        for path in blocks
    }
    caching = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    model(**inputs(model), **caching)

    for path, (of_block, of_attention, of_rest) in seen.items():
        block = base.get_submodule(path)
        w_up, w_down, w_skip = parts(model, f"{path}.{case.attention}")
        x = of_block.input
        x_hat = x if case.norm is None else block.get_submodule(case.norm)(x)
        assert_close(of_attention.input, x_hat)
        x_tilde = pre_projected(x_hat, w_up, w_down)
        kwargs = {key: v for key, v in of_attention.kwargs.items() if key != "hidden_states"}
        a = first(block.get_submodule(case.attention)(x_tilde, *of_attention.args[1:], **kwargs))
        expected = x + case.branch(block, a, x) + x_tilde @ w_skip.T
        if case.after is None:  # parallel: the MLP still reads x̂, and is added to the same sum
            assert_close(of_block.output - of_rest.output, expected)
        else:
            assert_close(of_rest.input, expected)


@torch.no_grad()
def test_divided_space_time_is_the_formula_twice():
    """Tokens stand patch by patch, each patch's frames together, behind one class token."""
    base = tiny(TIMESFORMER, torch.float64)
    model = perturb(attach(copy.deepcopy(base)))
    block, path = base.encoder.layer[0], "encoder.layer.0"
    whole, after = Record(model, path), Record(model, f"{path}.layernorm_after")
    model(**inputs(model))
    x = whole.input
    batch, frames, patches = len(x), 4, 4
    new = {name: parts(model, f"{path}.{name}") for name in ("temporal_attention", "attention")}

    def site(name, x_hat):
        x_tilde = pre_projected(x_hat, *new[name][:2])
        return block.get_submodule(name)(x_tilde)[0], x_tilde @ new[name][2].T

    cls, rest = x[:, :1], x[:, 1:]
    over_time = block.temporal_layernorm(rest.reshape(batch * patches, frames, WIDTH))
    a, skip = site("temporal_attention", over_time)
    rest = rest + block.temporal_dense(a.reshape(rest.shape)) + skip.reshape(rest.shape)

    over_space = rest.unflatten(1, (patches, frames)).transpose(1, 2).flatten(0, 1)
    tokens = torch.cat([cls.repeat_interleave(frames, dim=0), over_space], dim=1)
    total = sum(site("attention", block.layernorm_before(tokens)))
    total = total.unflatten(0, (batch, frames))
    rest = rest + total[:, :, 1:].transpose(1, 2).flatten(1, 2)
    assert_close(after.input, torch.cat([cls + total[:, :, 0].mean(1, keepdim=True), rest], dim=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, config, cross",
    [
        ("gpt2", {"add_cross_attention": True}, "crossattention"),
        ("bert", {"is_decoder": True, "add_cross_attention": True}, "crossattention.self"),
        ("t5", {}, "layer.1.EncDecAttention"),
        ("bart", {}, "encoder_attn"),
    ],
)
def test_cross_attention_is_never_taken(name, config, cross):
    model = tiny(name, **config)
    crossing = [m for path, m in model.named_modules() if path.endswith(cross)]
    classes = [type(m) for m in crossing]
    attach(model)
    assert crossing and [type(m) for m in crossing] == classes
    assert list(preproj_modules(model)) == expected_names(CASES[name])


def test_layers_count_in_each_stack():
    model = attach(tiny("t5"), PreProjConfig(layers=[-1]))
    assert list(preproj_modules(model)) == [
        f"{stack}.block.1.layer.0.SelfAttention.preproj" for stack in ("encoder", "decoder")
    ]


def test_each_stack_has_its_own_width():
    model = attach(tiny("vjepa2"))
    assert [m.dim for m in preproj_modules(model).values()] == [48, 48, 24, 24]


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "vit"])
def test_recorded_hidden_states_and_attentions_are_those_of_the_base(name):
    model = tiny(name, attn_implementation="eager")
    x = inputs(model)
    asked = {"output_hidden_states": True, "output_attentions": True}
    before = model(**x, **asked)
    attach(model)
    found = model(**x, **asked)
    for kind in ("hidden_states", "attentions"):
        assert len(found[kind]) == len(before[kind]) > 0
        assert all(map(torch.equal, found[kind], before[kind]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "granite", "bert", "beit", "t5"])
def test_copies_and_pickles_are_independent_and_equal(name):
    model = perturb(attach(tiny(name)))
    x = inputs(model)
    expected = outputs(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs(other, x), expected)
        perturb(other)
        assert not torch.equal(outputs(other, x), expected)
        assert torch.equal(outputs(model, x), expected)
        detach(other)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_gradient_checkpointing_gives_the_same_gradients_on_a_frozen_base(name):
    model = freeze_base(perturb(attach(tiny(name)))).train()
    x = inputs(model)

    def gradients():
        model.zero_grad()
        model(**x, use_cache=False).logits.square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = gradients()
    assert len(plain) == 3 * DEPTH and plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        assert gradient.abs().sum() > 0
        assert torch.allclose(gradient, checkpointed[name], rtol=1e-5, atol=1e-7), name
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiled_without_graph_breaks(name):
    model = perturb(attach(tiny(name)))
    x = inputs(model)
    expected = model(**x, use_cache=False).logits
    # aot_eager traces forward and backward as the compiler does, without generating code
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(**x, use_cache=False).logits, expected, atol=1e-4)


def test_attach_block_takes_one_block_with_all_its_attentions():
    block = attach_block(tiny(TIMESFORMER).encoder.layer[0])
    assert list(preproj_modules(block)) == ["temporal_attention.preproj", "attention.preproj"]


def test_an_architecture_that_nobody_listed_is_read_off_its_forward():
    config = transformers.Olmo3Config(**DECODERS["llama"].config[1])
    model = transformers.Olmo3ForCausalLM(config)
    by_hand = attach(
        copy.deepcopy(model),
        PreProjConfig(
            attention="model.layers.*.self_attn",
            join="model.layers.*.post_attention_layernorm",
        ),
    )
    assert list(preproj_modules(attach(model))) == list(preproj_modules(by_hand))


def test_a_subclass_is_read_as_what_it_runs():
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Named(LlamaDecoderLayer):
        pass

    class Handed(LlamaDecoderLayer):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    hidden = {"Handed": Handed, "F": LlamaDecoderLayer.forward}
    exec("class Hidden(Handed):\n def forward(self, *a, **k): return F(self, *a, **k)", hidden)
    x = inputs(tiny("llama"))
    for cls in (Named, Handed):
        model = tiny("llama")
        names = list(preproj_modules(attach(copy.deepcopy(model))))
        for layer in model.model.layers:
            layer.__class__ = cls
        before = outputs(model, x)
        assert torch.equal(outputs(attach(model), x), before)
        assert list(preproj_modules(model)) == names
    for layer in detach(model).model.layers:
        layer.__class__ = hidden["Hidden"]  # whose source cannot be had
    with pytest.raises(ValueError, match="no transformer block that is known"):
        attach(model)


def refused(model, told, config=None):
    before = [(type(m), list(vars(m))) for m in model.modules()]
    with pytest.raises(ValueError, match=told):
        attach(model, config)
    assert [(type(m), list(vars(m))) for m in model.modules()] == before


def test_offloaded_and_silenced_bases_are_refused_before_anything_changes():
    accelerate = pytest.importorskip("accelerate")
    offloaded = tiny("gemma2")
    accelerate.cpu_offload(offloaded.model.layers[1], execution_device="cpu")
    refused(offloaded, "'model.layers.1.*' has a forward of its own")

    offloaded = tiny("llama")  # hooks on its projections alone
    accelerate.cpu_offload(offloaded, execution_device="cpu")
    refused(offloaded, "'model.layers.0.self_attn.q_proj' has a forward of its own")

    refused(tiny("granite", residual_multiplier=0.0), "residual_multiplier is 0")


def bitsandbytes_like(projection):
    projection.weight = torch.nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), False)


def gptq_like(projection):
    del projection.weight
    projection.register_buffer("qweight", torch.zeros(4, WIDTH, dtype=torch.int32))


def float8_like(projection):
    weight = projection.weight.data.to(torch.float8_e4m3fn)
    projection.weight = torch.nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize("pack", [bitsandbytes_like, gptq_like, float8_like])
def test_a_quantised_base_needs_the_dtype_of_the_new_parameters(pack):
    model = tiny("llama")
    for layer in model.model.layers:
        pack(layer.self_attn.q_proj)
    refused(model, r"packed weights \(torch\..*8|32\).* PreProjConfig\(dtype='bfloat16'\)")
    attach(model, PreProjConfig(dtype="bfloat16"))
    new = next(iter(preproj_modules(model).values()))
    assert new.up.weight.shape == (WIDTH * 5 // 4, WIDTH)
    assert new.up.weight.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_a_dynamically_quantised_base_is_exact_and_told_not_to_be_for_training(tmp_path):
    def quantised():
        torch.manual_seed(0)
        return torch.ao.quantization.quantize_dynamic(tiny("llama"), {torch.nn.Linear})

    model, ids = quantised(), torch.arange(6)[None]
    with torch.no_grad():
        base = model(ids).logits
        refused(model, r"packed weights \(torch.qint8\)")
        with pytest.warns(UserWarning, match="has no backward"):
            attach(model, PreProjConfig(dtype="float32"))
        assert torch.equal(model(ids).logits, base)
        for module in preproj_modules(model).values():
            module.skip.weight.normal_(std=0.1)
        moved = model(ids).logits
        assert not torch.equal(moved, base)
        mmpreproj.save(model, tmp_path)
        assert torch.equal(mmpreproj.load(quantised(), tmp_path)(ids).logits, moved)
        assert torch.equal(mmpreproj.detach(model)(ids).logits, base)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, targets", [("llama", ["q_proj"]), ("gpt2", ["c_attn"]), ("bert", ["query", "dense"])]
)
def test_attach_works_on_a_model_that_carries_lora(name, targets):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(
        target_modules=targets, init_lora_weights=False, fan_in_fan_out=name == "gpt2"
    )
    model = peft.get_peft_model(tiny(name), lora).eval()
    x = inputs(model)
    before = outputs(model, x)
    attach(model)
    assert torch.equal(outputs(model, x), before)
    assert [m.dim for m in preproj_modules(model).values()] == [WIDTH] * DEPTH
    detach(perturb(model))
    assert torch.equal(outputs(model, x), before)
