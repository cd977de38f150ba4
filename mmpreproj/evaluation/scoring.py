"""Log-likelihoods of continuations and texts under a language model.

The model runs over whole batches, the output head on the scored positions alone: of a LAMBADA item
that is one or two of a hundred. Log-softmax is taken in float32 at least, whatever the model's
dtype. Items are sorted by length and padded at the right, where a causal model cannot look, so that
a score depends on neither the batch size nor the other items.

A context that several continuations share, such as a question's choices, is run once. Its keys and
values are kept and the continuations go on from them, as cached generation does. Contexts of a
batch stand at the right end of their rows (padded at the left, masked), so that every distance
between tokens is what it would be alone, under rotary and learned positions, ALiBi and sliding
windows alike. Whether a model does this exactly is tried out on it once, not assumed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from mmpreproj.backbones.lm.lm_head import hidden_states, lm_head_of
from mmpreproj.backbones.lm.lm_tokenizer import tokenizer_hash
from mmpreproj.backbones.modes import evaluating
from mmpreproj.evaluation.encoding import Encoder, Request, by_context, max_length_of, partition

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Score", "Scorer"]

_logger = logging.getLogger(__name__)

# Logits held at once (2**25 numbers, 128 MiB in float32), whatever the batch.
_LOGITS = 2**25
# Continuations run at once, for each context that a batch holds: those of four choices.
_CONTINUATIONS = 4

# Requests of one context, which is run once for all of them, or a request alone.
Group = list[Request]
# Hidden states [N, D], and for each request the rows of them that predict its tokens.
Hidden = tuple[Tensor, Sequence[Sequence[int]]]


@dataclasses.dataclass(frozen=True)
class Score:
    """What a continuation or a text scored.

    Args:
        logprob: sum over its tokens of the natural logarithm of their probabilities.
        greedy: every token is the most probable one (of equals, the one with the lowest id).
        n_tokens: how many tokens that is.
        n_cut: tokens of the context that were left out, as the model does not read so many.
    """

    logprob: float
    greedy: bool
    n_tokens: int
    n_cut: int = 0


class Scorer:
    """Scores text under a causal language model, as EleutherAI's lm-evaluation-harness does.

    Args:
        model: of transformers, plain, with the method attached, or wrapped by PEFT; on any device,
            in any dtype. It is put in eval mode while it scores.
        tokenizer: the model's.
        batch_tokens: tokens in a batch, padding included, at most (one item at least).
        batch_size: a fixed number of rows a batch instead; behind contexts that are shared, four
            times as many continuations.
        max_length: tokens that the model reads at once; None: as its configuration says.
        add_bos: put BOS before every text; None: where the tokenizer does so by default.
        share_contexts: run a context once for all of its continuations, where the model's
            positions do not depend on how much is read.

    Raises:
        ValueError: the model has no head that is known (see lm_head_of), or an option is wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        batch_tokens: int = 2048,
        max_length: int | None = None,
        add_bos: bool | None = None,
        batch_size: int | None = None,
        share_contexts: bool = True,
    ):
        for name, value in (("batch_tokens", batch_tokens), ("batch_size", batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}")
        self.model = model
        self.tokenizer = tokenizer
        self.head = lm_head_of(model)
        embeddings = model.get_input_embeddings().weight
        self.device = embeddings.device
        self.max_length = max_length_of(model, tokenizer) if max_length is None else max_length
        self.encoder = Encoder(tokenizer, self.max_length, len(embeddings), add_bos)
        self.batch_tokens = batch_tokens
        self.batch_size = batch_size
        self.share_contexts = share_contexts
        self.rotary = [module for module in model.modules() if _follows_length(module)]

    def loglikelihood(
        self, pairs: Sequence[tuple[str, str]], progress: bool = False
    ) -> list[Score]:
        """Scores of the continuations of (context, continuation) pairs, in the order given.

        Pairs with one context, such as the choices of one question, share its computation.

        Raises:
            ValueError: before anything is scored, if a continuation has no tokens or more than the
                model reads at once; or as `score`.
        """
        return self.score(self.encoder.pairs(pairs), progress)

    @torch.no_grad()
    def score(self, requests: Sequence[Request], progress: bool = False) -> list[Score]:
        """Scores of encoded requests, in the order given.

        Raises:
            ValueError: naming the request, if a log-likelihood is NaN: the logits are not finite.
        """
        cut = sum(request.n_cut > 0 for request in requests)
        if cut:
            _logger.warning(
                "%d of %d contexts lost tokens at their left: the model reads %d at once",
                *(cut, len(requests), self.max_length),
            )
        found: dict[int, Score] = {}  # by the request itself, which may stand at several places
        bar = tqdm(total=len(requests), desc="scoring", disable=None if progress else True)
        with evaluating(self.model), bar:
            groups = by_context(requests)
            if any(len(group) > 1 for group in groups) and not self.shares:
                groups = [[request] for request in requests]
            for batch in self._batches(groups):
                run = self._behind if len(batch[0]) > 1 else self._whole
                members = list(itertools.chain(*batch))
                scored = self._scored(*run(batch), members)
                for request, (logprob, greedy) in zip(members, scored, strict=True):
                    if math.isnan(logprob):
                        text = self.tokenizer.decode(request.ids[-request.n_scored :])[:60]
                        raise ValueError(
                            f"request {requests.index(request)}: the log-likelihood of {text!r} is "
                            "NaN, as the model's logits are not finite. Its weights have diverged, "
                            f"or its activations overflow in {self.head.weight.dtype}: use an "
                            "earlier checkpoint, or float32"
                        )
                    found[id(request)] = Score(logprob, greedy, request.n_scored, request.n_cut)
                bar.update(len(members))
        return [found[id(request)] for request in requests]

    def _batches(self, groups: list[Group]) -> Iterator[list[Group]]:
        """Groups of like length, the longest first: a batch too large for the memory fails at once.

        Groups of several and requests alone are not mixed. The length of a group is that of its
        context, or of all of its ends, whichever is more. The longest end of a batch fits the model
        behind the longest context. Where rotary frequencies follow the length (_follows_length),
        rows of a batch have one length.
        """
        sized = []
        for group in groups:
            ends = [request.n_scored for request in group]
            context, alone = len(group[0].ids) - ends[0], len(group) == 1
            length = context + ends[0] - 1 if alone else max(context, sum(ends))
            sized.append((alone, length, context, max(ends) - 1, group))
        batch: list[Group] = []
        longest = contexts = ends = 0
        for alone, length, context, end, group in sorted(sized, key=lambda s: (s[0], -s[1])):
            contexts, ends = max(contexts, context), max(ends, end)
            if batch:
                full = len(batch) == (self.batch_size or max(1, self.batch_tokens // longest))
                wide = not alone and contexts + ends > self.max_length
                other = alone != (len(batch[0]) == 1) or (self.rotary and length != longest)
                if full or wide or other:
                    yield batch
                    batch = []
            if not batch:
                longest, contexts, ends = length, context, end
            batch.append(group)
        if batch:
            yield batch

    def _padded(self, rows: list[list[int]], side: str = "right") -> Tensor:
        """[B, T]. Any id pads: at the right nothing that is scored sees it, at the left a mask
        hides it."""
        rows = [torch.tensor(row) for row in rows]
        return pad_sequence(rows, batch_first=True, padding_side=side).to(self.device)

    def _whole(self, groups: list[Group]) -> Hidden:
        """One row a request."""
        for module in self.rotary:  # the frequencies are set anew, whatever was read before
            for name in vars(module):
                if name.endswith("max_seq_len_cached"):
                    setattr(module, name, 0)
        hidden = hidden_states(
            self.model, self._padded([request.ids[:-1] for (request,) in groups])
        )
        rows = []
        for row, (request,) in enumerate(groups):
            end = row * hidden.shape[1] + len(request.ids) - 1
            rows.append(range(end - request.n_scored, end))
        return hidden.flatten(0, 1), rows

    def _behind(self, groups: list[Group]) -> Hidden:
        """One row a context, and one a continuation behind it: at most _CONTINUATIONS times as many
        at once as a batch has rows (or, of batch_tokens, contexts of this length)."""
        contexts = [group[0].ids[: -group[0].n_scored] for group in groups]
        mask = self._padded([[1] * len(context) for context in contexts], "left")
        mask = None if mask.all() else mask
        hidden, cache = hidden_states(
            self.model, self._padded(contexts, "left"), mask, use_cache=True
        )
        # A context's last hidden state predicts the first token of all of its continuations
        states, n_states = [hidden[:, -1]], len(contexts)
        group_of = [number for number, group in enumerate(groups) for _ in group]
        rows = [[number] for number in group_of]
        tails = [request.ids[-request.n_scored : -1] for group in groups for request in group]
        limits = max(1, _CONTINUATIONS * self.batch_tokens // hidden.shape[1]), self.batch_tokens
        if self.batch_size is not None:
            limits = _CONTINUATIONS * self.batch_size, None
        order = sorted(range(len(tails)), key=lambda index: -len(tails[index]))
        order = [index for index in order if tails[index]]
        for start, stop in partition([len(tails[index]) for index in order], *limits):
            members = order[start:stop]
            tokens = self._padded([tails[index] for index in members])
            of = torch.tensor([group_of[index] for index in members], device=self.device)
            # The tensors of a cache are replaced, not written to: the one for all stays as it is
            grown = copy.copy(cache)
            grown.layers = [copy.copy(layer) for layer in cache.layers]
            grown.reorder_cache(of)
            # Padding at the right counts as read; nothing scored sees it
            seen = None if mask is None else torch.cat([mask[of], torch.ones_like(tokens)], dim=1)
            behind, _ = hidden_states(
                self.model, tokens, seen, past_key_values=grown, use_cache=True
            )
            states.append(behind.flatten(0, 1))
            for index in members:
                rows[index].extend(range(n_states, n_states + len(tails[index])))
                n_states += tokens.shape[1]
        return torch.cat(states), rows

    @functools.cached_property
    def shares(self) -> bool:
        """Whether contexts are run once: if it is wanted, and gives what the model, in eval mode,
        gives without; if not, a warning says so.

        Tried with two contexts and their continuations, of different lengths, both ways.
        """
        if self.rotary or not self.share_contexts:
            return False
        generator = torch.Generator().manual_seed(0)

        def draw(n: int) -> list[int]:
            return torch.randint(self.encoder.n_embeddings, (n,), generator=generator).tolist()

        groups = [
            [Request(context + end, len(end)) for end in map(draw, (9, 1, 2, 9))]
            for context in (draw(7), draw(4))
        ]
        alone = [[request] for group in groups for request in group]
        try:
            found, wanted = (
                hidden[list(itertools.chain(*rows))]
                for hidden, rows in (self._behind(groups), self._whole(alone))
            )
        except Exception as error:  # whatever a model raises that keeps no such cache
            why = f"{type(error).__name__}: {error}"
        else:
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

    def _scored(
        self, hidden: Tensor, rows: Sequence[Sequence[int]], requests: list[Request]
    ) -> Iterator[tuple[float, bool]]:
        """The log-likelihood of each request, and whether each of its tokens is the greedy one."""
        used, row_of = torch.tensor(list(itertools.chain(*rows))).unique(return_inverse=True)
        targets = torch.tensor(
            [i for request in requests for i in request.ids[-request.n_scored :]]
        )
        hidden = hidden[used.to(hidden.device)].to(self.head.weight.device)
        logprob = torch.empty(len(targets), dtype=torch.float64)
        greedy = torch.empty(len(targets), dtype=torch.bool)
        size = max(1, _LOGITS // self.head.weight.shape[0])
        for start in range(0, len(hidden), size):
            logits = self.head.logits(hidden[start : start + size])
            # log-softmax in bf16 would lose the tails, and make ties
            logits = logits.float() if logits.dtype.itemsize < 4 else logits
            # The harness's own function: its float32 sum over a vocabulary of 50,000 is off by 1e-5
            # a token on a CPU (logsumexp is not), which a long continuation would show
            logprobs = logits.log_softmax(-1)
            (here,) = torch.where(row_of // size == start // size)
            row, wanted = (i[here].to(logprobs.device) for i in (row_of - start, targets))
            logprob[here] = logprobs[row, wanted].double().cpu()
            greedy[here] = (logprobs.argmax(-1)[row] == wanted).cpu()
        lengths = [request.n_scored for request in requests]
        for values, flags in zip(logprob.split(lengths), greedy.split(lengths), strict=True):
            yield values.sum().item(), bool(flags.all())

    def describe(self) -> dict[str, Any]:
        """How it scores, as results hold it: plain values.

        Returns:
            tokenizer: its name, size and hash; token perplexities compare only where the hash is
                one. prefix: the tokens before every text. max_length. dtype: of the weights.
            autocast: the dtype that autocast computes in at the time of the call; None: it is off.
        """
        tokenizer, kind = self.tokenizer, self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return {
            "tokenizer": {
                # of a folder its name: where it lies says nothing about it
                "name": Path(tokenizer.name_or_path).name or type(tokenizer).__name__,
                "size": len(tokenizer),
                "hash": tokenizer_hash(tokenizer),
            },
            "prefix": tokenizer.convert_ids_to_tokens(self.encoder.prefix),
            "max_length": self.max_length,
            "dtype": str(self.head.weight.dtype).removeprefix("torch."),
            "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
        }


def _follows_length(module: nn.Module) -> bool:
    """Whether it is a rotary embedding whose frequencies follow the longest row of a batch.

    transformers' dynamic NTK scaling and LongRoPE take one set of frequencies for a whole batch, by
    its longest row, and dynamic scaling keeps the longest that it has seen. What a row gives then
    depends on the others, unless rows of one length are read together and what was seen is
    forgotten.
    """
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind]  # by layer type in Gemma 3
    return any(isinstance(k, str) and ("dynamic" in k or k == "longrope") for k in kinds)
