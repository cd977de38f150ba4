"""Tiny random transformers models, one line an architecture, and what the formula says of each.

Paths and roles are written from the modelling code, not from the library's own table.
"""

import dataclasses
from collections.abc import Callable

import torch
import transformers

VOCABULARY, TOKENS, WIDTH, DEPTH = 99, 7, 32, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """One architecture. All but `blocks` are paths relative to the block.

    Args:
        model: the model's class.
        config: the configuration's class and keywords.
        blocks: paths of its blocks, one for each stack.
        attention: the self-attention.
        norm: the norm that x̂ comes from; None where the attention reads x itself.
        after: the module whose input is the residual stream after attention.
        mlp: in a parallel block, the module whose output is taken off the block's output instead.
        branch: (block, attention's output, block's input) -> the branch as it is added.
    """

    model: str
    config: tuple[str, dict]
    blocks: tuple[str, ...]
    attention: str
    norm: str | None = "input_layernorm"
    after: str | None = "post_attention_layernorm"
    mlp: str | None = None
    branch: Callable = lambda block, a, x: a


LM = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
BASE = {
    **{"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": DEPTH},
    **{"num_attention_heads": 4, "max_position_embeddings": 64},
}
GROUPED = {**LM, **BASE, "num_key_value_heads": 2}
GPT = {**LM, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": 4, "n_positions": 64}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = {**GROUPED, "head_dim": 8}
FALCON = {**LM, **BASE}
BERT = {**LM, **BASE}
IMAGE = {**BASE, "image_size": 16, "patch_size": 8}
VIDEO = {**IMAGE, "num_frames": 4}
SWITCHED_OFF = {f"{place}_dropout_prob": 0.0 for place in ("hidden", "attention_probs")}


def llama_like(name, config=GROUPED, **roles):
    return Case(f"{name}ForCausalLM", (f"{name}Config", config), LAYERS, "self_attn", **roles)


LAYERS = ("model.layers.{}",)
H = ("transformer.h.{}",)
LAYER = ("encoder.layer.{}",)
PARALLEL = {"after": None, "mlp": "mlp"}


def post_norm(block, a, x):
    return block.post_attention_layernorm(a)


def bert_like(name, **config):
    return Case(
        *(f"{name}Model", (f"{name}Config", {**BERT, **SWITCHED_OFF, **config})),
        *(LAYER, "attention.self", None, "attention.output.LayerNorm"),
        branch=lambda block, a, x: block.attention.output.dense(a),
    )


def neox(parallel, **roles):
    config = {**LM, **BASE, "use_parallel_residual": parallel, "rotary_pct": 0.5}
    name = "GPTNeoXForCausalLM"
    return Case(name, ("GPTNeoXConfig", config), ("gpt_neox.layers.{}",), "attention", **roles)


def falcon(config, **roles):
    config = ("FalconConfig", {**FALCON, **config})
    return Case("FalconForCausalLM", config, H, "self_attention", **roles)


def image(model, config, block, norm, after, attention="attention", size=IMAGE, **roles):
    config = (config[0], {**size, **config[1]})
    return Case(model, config, (block,), attention, norm, after, **roles)


def opt(pre_norm, norm, after):
    config = {**LM, **BASE, "ffn_dim": 48, "do_layer_norm_before": pre_norm, "dropout": 0.0}
    config["word_embed_proj_dim"] = WIDTH if pre_norm else 16
    block = ("model.decoder.layers.{}",)
    return Case("OPTForCausalLM", ("OPTConfig", config), block, "self_attn", norm, after)


DECODERS = {
    "llama": llama_like("Llama", {**GROUPED, "attention_bias": True}),
    "mistral": llama_like("Mistral", {**GROUPED, "sliding_window": 4}),
    "mixtral": llama_like("Mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": llama_like("Qwen2"),
    "qwen3": llama_like("Qwen3", GEMMA),
    "qwen2_moe": llama_like(
        "Qwen2Moe", {**GROUPED, **MOE, "shared_expert_intermediate_size": 24}
    ),
    "qwen3_moe": llama_like("Qwen3Moe", {**GEMMA, **MOE}),
    "gemma": llama_like("Gemma", GEMMA),
    "gemma2": llama_like(
        "Gemma2", {**GEMMA, "sliding_window": 4},
        after="pre_feedforward_layernorm", branch=post_norm,
    ),
    "gemma3": Case(
        "Gemma3ForCausalLM", ("Gemma3TextConfig", {**GEMMA, "sliding_window": 4}), LAYERS,
        "self_attn", after="pre_feedforward_layernorm", branch=post_norm,
    ),
    "phi": llama_like("Phi", **PARALLEL),
    "phi3": llama_like("Phi3"),
    "olmo": llama_like("Olmo"),
    "olmo2": llama_like("Olmo2", norm=None, after="mlp", branch=post_norm),
    "cohere": llama_like("Cohere", **PARALLEL),
    "starcoder2": llama_like("Starcoder2"),
    "granite": llama_like(
        "Granite", {**GROUPED, "residual_multiplier": 0.22},
        branch=lambda block, a, x: 0.22 * a,
    ),
    "stablelm": llama_like("StableLm"),
    "stablelm_parallel": llama_like(
        "StableLm", {**GROUPED, "use_parallel_residual": True}, **PARALLEL
    ),
    "gpt_neox": neox(True, **PARALLEL),
    "gpt_neox_sequential": neox(False),
    "gpt2": Case("GPT2LMHeadModel", ("GPT2Config", GPT), H, "attn", "ln_1", "ln_2"),
    "gptj": Case(
        "GPTJForCausalLM", ("GPTJConfig", {**GPT, "rotary_dim": 4}), H, "attn", "ln_1", **PARALLEL
    ),
    "codegen": Case(
        "CodeGenForCausalLM", ("CodeGenConfig", {**GPT, "rotary_dim": 4}), H, "attn", "ln_1",
        **PARALLEL,
    ),
    "gpt_neo": Case(
        "GPTNeoForCausalLM",
        ("GPTNeoConfig", {
            **LM, "hidden_size": WIDTH, "num_layers": DEPTH, "num_heads": 4, "window_size": 4,
            "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64,
        }),
        H, "attn", "ln_1", "ln_2",
    ),
    "falcon": falcon({"multi_query": True}, **PARALLEL),
    "falcon_new": falcon(
        {"new_decoder_architecture": True, "num_kv_heads": 2}, norm="ln_attn", **PARALLEL
    ),
    "falcon_alibi": falcon({"alibi": True, "parallel_attn": False, "multi_query": False}),
    "opt": opt(True, "self_attn_layer_norm", "final_layer_norm"),
    "opt_350m": opt(False, None, "self_attn_layer_norm"),
    "bloom": Case(
        "BloomForCausalLM",
        ("BloomConfig", {**LM, "hidden_size": WIDTH, "n_layer": DEPTH, "n_head": 4}),
        H, "self_attention", branch=lambda block, a, x: a - x,  # it adds the residual itself
    ),
    "mpt": Case(
        "MptForCausalLM",
        ("MptConfig", {**LM, "d_model": WIDTH, "n_layers": DEPTH, "n_heads": 4, "max_seq_len": 64}),
        ("transformer.blocks.{}",), "attn", "norm_1", "norm_2",
    ),
}  # fmt: skip

ENCODERS = {
    "bert": bert_like("Bert"),
    "roberta": bert_like("Roberta"),
    "electra": bert_like("Electra", embedding_size=16),
    "deberta_v2": bert_like(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8
    ),
    "distilbert": Case(
        "DistilBertModel",
        ("DistilBertConfig", {
            **LM, "dim": WIDTH, "hidden_dim": 48, "n_layers": DEPTH, "n_heads": 4,
        }),
        ("transformer.layer.{}",), "attention", None, "sa_layer_norm",
    ),
    "modernbert": Case(
        "ModernBertModel",
        ("ModernBertConfig", {
            **BERT, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4,
            "global_attn_every_n_layers": 2,
        }),
        ("layers.{}",), "attn", "attn_norm", "mlp_norm",
    ),
    "t5": Case(
        "T5ForConditionalGeneration",
        ("T5Config", {
            **LM, "d_model": WIDTH, "d_ff": 48, "d_kv": 6, "num_layers": DEPTH, "num_heads": 4,
            "decoder_start_token_id": 0,
        }),
        ("encoder.block.{}", "decoder.block.{}"), "layer.0.SelfAttention", "layer.0.layer_norm",
        "layer.1",
    ),
    "bart": Case(
        "BartForConditionalGeneration",
        ("BartConfig", {
            **LM, "d_model": WIDTH, "encoder_layers": DEPTH, "decoder_layers": DEPTH,
            "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "max_position_embeddings": 64,
            "decoder_start_token_id": 0, "forced_eos_token_id": None,
        }),
        ("model.encoder.layers.{}", "model.decoder.layers.{}"), "self_attn", None,
        "self_attn_layer_norm",
    ),
    "clip_text": Case(
        "CLIPTextModel", ("CLIPTextConfig", {**BERT, "eos_token_id": 2}), ("encoder.layers.{}",),
        "self_attn", "layer_norm1", "layer_norm2",
    ),
}  # fmt: skip

BEFORE_AFTER = ("layernorm_before", "layernorm_after")
V_JEPA = {
    **{"crop_size": 16, "patch_size": 8, "frames_per_clip": 4, "hidden_size": 48},
    **{"num_attention_heads": 2, "pred_hidden_size": 24, "pred_num_attention_heads": 2},
    **{"pred_num_hidden_layers": DEPTH, "pred_num_mask_tokens": 2},
}
VISION = {
    "vit": image("ViTModel", ("ViTConfig", {}), "layers.{}", *BEFORE_AFTER),
    "deit": image("DeiTModel", ("DeiTConfig", {}), "layers.{}", *BEFORE_AFTER),
    "beit": image(
        "BeitModel", ("BeitConfig", {"use_relative_position_bias": True}), "layers.{}",
        *BEFORE_AFTER, branch=lambda block, a, x: block.lambda_1 * a,
    ),
    "beit_without_scale": image(
        "BeitModel", ("BeitConfig", {"layer_scale_init_value": 0.0}), "layers.{}", *BEFORE_AFTER
    ),
    "dinov2": image(
        "Dinov2Model", ("Dinov2Config", {}), LAYER[0], "norm1", "norm2",
        branch=lambda block, a, x: block.layer_scale1.lambda1 * a,
    ),
    "dinov3_vit": image(
        "DINOv3ViTModel", ("DINOv3ViTConfig", {"num_register_tokens": 2}), "model.layer.{}",
        "norm1", "norm2", branch=lambda block, a, x: block.layer_scale1.lambda1 * a,
    ),
    "clip_vision": image(
        "CLIPVisionModel", ("CLIPVisionConfig", {}), "encoder.layers.{}", "layer_norm1",
        "layer_norm2", "self_attn",
    ),
    "siglip_vision": image(
        "SiglipVisionModel", ("SiglipVisionConfig", {}), "encoder.layers.{}", "layer_norm1",
        "layer_norm2", "self_attn",
    ),
    "videomae": image("VideoMAEModel", ("VideoMAEConfig", {}), LAYER[0], *BEFORE_AFTER, size=VIDEO),
    "vivit": image(
        "VivitModel", ("VivitConfig", {"tubelet_size": [2, 8, 8]}), "layers.{}", *BEFORE_AFTER,
        size=VIDEO,
    ),
    "timesformer_joint": image(
        "TimesformerModel", ("TimesformerConfig", {"attention_type": "joint_space_time"}),
        LAYER[0], *BEFORE_AFTER, size=VIDEO,
    ),
    "vjepa2": Case(
        "VJEPA2Model", ("VJEPA2Config", {**BASE, **V_JEPA}),
        (LAYER[0], "predictor.layer.{}"), "attention", "norm1", "norm2",
    ),
}  # fmt: skip

CASES = {**DECODERS, **ENCODERS, **VISION}
TIMESFORMER = image(
    "TimesformerModel", ("TimesformerConfig", {}), LAYER[0], *BEFORE_AFTER, size=VIDEO
)


def tiny(case, dtype=torch.float32, attn_implementation=None, **config):
    """A two-block model in eval mode; every parameter is random, of order 1 where it scales."""
    case = CASES[case] if isinstance(case, str) else case
    name, keywords = case.config
    keywords = {**keywords, **config}
    if attn_implementation is not None:
        keywords["attn_implementation"] = attn_implementation
    if dtype == torch.float64 and "num_experts_per_tok" in keywords:
        keywords["experts_implementation"] = "eager"  # the grouped kernels take no float64
    model = getattr(transformers, case.model)(getattr(transformers, name)(**keywords))
    return randomise(model.to(dtype).eval())


@torch.no_grad()
def randomise(model):
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not name.endswith("bias"):
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=0.2)
    return model


def inputs(model, batch=2, tokens=TOKENS):
    """What the model's forward takes, as keywords."""
    config = model.config
    if model.main_input_name == "input_ids":
        ids = {"input_ids": torch.randint(3, VOCABULARY, (batch, tokens))}
        if config.is_encoder_decoder:
            ids["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, tokens - 2))
        return ids
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
    size = getattr(config, "image_size", None) or config.crop_size
    shape = (batch, frames, 3, size, size) if frames else (batch, 3, size, size)
    return {model.main_input_name: torch.randn(shape, dtype=next(model.parameters()).dtype)}


@torch.no_grad()
def outputs(model, x):
    """The first thing that the model returns: logits or hidden states; V-JEPA 2's predictor too."""
    found = model(**x)
    predicted = getattr(found, "predictor_output", None)
    return found[0] if predicted is None else torch.cat([found[0], predicted[0]], dim=1)
