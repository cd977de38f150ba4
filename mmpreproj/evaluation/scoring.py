"""Log-likelihoods of continuations and texts under a language model.

The trunk runs over whole batches, the output head on the scored positions alone: of a LAMBADA item
that is one or two of a hundred. Log-softmax is taken in float32 at least, whatever the model's
dtype. Items are sorted by length and padded at the right, where a causal model cannot look, so that
a score depends on neither the batch size nor the other items. Where rotary frequencies follow the
longest row of a batch (dynamic NTK, LongRoPE), rows of one length are read together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmpreproj.backbones.lm_head import lm_head_of, trunk
from mmpreproj.backbones.modes import evaluating
from mmpreproj.backbones.tokenizers import tokenizer_hash
from mmpreproj.evaluation.encoding import Encoder, Request, max_length_of, windows
from mmpreproj.evaluation.rotary import forget_length, length_dependent
from mmpreproj.evaluation.shared import Scored, SharedContexts, split_shared

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)

# Logits held at once (2**25 numbers, 128 MiB in float32), whatever the batch.
_LOGITS = 2**25


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
        self.encoder = Encoder(tokenizer, self.max_length, embeddings.shape[0], add_bos)
        self.batch_tokens = batch_tokens
        self.batch_size = batch_size
        self.rotary = length_dependent(model)
        share = share_contexts and not self.rotary
        self.shared = SharedContexts(model, self.device) if share else None

    def loglikelihood(
        self, pairs: Sequence[tuple[str, str]], progress: bool = False
    ) -> list[Score]:
        """Scores of the continuations of (context, continuation) pairs, in the order given.

        Pairs with one context, such as the choices of one question, share its computation.

        Raises:
            ValueError: before anything is scored, if a continuation has no tokens or more than the
                model reads at once; or as `score`.
        """
        requests = self.encoder.pairs(pairs)
        cut = sum(request.n_cut > 0 for request in requests)
        if cut:
            _logger.warning(
                "%d of %d contexts lost tokens at their left: the model reads %d at once",
                *(cut, len(requests), self.max_length),
            )
        return self.score(requests, progress)

    def rolling(
        self, texts: Sequence[str], stride: int | None = None, progress: bool = False
    ) -> list[Score]:
        """Scores of whole texts, each from its first token on, in windows of max_length tokens.

        The harness's rule: BOS (else EOS) stands before the tokens that the tokenizer gives, and
        all of these count, a BOS that it puts first by default among them.

        Args:
            stride: tokens by which the window moves; None: max_length, as the harness does.

        Raises:
            ValueError: a text has no tokens; stride is not from 1 to max_length; or as `score`.
        """
        first = self.encoder.empty_context
        found = self.encoder.encode(texts)
        return self.in_windows(
            [ids if first is None else [first, *ids] for ids in found],
            *(self.max_length, self.max_length if stride is None else stride, progress),
        )

    def in_windows(
        self, sequences: Sequence[list[int]], window: int, stride: int, progress: bool = False
    ) -> list[Score]:
        """Scores of token sequences, all tokens but the first of each (see `windows`).

        Raises:
            ValueError: a sequence has fewer than two tokens, or the window exceeds max_length; or
                as `score`.
        """
        if not 1 <= window <= self.max_length:
            raise ValueError(
                f"the window must be from 1 to the {self.max_length} tokens that the model reads "
                f"at once, found {window}"
            )
        requests: list[Request] = []
        owners: list[int] = []
        for index, ids in enumerate(sequences):
            if len(ids) < 2:
                raise ValueError(f"text {index} has no tokens to score")
            for start, end, scored in windows(len(ids), window, stride):
                requests.append(Request(ids[start:end], scored))
                owners.append(index)
        logprob = [0.0] * len(sequences)
        greedy = [True] * len(sequences)
        n_tokens = [0] * len(sequences)
        for index, score in zip(owners, self.score(requests, progress), strict=True):
            logprob[index] += score.logprob
            greedy[index] &= score.greedy
            n_tokens[index] += score.n_tokens
        return [Score(*values) for values in zip(logprob, greedy, n_tokens, strict=True)]

    @torch.no_grad()
    def score(self, requests: Sequence[Request], progress: bool = False) -> list[Score]:
        """Scores of encoded requests, in the order given.

        Raises:
            ValueError: naming the request, if a log-likelihood is NaN: the logits are not finite.
        """
        found: list[Score | None] = [None] * len(requests)
        with evaluating(self.model), _bar(len(requests), progress) as advance:
            groups, alone = [], list(range(len(requests)))
            if self.shared is not None:
                groups, alone = split_shared(requests)
                if groups and not self.shared.exact:
                    groups, alone = [], list(range(len(requests)))
            for batch in self._batches(groups, requests):
                members = [index for group in batch for index in group]
                scored = self.shared.run(
                    [[requests[i] for i in group] for group in batch],
                    *(self.batch_size, self.batch_tokens),
                )
                self._keep(found, members, requests, scored)
                advance(len(members))
            for batch in self._batches([[index] for index in alone], requests):
                members = [index for (index,) in batch]
                self._keep(found, members, requests, self._plain([requests[i] for i in members]))
                advance(len(members))
        return found

    def _batches(
        self, groups: list[list[int]], requests: Sequence[Request]
    ) -> Iterator[list[list[int]]]:
        """Groups of like length, the longest first: a batch too large for the memory fails at once.

        A group is a number of rows with one context; its length that of the context, or of all the
        rows' ends, whichever is more. The longest end of a batch of several fits the model behind
        the longest context.
        """

        def length(group: list[int]) -> int:
            first = requests[group[0]]
            if len(group) == 1:
                return len(first.ids) - 1
            ends = sum(requests[index].n_scored for index in group)
            return max(len(first.ids) - first.n_scored, ends)

        lengths = [length(group) for group in groups]
        batch: list[list[int]] = []
        longest = context = end = 0
        for index in sorted(range(len(groups)), key=lambda i: (-lengths[i], i)):
            group = [requests[i] for i in groups[index]]
            own_context = len(group[0].ids) - group[0].n_scored
            own_end = max(request.n_scored for request in group) - 1
            if batch:
                full = len(batch) == (self.batch_size or max(1, self.batch_tokens // longest))
                joined = max(context, own_context) + max(end, own_end)
                wide = len(group) > 1 and joined > self.max_length
                if full or wide or (self.rotary and lengths[index] != longest):
                    yield batch
                    batch = []
            if not batch:
                longest, context, end = lengths[index], 0, 0
            context, end = max(context, own_context), max(end, own_end)
            batch.append(groups[index])
        if batch:
            yield batch

    def _plain(self, requests: list[Request]) -> Scored:
        """One row a request."""
        ids, hidden_at, targets, owners = [], [], [], []
        longest = max(len(request.ids) for request in requests) - 1
        forget_length(self.rotary)
        for row, request in enumerate(requests):
            read = len(request.ids) - 1
            # Any id serves as padding: nothing to the left of it sees it
            ids.append(request.ids[:-1] + [0] * (longest - read))
            start = row * longest
            hidden_at.extend(range(start + read - request.n_scored, start + read))
            targets.extend(request.ids[-request.n_scored :])
            owners.extend([row] * request.n_scored)
        hidden = trunk(self.model, torch.tensor(ids, device=self.device)).flatten(0, 1)
        rows = hidden[torch.tensor(hidden_at, device=hidden.device)]
        return Scored(rows, torch.arange(len(rows)), torch.tensor(targets), torch.tensor(owners))

    def _keep(
        self,
        found: list[Score | None],
        members: list[int],
        requests: Sequence[Request],
        scored: Scored,
    ) -> None:
        """Puts the scores of a batch in `found`; scored.owners count in `members`."""
        logprob, greedy = self._targets(scored.hidden, scored.row_of, scored.targets)
        sums = torch.zeros(len(members), dtype=torch.float64).index_add_(0, scored.owners, logprob)
        wrong = torch.zeros(len(members)).index_add_(0, scored.owners, (~greedy).float())
        for index, total, missed in zip(members, sums.tolist(), wrong.tolist(), strict=True):
            request = requests[index]
            if math.isnan(total):
                raise ValueError(self._not_finite(index, request))
            found[index] = Score(total, missed == 0, request.n_scored, request.n_cut)

    def _not_finite(self, index: int, request: Request) -> str:
        text = self.tokenizer.decode(request.ids[-request.n_scored :])
        return (
            f"request {index}: the log-likelihood of {text[:60]!r} is NaN, as the model's logits "
            "are not finite. Its weights have diverged, or its activations overflow in "
            f"{self.head.weight.dtype}: use an earlier checkpoint, or float32"
        )

    def _targets(self, hidden: Tensor, row_of: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (float64) and whether each is the greedy token. [M], on the CPU."""
        hidden = hidden.to(self.head.weight.device)
        size = max(1, _LOGITS // self.head.weight.shape[0])
        starts = range(0, len(hidden), size)
        bounds = torch.searchsorted(row_of, torch.tensor([*starts, len(hidden)])).tolist()
        logprob, greedy = [], []
        for start, low, high in zip(starts, bounds, bounds[1:], strict=False):
            logits = self.head.logits(hidden[start : start + size])
            # log-softmax in bf16 would lose the tails, and make ties
            logits = logits.float() if logits.dtype.itemsize < 4 else logits
            rows = (row_of[low:high] - start).to(logits.device)
            wanted = targets[low:high].to(logits.device)
            # The harness's own function: its float32 sum over a vocabulary of 50,000 is off by 1e-5
            # a token on a CPU (logsumexp is not), which a long continuation would show
            logprobs = logits.log_softmax(-1)
            logprob.append(logprobs[rows, wanted].double().cpu())
            greedy.append((logprobs.argmax(-1)[rows] == wanted).cpu())
        return torch.cat(logprob), torch.cat(greedy)

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
            "dtype": _plain_name(self.head.weight.dtype),
            "autocast": None if autocast is None else _plain_name(autocast),
        }


def _plain_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def _bar(total: int, show: bool) -> Iterator[Any]:
    """A function that moves a progress bar on by so many items."""
    if not show:
        yield lambda n: None
        return
    try:
        from rich.progress import Progress
    except ImportError as error:
        raise ImportError("progress=True needs rich: pip install 'mmpreproj[train]'") from error
    with Progress() as progress:
        task = progress.add_task("scoring", total=total)
        yield lambda n: progress.advance(task, n)
