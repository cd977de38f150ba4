"""A frozen probe of the last layers: nothing is kept or computed backwards below them."""

import pytest
import timm
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mmpreproj
from mmpreproj.backbones import building
from mmpreproj.backbones.lm.lm_head import lm_head_of
from mmpreproj.training.lm_loss import lm_loss
from mmpreproj.training.sharding import blocks_of

DEPTH = 6


def llama(layers):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=DEPTH,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    mmpreproj.freeze_base(mmpreproj.attach(model, mmpreproj.PreProjConfig(layers=layers)))
    ids = torch.randint(64, (2, 16))
    head = lm_head_of(model)
    return model, lambda: lm_loss(model, ids, ids, head=head)[0]


def vit(layers):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=DEPTH, num_classes=3)
    mmpreproj.attach(model, mmpreproj.PreProjConfig(layers=layers))
    building.freeze(model)
    return model, lambda: model(torch.randn(2, 3, 32, 32)).square().sum()


def cost(make, layers):
    """(blocks whose output has a gradient, autograd nodes, bytes kept for them) of a step."""
    torch.manual_seed(0)
    model, loss_of = make(layers)
    differentiable, kept = [], {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for block in blocks_of(model):
        block.register_forward_hook(
            lambda module, args, out: differentiable.append(
                (out[0] if isinstance(out, tuple) else out).requires_grad
            )
        )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of()
    nodes, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [following for following, _ in node.next_functions]
    return differentiable, len(nodes), sum(kept.values())


@pytest.mark.parametrize("make", [llama, vit])
def test_a_probe_of_the_last_layers_costs_nothing_below_them(make):
    everywhere, all_nodes, all_bytes = cost(make, None)
    assert everywhere == [True] * DEPTH
    last, nodes, kept = cost(make, [-2, -1])
    assert last == [False] * (DEPTH - 2) + [True] * 2
    # each block adds as much: two of six are not charged for the four below
    one = cost(make, [-1])
    assert nodes - one[1] == pytest.approx((all_nodes - one[1]) / (DEPTH - 1), rel=0.02)
    assert kept - one[2] == pytest.approx((all_bytes - one[2]) / (DEPTH - 1), rel=0.02)
