"""Conversations and instructions: the tokens that a model reads of a row, and which are answers.

A row has `messages` (a list of {"role", "content"}), `prompt` and `completion` (both text, or both
lists of messages), or Alpaca's `instruction`, `input` and `output`. Which tokens count in the loss
is TRL's rule, under TRL's names:

- `completion_only_loss`: of a row with a prompt, those from where they are no longer the prompt's.
- `assistant_only_loss`: of messages, those that the chat template marks with {% generation %}; of a
  template without that mark (TRL refuses it), what an assistant's message adds behind the prompt
  for it.

Text stands between BOS and EOS as documents do, messages as the chat template has them. Alpaca's
rows are messages where there is a chat template, else text by Alpaca's own prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from mmpreproj.backbones.lm.lm_tokenizer import encode, tokenizer_name
from mmpreproj.messages import about, short

__all__ = ["Chat", "ChatEncoder", "is_chat", "text_of"]

FORMS = ({"messages"}, {"prompt", "completion"}, {"instruction", "output"})
ALPACA = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
Turns = str | list[dict[str, Any]]


class Chat(NamedTuple):
    """A row, and its place for messages."""

    place: str
    row: dict[str, Any]

    def parts(self, template: bool) -> tuple[Turns, Turns]:
        """Prompt and completion, both text or both messages; the prompt may have none."""
        row = self.row
        if row.get("messages") is not None:
            found = [], row["messages"]
        elif "completion" in row:
            found = row.get("prompt"), row["completion"]
        else:
            found = self._alpaca(template)
        for turns in found:
            messages = isinstance(turns, list) and all(
                isinstance(turn, dict) and "role" in turn for turn in turns
            )
            if type(turns) is not type(found[1]) or not (messages or isinstance(turns, str)):
                raise ValueError(
                    f"{self.place}: expected text, or a list of messages with role and content, "
                    f"found {short(turns)}"
                )
        if not found[1]:
            raise ValueError(f"{self.place} is empty: it has nothing to answer")
        return found

    def _alpaca(self, template: bool) -> tuple[Turns, Turns]:
        task, more, answer = (self.row.get(key) or "" for key in ("instruction", "input", "output"))
        if template:
            asked = {"role": "user", "content": f"{task}\n\n{more}" if more else task}
            return [asked], [{"role": "assistant", "content": answer}]
        heads = {"more": "", "input": ""}
        if more:
            further = ", paired with an input that provides further context"
            heads = {"more": further, "input": f"### Input:\n{more}\n\n"}
        return ALPACA.format(instruction=task, **heads), answer


def is_chat(row: dict[str, Any]) -> bool:
    """Whether a row has the columns of a conversation or an instruction."""
    return any(form <= row.keys() for form in FORMS)


def text_of(chat: Chat) -> str:
    """All that is said in it, a line each, for a tokenizer that is made of the text."""
    return "\n".join(_said(chat.parts(False)))


def _said(turns: Any) -> Iterator[str]:
    if isinstance(turns, str):
        yield turns
    elif isinstance(turns, list | tuple):
        for turn in turns:
            yield from _said(turn.get("content") if isinstance(turn, dict) else turn)


def _common(a: list[int], b: list[int]) -> int:
    """How many they have in common at the start."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


class ChatEncoder:
    """The tokens of conversations under a tokenizer, and which of them count.

    Args:
        bos, eos: ids before and after text; None: nothing.
        template: a chat template, in place of the tokenizer's own.
    """

    def __init__(
        self,
        tokenizer: Any,
        bos: int | None,
        eos: int | None,
        template: str | None = None,
        completion_only_loss: bool | None = None,
        assistant_only_loss: bool = False,
    ):
        self.tokenizer, self.bos, self.eos = tokenizer, bos, eos
        self.template = template or getattr(tokenizer, "chat_template", None)
        self.completion_only = completion_only_loss is not False
        self.assistant_only = assistant_only_loss
        self.marked = bool(re.search(r"\{%-?\s*generation\b", str(self.template)))

    def __call__(self, chat: Chat) -> tuple[list[int], list[bool]]:
        """Ids, and whether each counts.

        Raises: ValueError, with the row's place, for what is no conversation, or does not fit the
            chat template.
        """
        prompt, completion = chat.parts(self.template is not None)
        with about(chat.place, "cannot be written as tokens"):
            if isinstance(completion, str):
                ids, n_prompt, counts = *self._of_text(prompt, completion), None
            else:
                ids, n_prompt, counts = self._of_messages(prompt, completion)
        counts = counts or [True] * len(ids)
        if prompt and self.completion_only:
            counts[:n_prompt] = [False] * n_prompt
        return ids, counts

    def _of_text(self, prompt: str, completion: str) -> tuple[list[int], int]:
        if self.assistant_only:
            raise ValueError("assistant_only_loss is for messages, and this is text")
        before, whole = encode(self.tokenizer, [prompt, prompt + completion])
        bos, eos = ([] if i is None else [i] for i in (self.bos, self.eos))
        return bos + whole + eos, len(bos) + _common(before, whole)

    def _of_messages(
        self, prompt: list, completion: list
    ) -> tuple[list[int], int, list[bool] | None]:
        messages = prompt + completion
        ids = self._written(messages)
        whole = prompt and self.completion_only
        n_prompt = _common(self._written(prompt, True), ids) if whole else 0
        if not self.assistant_only:
            return ids, n_prompt, None
        if self.marked:
            found = self._template(messages, return_assistant_tokens_mask=True)
            return ids, n_prompt, [bool(k) for k in found["assistant_masks"]]
        counts = [False] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._written(messages[:number], True)
            behind = self._written(messages[: number + 1])
            if ids[: len(behind)] != behind or behind[: len(before)] != before:
                raise ValueError(
                    "the chat template writes a message in another way when others follow, so that "
                    "the answers cannot be told apart: give a template that marks them with "
                    "{% generation %} as chat_template_path"
                )
            counts[len(before) : len(behind)] = [True] * (len(behind) - len(before))
        return ids, n_prompt, counts

    def _written(self, messages: list, prompt_follows: bool = False) -> list[int]:
        return self._template(messages, add_generation_prompt=prompt_follows)["input_ids"]

    def _template(self, messages: list, **keywords: Any) -> Any:
        if self.template is None:
            raise ValueError(
                "messages need a chat template, and the tokenizer "
                f"{tokenizer_name(self.tokenizer)!r} has none: give one as chat_template_path "
                "(--data.chat_template_path FILE)"
            )
        return self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, tokenize=True, return_dict=True, **keywords
        )
