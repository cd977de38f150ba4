"""What is found in a model: its self-attentions, and what has none."""

from __future__ import annotations

import dataclasses
import re

from mmpreproj.architectures import Site
from mmpreproj.blocks import Left
from mmpreproj.messages import listed

__all__ = ["Found", "starred"]


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
