"""The loss in pieces, against transformers' own and a NumPy float64 reference; its memory."""

import pytest

transformers = pytest.importorskip("transformers")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from transformers_models import VOCABULARY, inputs, tiny  # noqa: E402

from mmpreproj import attach, freeze_base  # noqa: E402
from mmpreproj.backbones.lm.lm_head import LMHead, lm_head_of  # noqa: E402
from mmpreproj.training import lm_loss as module  # noqa: E402
from mmpreproj.training.lm_loss import head_loss, lm_loss  # noqa: E402

MODELS = {
    "gpt_neox": {},
    "gpt_neox tied": {"tie_word_embeddings": True},
    "gptj": {},  # bias
    "gemma2": {},  # soft cap, tied
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.0625},  # tied
    "gpt2": {},
    "llama": {},
}
IGNORED = -100


def shifted(ids):
    """Inputs and targets, the first nine targets of the first text ignored."""
    x, y = ids[:, :-1], ids[:, 1:].clone()
    y[0, :9] = IGNORED
    return x, y


def labels(ids):
    """What makes transformers' own loss take the same targets: it shifts labels itself."""
    found = ids.clone()
    found[0, : 9 + 1] = IGNORED
    return found


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_error(found, expected):
    assert found.keys() == expected.keys()
    return max(
        ((found[n] - expected[n]).abs().max() / expected[n].abs().max()).item() for n in expected
    )


def own_loss(model, ids):
    """The model's own loss as a sum. It casts logits to float32, which float64 is to be kept from:
    there the same cross-entropy is taken of the model's logits."""
    x, y = shifted(ids)
    n = int((y != IGNORED).sum())
    own = model(ids, labels=labels(ids)).loss * n
    if next(model.parameters()).dtype != torch.float64:
        return own
    logits = model(x).logits
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
    assert abs(loss.item() / own.item() - 1) < 1e-6
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_models_own_in_float64(name):
    model = tiny(name.split()[0], torch.float64, **MODELS[name])
    ids = inputs(model, batch=2, tokens=40)["input_ids"]
    nll, n = lm_loss(model, *shifted(ids))
    found = gradients(model, nll)
    expected = own_loss(model, ids)
    assert n == 2 * 39 - 9
    assert abs(nll.item() / expected.item() - 1) < 1e-10
    assert largest_error(found, gradients(model, expected)) < 1e-10


# float32: its rounding, 6e-8, summed over 99 classes. Half precision: the logits' own rounding is
# the same in both, that of their gradients (4e-3 in bfloat16) is not.
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "dtype, autocast, loss_error, gradient_error",
    [
        ("float32", False, 2e-6, 1e-5),
        ("bfloat16", False, 1e-3, 3e-2),
        ("float32", True, 1e-3, 3e-2),
    ],
    ids=["float32", "bfloat16", "autocast"],
)
def test_loss_and_gradients_are_the_models_own_in(
    name, dtype, autocast, loss_error, gradient_error
):
    model = tiny(name.split()[0], getattr(torch, dtype), **MODELS[name])
    ids = inputs(model, batch=2, tokens=40)["input_ids"]
    lm_head_of(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        nll, _ = lm_loss(model, *shifted(ids))
        expected = own_loss(model, ids)
    assert nll.dtype == torch.float32
    found = gradients(model, nll)
    assert abs(nll.item() / expected.item() - 1) < loss_error
    assert largest_error(found, gradients(model, expected)) < gradient_error
    assert all(grad.dtype == getattr(torch, dtype) for grad in found.values())


@pytest.mark.parametrize("multiplier, cap", [(1.0, None), (0.25, None), (1.0, 5.0), (0.25, 5.0)])
@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pieces_add_up_to_the_formula(multiplier, cap, rows, dtype, monkeypatch):
    monkeypatch.setattr(module, "_LOGITS", rows * 31)
    layer = nn.Linear(6, 31).to(dtype)
    with torch.no_grad():
        layer.weight.mul_(20)  # logits of the cap's order
    hidden = torch.randn(4, 5, 6, dtype=dtype, requires_grad=True)
    targets = torch.randint(31, (4, 5))
    targets[1] = IGNORED
    nll, n = head_loss(LMHead(layer, multiplier, cap), hidden, targets)
    nll.backward()

    h, w, b = (t.detach().double().numpy() for t in (hidden, layer.weight, layer.bias))
    kept = targets.numpy() != IGNORED
    h, y = h[kept], targets.numpy()[kept]
    u = multiplier * (h @ w.T + b)
    z = u if cap is None else cap * np.tanh(u / cap)
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).sum()
    g = p - np.eye(31)[y]
    g *= multiplier * (1 if cap is None else 1 - (z / cap) ** 2)

    tolerance = {"rtol": 1e-10, "atol": 1e-11} if dtype == torch.float64 else {"atol": 3e-4}
    assert n == 15
    assert np.allclose(nll.item(), loss, **tolerance)
    assert np.allclose(hidden.grad.numpy()[kept], g @ w, **tolerance)
    assert not hidden.grad.numpy()[~kept].any()
    assert np.allclose(layer.weight.grad.numpy(), g.T @ h, **tolerance)
    assert np.allclose(layer.bias.grad.numpy(), g.sum(0), **tolerance)


def test_targets_are_not_shifted_again():
    """Logits that tell the token at hand: right for targets equal to the inputs, wrong for the
    texts' next tokens."""
    layer = nn.Linear(VOCABULARY, VOCABULARY, bias=False)
    with torch.no_grad():
        layer.weight.copy_(50 * torch.eye(VOCABULARY))
    ids = torch.arange(20).reshape(2, 10)
    hidden = F.one_hot(ids, VOCABULARY).float()
    assert head_loss(LMHead(layer), hidden, ids)[0] < 1e-3
    assert head_loss(LMHead(layer), hidden[:, :-1], ids[:, 1:])[0] > 50 * 17


def test_a_batch_in_two_halves_gives_the_same_gradient():
    """Sums over unequal texts, divided by the tokens of both: accumulation re-weights nothing."""
    model = tiny("gpt_neox", torch.float64)
    long, short = (inputs(model, 1, tokens)["input_ids"] for tokens in (51, 12))
    both = torch.zeros(2, 51, dtype=torch.long)
    both[0], both[1, :12] = long[0], short[0]
    x, y = both[:, :-1], both[:, 1:].clone()
    y[1, 11:] = IGNORED
    nll, n = lm_loss(model, x, y)
    assert n == 50 + 11
    whole = gradients(model, nll / n)
    parts = sum(lm_loss(model, t[:, :-1], t[:, 1:])[0] / n for t in (long, short))
    assert largest_error(gradients(model, parts), whole) < 1e-10


@pytest.mark.parametrize("name", ["gpt_neox", "gemma2"])
def test_nothing_to_predict_is_a_zero_with_a_gradient(name):
    model = tiny(name)
    ids = inputs(model)["input_ids"]
    nll, n = lm_loss(model, ids, torch.full_like(ids, IGNORED))
    nll.backward()
    assert (nll.item(), n) == (0.0, 0)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_frozen_head_gets_no_gradient_and_the_new_parameters_do(name, autocast):
    model = freeze_base(attach(tiny(name)))
    ids = inputs(model, tokens=12)["input_ids"]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        nll, n = lm_loss(model, ids[:, :-1], ids[:, 1:])
    (nll / n).backward()
    for key, parameter in model.named_parameters():
        # at the start W_down and W_skip are zero: W_up has no gradient yet
        moves = key.endswith(("preproj.down.weight", "preproj.skip.weight"))
        assert (parameter.grad is not None and parameter.grad.any().item()) == moves


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_evaluation_holds_no_graph_and_gives_the_same_number(name):
    model = tiny(name)
    ids = inputs(model)["input_ids"]
    trained = lm_loss(model, ids, ids)[0]
    with torch.inference_mode():
        nll, _ = lm_loss(model, ids, ids)
    assert nll.grad_fn is None
    assert nll.item() == pytest.approx(trained.item(), rel=1e-6)


def test_certain_and_hopeless_predictions_stay_finite():
    """-log p of 1e4 nats: p itself is zero in float32."""
    layer = nn.Linear(2, 4, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1e4, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))
    hidden = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    targets = torch.tensor([0, 1])
    for head in (LMHead(layer), LMHead(layer.bfloat16())):
        dtype = head.weight.dtype
        nll, _ = head_loss(head, hidden.to(dtype), targets)
        assert nll.item() == pytest.approx(1e4, rel=4e-3)


def test_shapes_that_differ_are_an_error_that_names_both():
    model = tiny("llama")
    ids = inputs(model)["input_ids"]
    with pytest.raises(ValueError, match=r"targets \[2, 6\] must have the shape .* \[2, 7\]"):
        lm_loss(model, ids, ids[:, 1:])


ROWS, WIDTH, CLASSES = 512, 16, 8192


def peak_bytes(run):
    """The most memory that `run` holds beyond what was there, by the allocator's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        run()
    events = told.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(np.cumsum([0] + [change for _, change in changes]))


@pytest.mark.slow
@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains", [False, True])
def test_peak_memory_stays_far_below_the_logits(cap, dtype, trains, monkeypatch):
    monkeypatch.setattr(module, "_LOGITS", 32 * CLASSES)  # 32 rows at a time
    layer = nn.Linear(WIDTH, CLASSES, bias=False).to(dtype).requires_grad_(trains)
    hidden = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(CLASSES, (ROWS,))
    logits = ROWS * CLASSES * 4

    def whole():
        z = F.linear(hidden, layer.weight).float()
        F.cross_entropy(z if cap is None else cap * torch.tanh(z / cap), targets).backward()

    def pieces():
        head_loss(LMHead(layer, soft_cap=cap), hidden, targets)[0].backward()

    assert peak_bytes(whole) > 2 * logits
    # pieces of a sixteenth: logits, probabilities and, with a cap, what they were and its slope;
    # beside them the head's gradients of 0.5 MB each (the logits have 16.8)
    assert peak_bytes(pieces) < (0.25 + (0.1 if trains else 0)) * logits
    if not trains:
        assert layer.weight.grad is None


def test_small_batches_do_not_hold_all_logits_either():
    layer = nn.Linear(WIDTH, CLASSES, bias=False).requires_grad_(False)
    hidden = torch.randn(64, WIDTH, requires_grad=True)
    targets = torch.randint(CLASSES, (64,))
    peak = peak_bytes(lambda: head_loss(LMHead(layer), hidden, targets)[0].backward())
    assert peak < 0.75 * 64 * CLASSES * 4
