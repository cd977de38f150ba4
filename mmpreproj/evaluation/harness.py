"""A model for EleutherAI's lm-evaluation-harness, scored by this package.

    import lm_eval
    from mmpreproj.evaluation.harness import MMPreProjLM
    lm_eval.simple_evaluate(model=MMPreProjLM(model, tokenizer), tasks=["lambada_openai"])

Importing this registers the name `mmpreproj`. The harness's own command takes it this way:

    python -m mmpreproj.evaluation.harness --model mmpreproj \
        --model_args pretrained=FOLDER,adapter=ADAPTER --tasks hellaswag
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import mmpreproj
from mmpreproj.backbones.modes import evaluating
from mmpreproj.backbones.text import load_with_adapter
from mmpreproj.evaluation.scoring import Scorer

try:
    import lm_eval.models  # noqa: F401  its own models are not looked for once one is registered
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ImportError(
        "the evaluation harness is not installed: pip install 'mmpreproj[eval]'"
    ) from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerBase

# New tokens, where a task does not say how many: as the harness's own Hugging Face model.
MAX_NEW_TOKENS = 256
_MAX_NEW = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("mmpreproj")
class MMPreProjLM(LM):
    """Log-likelihoods and generation for the harness's tasks.

    Args:
        model: a causal language model that is loaded already; or
        pretrained: what load_language_model takes: a folder, a .gguf file, a name of the hub.
        tokenizer: the model's; needed with `model`.
        adapter: a folder of mmpreproj.save, or of PEFT's save_pretrained, with `pretrained`.
        dtype: to load in, with `pretrained`.
        device: to put the model on; None: where it is.
        batch_size: rows a batch; "auto" or None: by the number of tokens.
        max_length: tokens that the model reads at once; None: as its configuration says.
        add_bos_token: BOS before every text; None: where the tokenizer does so by default.
        max_batch_size: the harness hands it over; there is nothing for it to limit.

    Raises:
        ValueError: neither or both of model and pretrained, a missing tokenizer, or what loading
            and Scorer refuse.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        pretrained: str | None = None,
        adapter: str | None = None,
        dtype: str = "float32",
        device: str | None = None,
        batch_size: int | str | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        max_batch_size: int | None = None,
    ):
        super().__init__()
        if (model is None) == (pretrained is None):
            raise ValueError("give either a model with its tokenizer, or pretrained=…")
        if model is None:
            loaded = load_with_adapter(pretrained, adapter, dtype)
            model, tokenizer = loaded.model, loaded.tokenizer
        elif adapter is not None:
            raise ValueError("adapter= goes with pretrained=; a model is taken as it is")
        if tokenizer is None:
            raise ValueError("model= needs its tokenizer beside it")
        if device is not None:
            model.to(device)
        if isinstance(batch_size, str):
            batch_size = None if batch_size.startswith("auto") else int(batch_size)
        self.model = model
        self.tokenizer = tokenizer
        self.scorer = Scorer(
            *(model, tokenizer),
            max_length=max_length,
            add_bos=add_bos_token,
            batch_size=batch_size,
        )
        self.batch_size = batch_size
        self._device = self.scorer.device

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of each (context, continuation)."""
        pairs = [request.args for request in requests]
        scores = self.scorer.loglikelihood(pairs)
        found = [(score.logprob, score.greedy) for score in scores]
        for pair, value in zip(pairs, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", pair, value)
        return found

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, in windows that do not overlap."""
        texts = [request.args[0] for request in requests]
        found = [score.logprob for score in self.scorer.rolling(texts)]
        for text, value in zip(texts, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), value)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to one of the task's stop strings."""
        found: list[str] = [""] * len(requests)
        prompts = self.scorer.encoder.encode([request.args[0] for request in requests])
        by_settings: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        for members in by_settings.values():
            settings = _generation(requests[members[0]].args[1])
            members.sort(key=lambda index: -len(prompts[index]))
            size = self.batch_size or 16
            for start in range(0, len(members), size):
                batch = members[start : start + size]
                texts = self._generate([prompts[index] for index in batch], *settings)
                for index, text in zip(batch, texts, strict=True):
                    found[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return found

    @torch.no_grad()
    def _generate(
        self, prompts: list[list[int]], until: list[str], n_new: int, settings: dict[str, Any]
    ) -> list[str]:
        room = self.scorer.max_length - n_new
        if room < 1:
            raise ValueError(
                f"{n_new} new tokens leave no room for a prompt: the model reads "
                f"{self.scorer.max_length} at once; set max_gen_toks lower"
            )
        tokenizer = self.tokenizer
        ends = self._ends(until)
        pad = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        # With nothing to go on from, what stands for an empty context everywhere
        prompts = [(ids or [self.scorer.encoder.empty_context or 0])[-room:] for ids in prompts]
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor(
            [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device
        )
        with evaluating(self.model):
            out = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=n_new,
                pad_token_id=pad,
                eos_token_id=ends or None,
                stopping_criteria=_stop_criteria(tokenizer, until, longest),
                **settings,
            )
        texts = []
        for row in out[:, longest:].tolist():
            end = next((at for at, token in enumerate(row) if token in ends), len(row))
            text = tokenizer.decode(row[:end], skip_special_tokens=True)
            for term in until:
                text = text.split(term)[0]
            texts.append(text)
        return texts

    def _ends(self, until: list[str]) -> list[int]:
        """Tokens that end a text: the tokenizer's EOS, the model's own, and special ones of `until`
        (which no decoded text shows)."""
        own = self.model.generation_config.eos_token_id
        own = own if isinstance(own, list) else [own]
        tokenizer = self.tokenizer
        special = [term for term in until if term in tokenizer.all_special_tokens]
        found = {tokenizer.eos_token_id, *own, *tokenizer.convert_tokens_to_ids(special)}
        return sorted(found - {None})

    @property
    def max_length(self) -> int:
        return self.scorer.max_length

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        if not chat_template:
            return ""
        return self.tokenizer.get_chat_template(None if chat_template is True else chat_template)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def get_model_info(self) -> dict[str, Any]:
        """How it was scored, beside the harness's own results."""
        parameters = sum(p.numel() for p in self.model.parameters())
        return {
            "model_num_parameters": parameters,
            "model_dtype": str(self.scorer.head.weight.dtype),
            "mmpreproj": mmpreproj.__version__,
            "scorer": self.scorer.describe(),
        }


def _generation(task: dict[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
    """Stop strings, new tokens at most, and what `generate` takes, from a task's settings."""
    settings = dict(task)
    until = settings.pop("until", None) or []
    until = [until] if isinstance(until, str) else list(until)
    limits = [settings.pop(name, None) for name in _MAX_NEW]
    n_new = next((int(limit) for limit in limits if limit is not None), MAX_NEW_TOKENS)
    temperature = settings.pop("temperature", None)
    sample = settings.setdefault("do_sample", bool(temperature))
    if sample and temperature:  # generate refuses a temperature of 0
        settings["temperature"] = temperature
    return [term for term in until if term], n_new, settings


def _stop_criteria(tokenizer: Any, until: Sequence[str], start: int) -> Any:
    """Ends a row as soon as one of the strings is in what it has written since `start`."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    if not until:
        return None
    # A token is at least one byte, so no string is spread over more tokens than this
    tail = max(len(term.encode()) for term in until) + 1

    class Stop(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            new = input_ids[:, max(start, input_ids.shape[1] - tail) :]
            texts = tokenizer.batch_decode(new, skip_special_tokens=True)
            done = [any(term in text for term in until) for text in texts]
            return torch.tensor(done, device=input_ids.device)

    return StoppingCriteriaList([Stop()])


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
