"""Models whose self-attentions are known without reading them."""

import pytest
import timm

import mmpreproj
from mmpreproj import architectures

transformers = pytest.importorskip("transformers")


def known_models():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    sizes["num_attention_heads"] = 2
    yield lambda: timm.create_model("vit_preproj_tiny", depth=2, content_skip=False)
    yield lambda: timm.create_model("video_vit_preproj_tiny", depth=2, content_skip=False)
    yield lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    for parallel in (True, False):
        config = transformers.GPTNeoXConfig(**sizes, use_parallel_residual=parallel)
        yield lambda config=config: transformers.GPTNeoXForCausalLM(config)


@pytest.mark.parametrize("build", list(known_models()))
def test_what_is_known_of_a_model_is_what_reading_it_finds(build, monkeypatch):
    model = build()
    if mmpreproj.preproj_modules(model):
        mmpreproj.detach(model)
    known = mmpreproj.describe(model)
    assert architectures.known_stack(model)
    monkeypatch.setattr(architectures, "MODELS", {})
    assert mmpreproj.describe(model) == known


@pytest.mark.parametrize(
    "keywords", [{"init_values": 0.1}, {"global_pool": "map"}, {"qkv_fused": False}]
)
def test_a_model_built_otherwise_is_read(keywords):
    """LayerScale moves the skip, an attention pool is left out: what is known does not say so."""
    model = timm.create_model("vit_preproj_tiny", depth=2, **keywords)
    assert architectures.known_stack(mmpreproj.detach(model)) is None
