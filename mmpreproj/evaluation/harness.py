"""A model for EleutherAI's lm-evaluation-harness, scored by this package.

    import lm_eval
    from mmpreproj.evaluation.harness import MMPreProjLM
    lm_eval.simple_evaluate(model=MMPreProjLM(model, tokenizer), tasks=["lambada_openai"])

Importing this registers the name `mmpreproj`. The harness's own command takes it this way:

    python -m mmpreproj.evaluation.harness --model FOLDER --tasks hellaswag

FOLDER is a model with the method (of save_pretrained), or an adapter that names its base; in full,
`--model mmpreproj --model_args pretrained=FOLDER,adapter=ADAPTER`.
"""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import mmpreproj
from mmpreproj.backbones.lm import load_with_adapter
from mmpreproj.backbones.modes import evaluating
from mmpreproj.evaluation.scoring import Scorer
from mmpreproj.messages import need

need("lm_eval.models.huggingface", "the evaluation harness", "eval")

from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerBase

__all__ = ["MMPreProjLM"]

# Prompts continued at once, and windows of texts taken together, where no batch size is given.
BATCH_SIZE = 16


@register_model("mmpreproj")
class MMPreProjLM(HFLM):
    """The harness's own Hugging Face model, with log-likelihoods by Scorer.

    Args:
        model: a causal language model that is loaded already; or
        pretrained: what load_with_adapter takes: a folder, a .gguf file, a name of the hub, or an
            adapter folder alone.
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
        if (model is None) == (pretrained is None):
            raise ValueError("give either a model with its tokenizer, or pretrained=…")
        if model is None:
            loaded = load_with_adapter(pretrained, adapter, dtype)
            model, tokenizer = loaded.model, loaded.tokenizer
        elif adapter is not None:
            raise ValueError("adapter= goes with pretrained=; a model is taken as it is")
        if tokenizer is None:
            raise ValueError("model= needs its tokenizer beside it")
        # the harness's command says cuda:0 unless told, and means: if there is one
        if device is not None and (torch.cuda.is_available() or not device.startswith("cuda")):
            model.to(device)
        rows = None if batch_size is None or str(batch_size).startswith("auto") else int(batch_size)
        self.scorer = Scorer(
            model, tokenizer, max_length=max_length, add_bos=add_bos_token, batch_size=rows
        )
        with evaluating(model):
            super().__init__(
                model,
                tokenizer=copy.deepcopy(tokenizer),  # which gets a padding token if it has none
                batch_size=rows or BATCH_SIZE,
                max_length=self.scorer.max_length,
                add_bos_token=add_bos_token,
            )

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of each ((context, continuation),
        context's tokens, continuation's tokens)."""
        asked = []
        for index, (pair, context, continuation) in enumerate(requests):
            if pair and not continuation:  # where a token spans the join: the continuation's own
                continuation = self.tok_encode(pair[1], add_special_tokens=False)
            what = f"request {index}: the continuation of {pair}"
            asked.append(self.scorer.encoder.request(context, continuation, what))
        found = [(score.logprob, score.greedy) for score in self.scorer.score(asked)]
        for (pair, _, _), value in zip(requests, found, strict=True):
            if pair:
                self.cache_hook.add_partial("loglikelihood", pair, value)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model, in eval mode, writes after each context, up to a task's stop strings."""
        with evaluating(self.model):
            return super().generate_until(requests, disable_tqdm)

    def get_model_info(self) -> dict[str, Any]:
        """How it was scored, beside the harness's own facts."""
        ours = {"mmpreproj": mmpreproj.__version__, "scorer": self.scorer.describe()}
        return super().get_model_info() | ours


def named(words: list[str]) -> list[str]:
    """The harness's arguments, with the class above for a `--model` that is a folder."""
    for place, (word, value) in enumerate(itertools.pairwise(words)):
        if word in ("--model", "-M") and Path(value).is_dir():
            ours = ["--model", "mmpreproj", "--model_args", f"pretrained={value}"]
            return [*words[:place], *ours, *words[place + 2 :]]
    return words


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.argv[1:] = named(sys.argv[1:])
    cli_evaluate()
