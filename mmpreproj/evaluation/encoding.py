"""From strings to the token ids that are scored, by the rules of the lm-evaluation-harness.

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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a model's configuration calls the longest text that it reads.
_LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len")
# Without a limit of its own (ALiBi, or none set): what the harness takes, too.
DEFAULT_LENGTH = 2048
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
        self.empty_context: int | None = eos if bos is None else bos
        self._bos_text = (
            None if self.empty_context is None else tokenizer.decode([self.empty_context])
        )

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
            ValueError: naming the pair, before anything is scored: a continuation has no tokens, or
                more than the model reads.
        """
        moved = [_move_space(context, continuation) for context, continuation in pairs]
        contexts = list(dict.fromkeys(context for context, _ in moved if context))
        tokens = dict(zip(contexts, self.encode(contexts), strict=True))
        wholes = iter(self.encode([a + b for a, b in moved if a]))
        requests = []
        for index, (context, continuation) in enumerate(moved):
            if context:
                before, whole = tokens[context], next(wholes)
                scored = whole[len(before) :] or self.encode([continuation], bos=False)[0]
            else:
                before, scored = self._without_context(continuation)
            if not before or not scored or len(scored) > self.max_length:
                raise ValueError(self._unscorable(index, pairs[index], scored))
            ids = before + scored
            n_cut = max(0, len(ids) - self.max_length - 1)
            requests.append(Request(ids[n_cut:], len(scored), n_cut))
        return requests

    def _without_context(self, continuation: str) -> tuple[list[int], list[int]]:
        scored = self.encode([continuation], bos=False)[0]
        first = self.empty_context
        # As in the harness: a text that begins with that token has its context already
        if first is None or (scored[:1] == [first] and len(scored) > 1):
            return scored[:1], scored[1:]
        return [first], scored

    def _unscorable(self, index: int, pair: tuple[str, str], scored: list[int]) -> str:
        what = f"pair {index}: the continuation {pair[1][:60]!r} behind {pair[0][-60:]!r} has "
        if not scored:
            return what + "no tokens to score; give it at least one character"
        return what + (
            f"{len(scored)} tokens, more than the {self.max_length} that the model reads at once; "
            "score it as a text, in windows (Scorer.rolling, perplexity)"
        )


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


def max_length_of(model: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """The most tokens that a model reads at once: its configuration's, else its tokenizer's, else
    2048."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    for name in _LENGTHS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    value = getattr(tokenizer, "model_max_length", None)
    return int(value) if value is not None and 0 < value < _NO_LIMIT else DEFAULT_LENGTH


def _move_space(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _prefix(tokenizer: PreTrainedTokenizerBase, add_bos: bool | None) -> list[int]:
    """The tokens that stand before every text."""
    if add_bos is False:
        return []
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    # Only what comes first: a token behind the text (an EOS) would end a context too early
    starts = range(len(whole) - len(plain) + 1)
    default = next((whole[:i] for i in starts if whole[i : i + len(plain)] == plain), [])
    if default or add_bos is None:
        return default
    if tokenizer.bos_token_id is None:
        raise ValueError(
            f"add_bos=True, but {type(tokenizer).__name__} has no BOS token; leave add_bos at None"
        )
    return [tokenizer.bos_token_id]
