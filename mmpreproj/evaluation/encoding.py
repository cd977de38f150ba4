"""From strings to the token ids that a model reads, by the rules of the lm-evaluation-harness.

Results agree with the field's only where the tokens do. The rules, which `HFLM` of
EleutherAI's lm-evaluation-harness sets:

- White space at the end of a context moves to the start of the continuation.
- The continuation's tokens are those of context + continuation behind as many as the context has
  alone. Where a token spans the join and leaves none, the continuation's own are taken (the harness
  stops there).
- An empty context, or one of white space alone, is one token: the tokenizer's BOS, else its EOS;
  of a tokenizer that has neither, the continuation's first token is context and is not scored.
- What is longer than the model's context loses tokens at its left.
- BOS stands before a text where the tokenizer puts it by default and the text has none of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmpreproj.backbones.modes import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Encoder", "Request", "continue_text", "max_length_of", "windows"]

# What a model's configuration calls the longest text that it reads.
_LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len")
# Without a limit of its own (ALiBi, or none set): what the harness takes, too.
DEFAULT_LENGTH = 2048
# What one more run of the model costs beyond its tokens, in tokens: reading all weights once more.
RUN_TOKENS = 24
# Tokenizers write "no limit" as a number of this size or more.
_NO_LIMIT = 10**9


@dataclasses.dataclass(frozen=True)
class Request:
    """Tokens to score: the model reads all but the last, and the last `n_scored` are predicted.

    Args:
        ids: at least n_scored + 1 tokens, at most one more than the model reads.
        n_scored: how many of them count, at the end.
        n_cut: how many tokens of the context did not fit, and were left out.
    """

    ids: list[int]
    n_scored: int
    n_cut: int = 0


class Encoder:
    """Token ids of contexts, continuations and whole texts.

    Args:
        tokenizer: of Hugging Face, with or without BOS, EOS and padding tokens.
        max_length: the most tokens that the model reads at once.
        n_embeddings: rows of the model's embedding; ids must lie below.
        add_bos: put BOS before a text. None: as the tokenizer does by default.

    Raises:
        ValueError: max_length is not positive; add_bos=True and the tokenizer has no BOS.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        n_embeddings: int,
        add_bos: bool | None = None,
    ):
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1 token, found {max_length}")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.n_embeddings = n_embeddings
        self.prefix = _prefix(tokenizer, add_bos)
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.empty_context: list[int] = [i for i in (bos, eos) if i is not None][:1]
        self._bos_text = tokenizer.decode(self.empty_context)

    def encode(self, texts: Sequence[str], bos: bool = True) -> list[list[int]]:
        """Tokens of each text; with `bos`, behind what the tokenizer (or add_bos) puts first.

        Raises:
            ValueError: an id is not below the model's number of embeddings.
        """
        if not texts:
            return []
        # verbose=False: a text longer than the model reads is cut or read in windows, on purpose
        found = self.tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        largest = max((max(ids) for ids in found if ids), default=0)
        if largest >= self.n_embeddings:
            raise ValueError(
                f"the tokenizer gives id {largest}, but the model has {self.n_embeddings} "
                "embeddings (ids from 0): this is not the model's tokenizer"
            )
        if bos and self.prefix:
            found = [
                ids if self._bos_text and text.startswith(self._bos_text) else self.prefix + ids
                for text, ids in zip(texts, found, strict=True)
            ]
        return found

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Request]:
        """One request for each (context, continuation).

        Raises:
            ValueError: as `request`, naming the pair, before anything is scored.
        """
        moved = [(a.rstrip(), a[len(a.rstrip()) :] + b) for a, b in pairs]
        contexts = list(dict.fromkeys(context for context, _ in moved))
        tokens = dict(zip(contexts, self.encode(contexts), strict=True))
        wholes = self.encode([context + continuation for context, continuation in moved])
        requests = []
        for index, (context, continuation) in enumerate(moved):
            before = tokens[context] if context else self.empty_context
            scored = wholes[index][len(before) :] if context else []
            scored = scored or self.encode([continuation], bos=False)[0]
            # As in the harness: a text that begins with that token has its context already
            if not context and (not before or (scored[:1] == before and len(scored) > 1)):
                before, scored = scored[:1], scored[1:]
            what = f"pair {index}: the continuation {pairs[index][1][:60]!r}"
            what += f" behind {pairs[index][0][-60:]!r}"
            requests.append(self.request(before, scored, what))
        return requests

    def request(self, context: list[int], scored: list[int], what: str) -> Request:
        """The tokens that are read; a context that is too long loses its left.

        Args:
            what: names it in a message.

        Raises:
            ValueError: a continuation has no tokens, or more than the model reads.
        """
        if not context or not scored:
            raise ValueError(f"{what} has no tokens to score; give it at least one character")
        if len(scored) > self.max_length:
            raise ValueError(
                f"{what} has {len(scored)} tokens, more than the {self.max_length} that the model "
                "reads at once; score it as a text, in windows (perplexity)"
            )
        n_cut = max(0, len(context) + len(scored) - self.max_length - 1)
        return Request((context + scored)[n_cut:], len(scored), n_cut)


def windows(n: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Spans (start, end, scored) in which a sequence of n tokens is read piece by piece.

    The model reads tokens [start, end - 1) of each span, at most `window`, and the span's last
    `scored` are predicted. Every token but the very first is predicted exactly once, each but those
    of the first span behind at least window - stride + 1 others. With stride = window this is the
    harness's rule for rolling log-likelihoods.

    Raises:
        ValueError: unless 1 <= stride <= window.
    """
    if not 1 <= stride <= window:
        raise ValueError(f"stride must be from 1 to the window ({window} tokens), found {stride}")
    done = 1
    while done < n:
        end = min(n, done + (stride if done > 1 else window))
        yield max(0, end - window - 1), end, end - done
        done = end


def by_context(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests that share a context together, the others each alone.

    A context so short that a second run would cost more than it saves is not shared; nor is one
    that was cut, where it is another one for every continuation.
    """
    found: dict[tuple[int, ...], list[Request]] = {}
    for request in requests:
        found.setdefault(tuple(request.ids[: -request.n_scored]), []).append(request)
    groups: list[list[Request]] = []
    for context, group in found.items():
        shared = len(context) * (len(group) - 1) > RUN_TOKENS
        groups.extend([group] if shared else ([request] for request in group))
    return groups


def partition(
    lengths: Sequence[int], rows: int, tokens: int | None = None, run_tokens: int = RUN_TOKENS
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
    runs, stop = [], len(lengths)
    while stop:
        runs.append((best[stop][1], stop))
        stop = best[stop][1]
    return runs[::-1]


def max_length_of(model: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """The most tokens that a model reads at once: its configuration's, else its tokenizer's, else
    2048."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    lengths = [getattr(config, name, None) for name in _LENGTHS]
    lengths.append(getattr(tokenizer, "model_max_length", None))
    known = (n for n in lengths if isinstance(n, int | float) and 0 < n < _NO_LIMIT)
    return int(next(known, DEFAULT_LENGTH))


def _prefix(tokenizer: PreTrainedTokenizerBase, add_bos: bool | None) -> list[int]:
    """The tokens that stand before every text."""
    if add_bos is False:
        return []
    found = tokenizer("a", return_special_tokens_mask=True)
    # Only what comes first: a token behind the text (an EOS) would end a context too early
    n = sum(1 for _ in itertools.takewhile(bool, found["special_tokens_mask"]))
    if n or add_bos is None:
        return found["input_ids"][:n]
    if tokenizer.bos_token_id is None:
        raise ValueError(
            f"add_bos=True, but {type(tokenizer).__name__} has no BOS token; leave add_bos at None"
        )
    return [tokenizer.bos_token_id]


@torch.no_grad()
def continue_text(
    model: nn.Module,
    tokenizer: Any,
    prompt: str,
    tokens: int,
    seed: int | None = None,
    **generation: Any,
) -> str:
    """The prompt with its continuation by `generate()`, in eval mode, for a person to look at.

    The prompt stands behind what the tokenizer puts before a text (BOS), and without what it puts
    behind one (EOS), which would end it.

    Args:
        tokens: how many to add at most; it stops earlier at the end-of-sequence token.
        seed: sample with it, leaving the generators as they were; None: greedy.
        generation: keywords of transformers' generate, such as temperature and top_p.

    Raises:
        ValueError: if the prompt has no tokens, or does not fit the model with what is to come; or
            the tokenizer is not the model's.
    """
    embeddings = model.get_input_embeddings().weight
    device = embeddings.device
    encoder = Encoder(tokenizer, max_length_of(model, tokenizer), embeddings.shape[0])
    ids = torch.tensor(encoder.encode([prompt]), dtype=torch.long, device=device)
    if not ids.shape[1]:
        raise ValueError("the prompt has no tokens; give it a word at least")
    room, n = getattr(model.config, "max_position_embeddings", None), ids.shape[1]
    if room is not None and n + tokens > room:
        raise ValueError(
            f"the prompt's {n} tokens and {tokens} new ones do not fit the model's {room}"
        )
    settings = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": seed is not None,
        "max_new_tokens": tokens,
        "pad_token_id": tokenizer.pad_token_id or 0,
        **generation,
    }
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with evaluating(model), forked:
        if seed is not None:
            torch.manual_seed(seed)
        out = model.generate(input_ids=ids, **settings)
    return tokenizer.decode(out[0], skip_special_tokens=True)
