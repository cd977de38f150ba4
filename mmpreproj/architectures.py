"""The architectures that are known: where a block's self-attention is, and where its skip joins.

The table is keyed by the class of the transformer block, not by the model: whatever is built from a
known block is supported, under whichever head it stands, and nothing of timm's or transformers' own
classes is imported. A block's row says where its self-attention is (by path, so that a
cross-attention of the same class is never taken) and what stands between that attention and the
residual add. Where something scales or norms the branch there (LayerScale, a norm behind
attention), a skip added at the attention's output would be scaled too, which is not the method: it
joins at a later module, behind the scale.
"""

from __future__ import annotations

import dataclasses
import inspect

from torch import nn


@dataclasses.dataclass(frozen=True)
class SiteRule:
    """One self-attention within a block, as paths relative to the block.

    Args:
        attention: the module that takes x̂ as its first argument or as `hidden_states`, and returns
            the attention branch (or a tuple that starts with it).
        join: the module where the skip joins the branch, where it cannot be added to the
            attention's output: whatever drops the branch of a sample there drops its skip too.
        join_output: the skip is added to the output of `join`, not to its input.
        scaled_by: the block's attribute that scales the branch between the two. Where a block has
            none of it (None or Identity), the skip is added to the attention's output. None means
            that the branch is always changed on its way, so the skip always joins at `join`.
            Without a `join` it is a number: the skip is divided by it at the attention's output.
        normed: whether the attention reads norm(x), or the block's attribute that says so.
            Otherwise (post-norm) x̂ is the block's input.
        only_with: the block's attribute without which it does not have this attention.
    """

    attention: str
    join: str | None = None
    join_output: bool = False
    scaled_by: str | None = None
    normed: bool | str = True
    only_with: str | None = None


_LAYER_SCALE_PARAMETER = (SiteRule("attn", join="drop_path1", scaled_by="gamma_1"),)
_POST_NORM = (SiteRule("attn", join="drop_path1", normed=False),)

_TIMM = {
    # ViT, DeiT, DeiT III, DINOv2, SigLIP, CLIP, hybrid and NaFlex ViTs
    "vision_transformer.Block": (SiteRule("attn", join="drop_path1", scaled_by="ls1"),),
    "vision_transformer.ResPostBlock": _POST_NORM,
    # EVA, EVA-02, DINOv3, Perception Encoder, every vit_*_rope_*
    "eva.EvaBlock": _LAYER_SCALE_PARAMETER,
    "eva.EvaBlockPostNorm": _POST_NORM,
    "beit.Block": _LAYER_SCALE_PARAMETER,
}

_SELF_ATTN = (SiteRule("self_attn"),)
_SELF_ATTENTION = (SiteRule("self_attention"),)
_ATTENTION = (SiteRule("attention"),)
_ATTN = (SiteRule("attn"),)
# A norm between the attention and the residual add; nothing else stands behind it
_NORMED_BRANCH = SiteRule("self_attn", join="post_attention_layernorm", join_output=True)
# LayerScale, then DropPath. The MLP's branch runs through the same module after the attention's.
_LAYER_SCALE = (SiteRule("attention", join="drop_path"),)
# LN(dropout(dense(context)) + x) in one module, `attention.output`: the skip joins before the sum
_BERT = (SiteRule("attention.self", join="attention.output.dropout", normed=False),)
_BART = (SiteRule("self_attn", normed=False),)

_TRANSFORMERS = {
    # Decoders
    "bloom.BloomBlock": _SELF_ATTENTION,  # adds the residual itself, from an argument of its own
    "codegen.CodeGenBlock": _ATTN,  # parallel
    "cohere.CohereDecoderLayer": _SELF_ATTN,  # parallel
    "falcon.FalconDecoderLayer": _SELF_ATTENTION,  # parallel, or sequential with ALiBi
    "gemma.GemmaDecoderLayer": _SELF_ATTN,
    "gemma2.Gemma2DecoderLayer": (_NORMED_BRANCH,),
    "gemma3.Gemma3DecoderLayer": (_NORMED_BRANCH,),
    "gpt2.GPT2Block": _ATTN,
    "gpt_neo.GPTNeoBlock": _ATTN,
    "gpt_neox.GPTNeoXLayer": _ATTENTION,  # parallel or sequential
    "gptj.GPTJBlock": _ATTN,  # parallel
    "granite.GraniteDecoderLayer": (SiteRule("self_attn", scaled_by="residual_multiplier"),),
    "llama.LlamaDecoderLayer": _SELF_ATTN,
    "mistral.MistralDecoderLayer": _SELF_ATTN,
    "mixtral.MixtralDecoderLayer": _SELF_ATTN,
    "mpt.MptBlock": _ATTN,
    "olmo.OlmoDecoderLayer": _SELF_ATTN,
    "olmo2.Olmo2DecoderLayer": (dataclasses.replace(_NORMED_BRANCH, normed=False),),
    # OPT-350m is post-norm, the others are not
    "opt.OPTDecoderLayer": (SiteRule("self_attn", normed="do_layer_norm_before"),),
    "phi.PhiDecoderLayer": _SELF_ATTN,  # parallel
    "phi3.Phi3DecoderLayer": _SELF_ATTN,
    "qwen2.Qwen2DecoderLayer": _SELF_ATTN,
    "qwen2_moe.Qwen2MoeDecoderLayer": _SELF_ATTN,
    "qwen3.Qwen3DecoderLayer": _SELF_ATTN,
    "qwen3_moe.Qwen3MoeDecoderLayer": _SELF_ATTN,
    "stablelm.StableLmDecoderLayer": _SELF_ATTN,  # parallel or sequential
    "starcoder2.Starcoder2DecoderLayer": _SELF_ATTN,
    # Encoders, and encoders with a decoder
    "bart.BartDecoderLayer": _BART,
    "bart.BartEncoderLayer": _BART,
    "bert.BertLayer": _BERT,
    "deberta_v2.DebertaV2Layer": _BERT,
    "distilbert.TransformerBlock": (SiteRule("attention", normed=False),),
    "electra.ElectraLayer": _BERT,
    "modernbert.ModernBertEncoderLayer": _ATTN,  # layer 0 is normed by the embeddings' own norm
    "roberta.RobertaLayer": _BERT,
    "t5.T5Block": (SiteRule("layer.0.SelfAttention"),),
    # Images and video
    "beit.BeitLayer": _LAYER_SCALE,
    "clip.CLIPEncoderLayer": _SELF_ATTN,
    "deit.DeiTLayer": _ATTENTION,
    "dinov2.Dinov2Layer": _LAYER_SCALE,
    "dinov3_vit.DINOv3ViTLayer": _LAYER_SCALE,
    "siglip.SiglipEncoderLayer": _SELF_ATTN,
    # Divided space-time has a temporal attention too, which comes first. The skip of the class
    # token is averaged over the frames with its attention: it is the same in each.
    "timesformer.TimesformerLayer": (
        SiteRule(
            "temporal_attention",
            join="temporal_dense",
            join_output=True,
            only_with="temporal_attention",
        ),
        SiteRule("attention"),
    ),
    "videomae.VideoMAELayer": _ATTENTION,
    "vit.ViTLayer": _ATTENTION,
    "vivit.VivitLayer": _ATTENTION,
    "vjepa2.VJEPA2Layer": _ATTENTION,  # of the encoder and, with its own width, the predictor
}


def _of_transformers(name: str) -> str:
    family, cls = name.split(".")
    return f"transformers.models.{family}.modeling_{family}.{cls}"


# Block class -> its self-attentions, in order of execution.
BLOCKS: dict[str, tuple[SiteRule, ...]] = {
    **{f"timm.models.{name}": rules for name, rules in _TIMM.items()},
    **{_of_transformers(name): rules for name, rules in _TRANSFORMERS.items()},
}


def rules_of(block: nn.Module) -> tuple[SiteRule, ...] | None:
    """The table's row for a block, or None.

    A subclass counts as its known base class as long as it runs that class's forward. Decorators
    do not count: transformers wraps the forward of every subclass anew.
    """
    for cls in type(block).__mro__:
        rules = BLOCKS.get(class_name(cls))
        if rules is not None and _forward(type(block)) is _forward(cls):
            return tuple(
                rule for rule in rules if rule.only_with is None or hasattr(block, rule.only_with)
            )
    return None


def _forward(cls: type) -> object:
    return inspect.unwrap(cls.forward)


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
