"""Recomputing the blocks of a frozen language model: only where none drops out by itself."""

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

from mmpreproj.backbones.modes import set_checkpointing, train_blocks  # noqa: E402

BIOGPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BIOGPT |= {"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
XGLM = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}
XGLM |= {"dropout": 0.0, "attention_dropout": 0.0}


@pytest.mark.parametrize("kind, config", [("biogpt", BIOGPT), ("xglm", XGLM)])
def test_blocks_that_drop_activations_by_themselves_are_refused(kind, config):
    ids = torch.arange(3, 10)[None]
    for rate in (0.0, 0.5):
        fields = {**config, "vocab_size": 99, "max_position_embeddings": 64}
        made = transformers.AutoConfig.for_model(kind, activation_dropout=rate, **fields)
        model = transformers.AutoModelForCausalLM.from_config(made).eval()
        expected = model(ids, use_cache=False).logits
        set_checkpointing(model)
        if rate:
            with pytest.raises(ValueError, match=r"switch its dropout on \(activation_dropout=0.5"):
                train_blocks(model)
        else:
            train_blocks(model)
            assert torch.equal(model(ids, use_cache=False).logits, expected)
