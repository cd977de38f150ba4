"""A context that several continuations share, such as a question's choices, is run once.

Its keys and values are kept and the continuations go on from them, as cached generation does.
Contexts of a batch stand at the right end of their rows (padded at the left, masked), so that every
distance between tokens is what it would be alone, under rotary and learned positions, ALiBi and
sliding windows alike. Whether a model does this exactly is tried out on it once, not assumed.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmpreproj.backbones.lm_head import trunk
from mmpreproj.evaluation.encoding import Request

_logger = logging.getLogger(__name__)

# What one more run of the trunk costs beyond its tokens, in tokens: reading all weights once more.
_RUN_TOKENS = 24
# Continuations run at once, for each context that a batch holds: those of four choices.
_CONTINUATIONS = 4


class Scored(NamedTuple):
    """Hidden states and what they are to predict: target m is predicted by hidden[row_of[m]].

    Shape: hidden [N, D]; row_of (ascending), targets, owners [M]. Several targets may read one row;
    owners says to which request of the batch a target counts.
    """

    hidden: Tensor
    row_of: Tensor
    targets: Tensor
    owners: Tensor


def split_shared(requests: Sequence[Request]) -> tuple[list[list[int]], list[int]]:
    """Indices of requests that share a context, by context, and of those that stay alone.

    A context so short that a second run would cost more than it saves is not shared; nor is one
    that was cut, where it is another one for every continuation.
    """
    by_context: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        by_context.setdefault(tuple(request.ids[: -request.n_scored]), []).append(index)
    groups, alone = [], []
    for context, group in by_context.items():
        if len(context) * (len(group) - 1) > _RUN_TOKENS:
            groups.append(group)
        else:
            alone.extend(group)
    return groups, sorted(alone)


class SharedContexts:
    """Runs every context once, and its continuations behind it.

    Args:
        model: a decoder of transformers.
        device: that of its embeddings.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.model = model
        self.device = device

    @functools.cached_property
    def exact(self) -> bool:
        """Whether the model, in eval mode, gives what it gives without sharing; if not, a warning
        says so.

        Tried with two contexts and their continuations, of different lengths, both ways.
        """
        generator = torch.Generator().manual_seed(0)
        rows = self.model.get_input_embeddings().weight.shape[0]

        def draw(n: int) -> list[int]:
            return torch.randint(rows, (n,), generator=generator).tolist()

        groups = [
            [Request(context + end, len(end)) for end in map(draw, (9, 1, 2, 9))]
            for context in (draw(7), draw(4))
        ]
        try:
            shared = self.run(groups)
            expected = [
                trunk(self.model, torch.tensor([request.ids[:-1]], device=self.device))[0]
                for group in groups
                for request in group
            ]
        except Exception as error:  # whatever a model raises that keeps no such cache
            why = f"{type(error).__name__}: {error}"
        else:
            order = torch.argsort(shared.owners, stable=True)
            found = shared.hidden[shared.row_of[order].to(shared.hidden.device)]
            requests = [request for group in groups for request in group]
            wanted = torch.cat([h[-r.n_scored :] for h, r in zip(expected, requests, strict=True)])
            # Another order of sums through all layers; a wrong position shows far above it
            bound = torch.finfo(wanted.dtype).eps ** 0.5 * wanted.abs().max()
            error = (found - wanted).abs().max()
            if error <= bound:
                return True
            why = f"hidden states differ by {error:.2g} (at most {bound:.2g} is rounding)"
        _logger.warning(
            "%s does not give the same behind a context that is run once (%s): every choice is "
            "scored with its whole context instead, which takes longer",
            *(type(self.model).__name__, why),
        )
        return False

    def run(
        self,
        groups: list[list[Request]],
        batch_size: int | None = None,
        batch_tokens: int = 2048,
    ) -> Scored:
        """Hidden states for groups of requests, each of one context; owners count them all.

        Args:
            batch_size: at most four times as many continuations at once; or, with None,
            batch_tokens: as many as have so many tokens, padding included, and contexts of four
                times as many (one continuation at least).
        """
        contexts = [group[0].ids[: -group[0].n_scored] for group in groups]
        longest = max(map(len, contexts))
        ids = torch.tensor([[0] * (longest - len(c)) + c for c in contexts], device=self.device)
        mask = None
        if any(len(context) < longest for context in contexts):
            lengths = torch.tensor([[len(context)] for context in contexts], device=self.device)
            mask = (torch.arange(longest, device=self.device) >= longest - lengths).long()
        hidden, cache = trunk(self.model, ids, mask, use_cache=True)

        # A context's last hidden state predicts the first token of all of its continuations
        ends, group_of = [], []
        for group_number, group in enumerate(groups):
            for request in group:
                ends.append(request.ids[-request.n_scored :])
                group_of.append(group_number)
        rows = [hidden[:, -1]]
        row_of, targets, owners = list(group_of), [end[0] for end in ends], list(range(len(ends)))
        n_rows = len(contexts)
        by_length = sorted(range(len(ends)), key=lambda i: (-len(ends[i]), i))
        by_length = [index for index in by_length if len(ends[index]) > 1]
        if batch_size is None:
            limits = max(1, _CONTINUATIONS * batch_tokens // longest), batch_tokens
        else:
            limits = _CONTINUATIONS * batch_size, None
        for start, stop in partition([len(ends[index]) - 1 for index in by_length], *limits):
            batch = by_length[start:stop]
            read = len(ends[batch[0]]) - 1
            behind = self._behind(
                *(cache, mask, [group_of[index] for index in batch], longest),
                [ends[index][:-1] + [0] * (read - len(ends[index]) + 1) for index in batch],
            )
            at = []
            for row, index in enumerate(batch):
                n = len(ends[index]) - 1
                at.extend(range(row * read, row * read + n))
                targets.extend(ends[index][1:])
                owners.extend([index] * n)
            rows.append(behind.flatten(0, 1)[torch.tensor(at, device=behind.device)])
            row_of.extend(range(n_rows, n_rows + len(at)))
            n_rows += len(at)
        return Scored(torch.cat(rows), *map(torch.tensor, (row_of, targets, owners)))

    def _behind(
        self,
        cache: Any,
        mask: Tensor | None,
        group_of: list[int],
        longest: int,
        ids: list[list[int]],
    ) -> Tensor:
        """Hidden states [R, T, D] of rows of tokens, each behind the context of its group."""
        index = torch.tensor(group_of, device=self.device)
        # The tensors of a cache are replaced, not written to: the one for all stays as it is
        grown = copy.copy(cache)
        grown.layers = [copy.copy(layer) for layer in cache.layers]
        grown.reorder_cache(index)
        tokens = torch.tensor(ids, device=self.device)
        if mask is not None:  # padding at the right counts as read; nothing scored sees it
            mask = torch.cat([mask[index], torch.ones_like(tokens)], dim=1)
        return trunk(self.model, tokens, mask, past_key_values=grown, use_cache=True)[0]


def partition(
    lengths: Sequence[int],
    rows: int,
    tokens: int | None = None,
    run_tokens: int = _RUN_TOKENS,
) -> list[tuple[int, int]]:
    """Cuts rows, the longest first, into runs (start, stop) that cost the fewest tokens in all.

    A run costs its rows times its longest, padding included, and `run_tokens` besides.

    Args:
        rows: of a run, at most.
        tokens: of a run, padding included, at most, unless it is a row alone; None: any number.
    """
    best: list[tuple[int, int]] = [(0, 0)]  # cost of the first n rows, start of the last run
    for stop in range(1, len(lengths) + 1):
        found = []
        for start in range(stop - 1, max(0, stop - rows) - 1, -1):
            cost = (stop - start) * lengths[start]
            if found and tokens is not None and cost > tokens:
                break
            found.append((best[start][0] + cost + run_tokens, start))
        best.append(min(found))
    runs = []
    stop = len(lengths)
    while stop:
        runs.append((best[stop][1], stop))
        stop = best[stop][1]
    return runs[::-1]
