"""What is known of self-attentions and of a model's, and the blocks that cannot be read.

What a block's forward does is read off its source (`mmpreproj.blocks`). The table of blocks, keyed
by their class, is for those whose forward says too little. A row's sites are in order of execution,
by path, so that a cross-attention of the same class is never taken. The table of models spares
those that are most used the reading.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re

from torch import nn

from mmpreproj.messages import listed

__all__ = [
    "BLOCKS",
    "Found",
    "Left",
    "MODELS",
    "Site",
    "Uniform",
    "adapters_beside",
    "class_name",
    "known_stack",
    "rules_of",
    "starred",
    "unwrapped",
    "width_of",
]


@dataclasses.dataclass(frozen=True)
class Site:
    """A self-attention, or an MLP. Paths are relative to its block; once found, to the model.

    Args:
        attention: the module that takes x̂ and returns the attention branch, or a tuple that starts
            with it.
        block: the transformer block that holds it.
        join: the module where the skip joins the branch, where it cannot be added to the
            attention's output: whatever drops the branch of a sample there drops its skip too.
        join_output: the skip is added to the output of `join`, not to its input.
        divisor: the skip is divided by it, since the block multiplies what it joins by it.
        carried: the skip joins what `join` reads of the residual stream, and what the block returns
            as well.
        normed: whether the attention reads norm(x). Otherwise x̂ is the block's input.
        norm: the module that makes x̂, where one does.
        moved: the tokens are moved about between x̂ and `join`, so that the skip is computed from
            x̂ as `norm` (None: the block's input) gives it, in the order of the residual stream.
        channels_first: x̂ is a map [B, D, ...], not tokens [..., D].
        reads: the arguments that x̂ comes in as, by place and name; empty: the first one.
        reader: a module that reads x̂ in the attention, for its width.
        readers: where the attention's module adds the residual as well, the projections that read
            x̃ in the place of x̂; all else in it keeps x̂.
        rank: its place among the sites of its block, in order of execution.
        mlp: `attention` is the path of the block's MLP, which gets a pre-projection alone.
    """

    attention: str
    block: str = ""
    join: str | None = None
    join_output: bool = False
    divisor: float = 1.0
    carried: bool = False
    normed: bool = True
    norm: str | None = None
    moved: bool = False
    channels_first: bool = False
    reads: tuple[tuple[int, str], ...] = ()
    reader: str | None = None
    readers: tuple[str, ...] = ()
    rank: int = 0
    mlp: bool = False

    def under(self, prefix: str) -> Site:
        """The same with `prefix` before every path: "layers.0.", say, or nothing."""
        paths = {
            name: prefix + getattr(self, name)
            for name in ("attention", "join", "norm", "reader")
            if getattr(self, name) is not None
        }
        readers = tuple(prefix + reader for reader in self.readers)
        block = f"{prefix}{self.block}".rstrip(".")
        return dataclasses.replace(self, block=block, readers=readers, **paths)


@dataclasses.dataclass(frozen=True)
class Left:
    """An attention without the method, and why."""

    attention: str
    why: str


@dataclasses.dataclass
class Found:
    """The self-attentions of a model, and what has none.

    Args:
        stacks: by the path of a stack, its blocks in order, each with its sites.
        left: attentions that cannot take the method, with the reason.
        without: by stack, the blocks that have no self-attention, with their class.
        mlps: by block, its MLP, or why it cannot take a pre-projection; empty unless asked for.
    """

    stacks: dict[str, dict[str, list[Site]]] = dataclasses.field(default_factory=dict)
    left: list[Left] = dataclasses.field(default_factory=list)
    without: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    mlps: dict[str, Site | Left] = dataclasses.field(default_factory=dict)

    def under(self, prefix: str) -> Found:
        """The same for a model that holds this one at a path."""

        def named(path: str) -> str:
            return f"{prefix}{path}".rstrip(".")

        return Found(
            {
                named(stack): {
                    named(path): [each.under(prefix) for each in sites]
                    for path, sites in blocks.items()
                }
                for stack, blocks in self.stacks.items()
            },
            [Left(prefix + each.attention, each.why) for each in self.left],
            {
                named(stack): {named(path): cls for path, cls in blocks.items()}
                for stack, blocks in self.without.items()
            },
            {
                named(path): mlp.under(prefix)
                if isinstance(mlp, Site)
                else Left(prefix + mlp.attention, mlp.why)
                for path, mlp in self.mlps.items()
            },
        )

    def told(self) -> list[str]:
        """What is left out, a sentence for each kind."""
        why: dict[tuple[str, str], list[str]] = {}
        for each in self.left:
            why.setdefault((starred(each.attention), each.why), []).append(each.attention)
        told = [
            f"left out: {starred} ({len(paths)}), {reason}"
            for (starred, reason), paths in why.items()
        ]
        for stack, blocks in self.without.items():
            numbers = listed([path.rpartition(".")[2] for path in blocks], 60)
            classes = listed(sorted({name.rpartition(".")[2] for name in blocks.values()}))
            told.append(f"without softmax attention that takes it: {stack} {numbers} ({classes})")
        return told


def starred(path: str) -> str:
    """A path with a star for each number in it, as paths by hand are written."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


# Divided space-time has a temporal attention too, which comes first. The skip of the class token is
# averaged over the frames with its attention: it is the same in each.
_TIMESFORMER = (
    Site("temporal_attention", join="temporal_dense", join_output=True),
    Site("attention"),
)

# Block class -> its self-attentions, in order of execution.
BLOCKS: dict[str, tuple[Site, ...]] = {
    "transformers.models.timesformer.modeling_timesformer.TimesformerLayer": _TIMESFORMER,
}


@dataclasses.dataclass(frozen=True)
class Uniform:
    """A model whose self-attentions are known without reading it: one in each block of one stack.

    Args:
        stack: the path of its stack of blocks.
        block, attention: the classes of each block and of its attention, by name.
        site: the self-attention of each.
        unset: what the model and its blocks may have, and do not.
    """

    stack: str
    block: str
    attention: str
    site: Site
    unset: tuple[str, ...] = ()


def _of_llama_form(name: str, stack: str, attention: str, reader: str) -> Uniform:
    module = f"transformers.models.{name[0]}.modeling_{name[0]}.{name[1]}"
    site = Site(
        attention,
        divisor=1,
        norm="input_layernorm",
        reads=((0, "hidden_states"),),
        reader=f"{attention}.{reader}",
    )
    return Uniform(stack, f"{module}{name[2]}", f"{module}Attention", site)


_ROPE_VIT = Uniform(
    "blocks",
    "timm.models.eva.EvaBlock",
    "timm.layers.attention.AttentionRope",
    Site("attn", divisor=1, norm="norm1", reads=((0, "x"),), reader="attn.qkv"),
    unset=("gamma_1", "attn_pool"),
)

# Model class -> where its self-attentions are: what the reading of it would find.
MODELS = {
    "mmpreproj.backbones.vit.PreProjVisionTransformer": _ROPE_VIT,
    "mmpreproj.backbones.video.transformer.PreProjVideoTransformer": _ROPE_VIT,
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXForCausalLM": _of_llama_form(
        ("gpt_neox", "GPTNeoX", "Layer"), "gpt_neox.layers", "attention", "query_key_value"
    ),
    "transformers.models.llama.modeling_llama.LlamaForCausalLM": _of_llama_form(
        ("llama", "Llama", "DecoderLayer"), "model.layers", "self_attn", "q_proj"
    ),
}


def known_stack(model: nn.Module) -> Uniform | None:
    """The table's row for a model that is built as the row says, part by part, or None."""
    known = MODELS.get(class_name(type(model)))
    if known is None:
        return None
    blocks = list(model.get_submodule(known.stack).children())
    as_known = all(
        class_name(type(block)) == known.block
        and class_name(type(block.get_submodule(known.site.attention))) == known.attention
        for block in blocks
    )
    clear = all(getattr(m, name, None) is None for m in (model, *blocks) for name in known.unset)
    plain = as_known and clear and isinstance(_at(blocks[:1], known.site.reader), nn.Module)
    return known if plain else None


def _at(blocks: list[nn.Module], path: str) -> object:
    """What the first block has at a path, or None."""
    return operator.attrgetter(path)(blocks[0]) if blocks else None


def rules_of(block: nn.Module) -> tuple[Site, ...] | None:
    """The table's row for a block, or None.

    A subclass counts as its known base class as long as it runs that class's forward. Decorators
    do not count: transformers wraps the forward of every subclass anew.
    """
    for cls in type(block).__mro__:
        rules = BLOCKS.get(class_name(cls))
        if rules is not None and _forward(type(block)) is _forward(cls):
            return tuple(rule for rule in rules if hasattr(block, rule.attention))
    return None


def _forward(cls: type) -> object:
    return inspect.unwrap(cls.forward)


def class_name(cls: type) -> str:
    """A class as the table names it: its module and its name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def width_of(module: nn.Module) -> int | None:
    """The width of what a projection or norm reads, or the first one within it."""
    for inner in module.modules():
        for name in ("in_features", "nx", "embed_dim", "in_channels", "normalized_shape"):
            width = getattr(inner, name, None)
            if isinstance(width, (int, tuple)) and width:
                return width if isinstance(width, int) else width[-1]
        weight = getattr(inner, "weight", None)
        if weight is not None and weight.ndim == 1:
            return weight.shape[0]
    return None


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, of a PeftModel around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapters_beside(model: nn.Module) -> list[str]:
    """The paths of what PEFT's other methods have put into a model, such as LoRA's matrices."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in getattr(module, "adapter_layer_names", ())
    ]
