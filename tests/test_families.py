"""One family of each shape of block, through the outside check: attached, exact, in all its stacks.

`python tests/families.py` runs all of them; docs/models.md is made of what it prints.
"""

import logging
import warnings

import pytest

pytest.importorskip("transformers")

with warnings.catch_warnings():
    import families  # a command: it silences warnings and logging for itself

logging.disable(logging.NOTSET)

SHAPES = {
    "causal": [
        "llama",  # nothing between attention and the residual sum
        "gemma2",  # a norm there
        "granite",  # a constant
        "gptj",  # parallel
        "bloom",  # the attention adds the residual, from an argument of its own
        "ctrl",  # q, k and v given one by one
        "deepseek_v3",  # latent attention
        "jamba",  # a mixed stack
        "beam",  # a norm, then a constant, in a function
        "doge",  # the residual itself is scaled
        "inkling_text",  # a convolution behind the attention
    ],
    "masked": [
        "bert",  # projection, sum and norm in one module beside the attention
        "albert",  # in the attention's own module
        "big_bird",  # the attention is replaced as it runs
        "squeezebert",  # channels first
        "neomme",  # a stream that is mixed before its norm
        "reformer",  # reversible layers
    ],
    "seq2seq": ["mt5", "pegasus_x"],
    "image": ["cvt", "hiera", "swinv2"],  # convolutions, pooling, windows with a norm behind
    "image-text": ["internvl", "qwen2_vl"],  # a parameter as scale and no module behind; two towers
    "timm": ["cait", "visformer", "maxxvit"],
}


@pytest.mark.parametrize("kind, name", [(k, name) for k, names in SHAPES.items() for name in names])
def test_a_family_of_each_shape_of_block_is_exact(kind, name):
    verdict, detail = families.judge(kind, name)
    assert verdict == "exact", detail


@pytest.mark.parametrize(
    "kind, name, why",
    [
        ("causal", "mamba", "no transformer block"),
        ("causal", "hy_v4", "several residual streams"),
        ("causal", "zamba2", "channels and returns"),
        ("masked", "mobilebert", "read no one input"),
        ("image", "swiftformer", "no transformer block"),
    ],
)
def test_what_is_refused_is_refused_for_its_reason(kind, name, why):
    model, reason = families.built(kind, name)
    assert not reason
    with pytest.raises(ValueError, match=why):
        families.attach(model)
    assert not families.sites_of(model)
