"""The language model as a Lightning module: trained from scratch, or frozen and probed.

The loss never holds the logits of a whole batch (lm_loss.py), and evaluation takes the logits of
the scored positions alone (mmpreproj.evaluation).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

import mmpreproj
from mmpreproj.backbones.lm import load_language_model, new_language_model
from mmpreproj.backbones.lm.lm_head import LMHead, check_packing, lm_head_of
from mmpreproj.backbones.lm.lm_tokenizer import (
    check_hash,
    check_tokenizer,
    from_text,
    to_text,
    tokenizer_hash,
)
from mmpreproj.backbones.modes import set_checkpointing, train_blocks
from mmpreproj.card import run_card
from mmpreproj.data.loaders import Answers
from mmpreproj.evaluation.encoding import continue_text
from mmpreproj.evaluation.tasks import EvaluationConfig, mean_exp, read_suite, run_suite, task_line
from mmpreproj.preproj import PreProjConfig
from mmpreproj.saving import fingerprint
from mmpreproj.training.lm_loss import lm_loss, through_forward
from mmpreproj.training.lora import LoraConfig, attach_lora
from mmpreproj.training.metrics import Sums, finite
from mmpreproj.training.recipe import OptimizerConfig, ScheduleConfig, as_config
from mmpreproj.training.trained_module import TrainedModule

__all__ = ["LanguageModel"]

OPTIMIZER, SCHEDULE = OptimizerConfig(), ScheduleConfig()
EXAMPLES = (4, 256)  # blocks, and tokens of each, kept for the skip's strength on activations
SEED = 0  # of the samples at the end


class LanguageModel(TrainedModule):
    """Trains and evaluates a causal language model on the blocks of the trainer's TextDataModule.

    Training minimises cross-entropy per token. Blocks of text have equally many targets, so that
    gradient accumulation gives the gradient of the whole batch. Evaluation reports perplexity per
    token, word and byte, each over its n, and the evaluations that the config names.

    Args:
        model: a hub name, a folder, a .gguf file, or "package:NAME" (an installed package that
            holds one); None: a new model of `model_type`.
        model_type: transformers' name of an architecture, such as gpt_neox, for a new model.
        model_args: fields of its configuration, for a new model.
        dtype: of the weights that are loaded: float32, bfloat16 or float16.
        preproj: attach the method with this config (after the weights are loaded); None does not.
        lora: adapt with LoRA instead, the baseline; needs freeze_base.
        freeze_base: train only what was added. Without preproj and lora nothing trains: the base,
            to be evaluated (trainer.max_steps 0).
        optimizer: see OptimizerConfig.
        schedule: see ScheduleConfig.
        ema_decay: of the weights' moving average; None is off.
        ema_warmup: let the decay rise from 0.
        grad_checkpointing: recompute activations in the backward pass.
        compile: torch.compile the base model, all but the output layer.
        evaluations: what to evaluate at the end, by name.
        prompts: texts to continue at the end, for a look at what was learned; null: none.
        prompt_tokens: tokens of each continuation.

    Raises:
        ValueError, FileNotFoundError, ConnectionError: before training; the message says what was
            found and what would work.
    """

    monitor = ("val/loss", "min")
    needs = "text"
    counts = "tokens"
    predicts = "text"
    large = True

    def __init__(
        self,
        model: str | None = None,
        model_type: str | None = None,
        model_args: dict[str, Any] | None = None,
        dtype: str = "float32",
        preproj: PreProjConfig | None = None,
        lora: LoraConfig | None = None,
        freeze_base: bool = False,
        optimizer: OptimizerConfig = OPTIMIZER,
        schedule: ScheduleConfig = SCHEDULE,
        ema_decay: float | None = None,
        ema_warmup: bool = False,
        grad_checkpointing: bool = False,
        compile: bool = False,
        evaluations: dict[str, EvaluationConfig] | None = None,
        prompts: list[str] | None = None,
        prompt_tokens: int = 60,
    ) -> None:
        super().__init__()
        self.optimizer_config = optimizer = as_config(OptimizerConfig, optimizer)
        self.schedule_config = schedule = as_config(ScheduleConfig, schedule)
        self.preproj_config = preproj = as_config(PreProjConfig, preproj)
        self.lora_config = lora = as_config(LoraConfig, lora)
        self.replace_evaluations(evaluations or {})
        evaluations, prompts = self.evaluations, prompts or []
        if (model is None) == (model_type is None):
            raise ValueError(
                f"give either model (a name, folder or file) or model_type (a new model), found "
                f"model={model!r} and model_type={model_type!r}"
            )
        if model is not None and model_args:
            raise ValueError(f"model_args are for a new model (model_type), not for {model}")
        if self.lora_config is not None and self.preproj_config is not None:
            raise ValueError("give preproj or lora, not both: LoRA is the baseline")
        if self.lora_config is not None and not freeze_base:
            raise ValueError("lora trains beside a frozen base: set freeze_base: true")
        if freeze_base and model is None:
            raise ValueError("freeze_base would freeze a new model's random weights")
        if ema_decay is not None and (freeze_base or not 0 < ema_decay < 1):
            raise ValueError(
                f"ema_decay={ema_decay} must be between 0 and 1, without freeze_base, or null"
            )
        self.keep(locals())
        self.strict_loading = not freeze_base  # a probe's checkpoint leaves the base out
        self.tokenizer: Any = None
        self.base_fingerprint: str | None = None

    # ---- building -------------------------------------------------------------------------------

    def replace_evaluations(self, evaluations: Mapping[str, Any]) -> None:
        self.evaluations = {n: as_config(EvaluationConfig, v) for n, v in evaluations.items()}
        self.held: dict[str, Any] | None = None  # their items and texts, once they are read

    def setup(self, stage: str) -> None:
        """Read what is to be evaluated: a fault in a file shows before training."""
        if self.evaluations and stage in ("fit", "test") and self.held is None:
            self.held = read_suite(self.evaluations)

    def configure_model(self) -> None:
        """Build the model, once, and agree with the data on the tokenizer."""
        data = self._data()
        self.check_data(data)
        if self.model is None:
            self._build(data)
        if Answers(data).gives == self.needs:
            self._agree(data)

    def _build(self, data: Any) -> None:
        h = self.hparams
        if h.model is None:
            if Answers(data).gives == self.needs:
                self.tokenizer = data.tokenizer
            if self.tokenizer is None:
                raise ValueError("a new model needs a tokenizer: give the trainer a TextDataModule")
            model = new_language_model(h.model_type, h.model_args or {}, self.tokenizer)
        else:
            loaded = load_language_model(h.model, dtype=h.dtype)
            model, self.tokenizer = loaded.model, loaded.tokenizer
        if h.freeze_base:
            found = fingerprint(model)
            self._same_base(self.base_fingerprint, found)
            self.base_fingerprint = found
        if self.preproj_config is not None:
            mmpreproj.attach(model, self.preproj_config)
        if self.lora_config is not None:
            model = attach_lora(model, self.lora_config)
        elif h.freeze_base and self.preproj_config is not None:
            mmpreproj.freeze_base(model)
        elif h.freeze_base:
            model.requires_grad_(False)
        if h.grad_checkpointing:
            set_checkpointing(model)
        self.head = lm_head_of(model)
        if getattr(data, "packing_strategy", None) == "bfd":
            check_packing(model)
        self.model = model
        self.start_average()
        self.shard_model()
        if h.compile:
            inner = model.get_base_model() if self.lora_config is not None else model
            inner.base_model.compile()
        self.train(self.training)

    def _agree(self, data: Any) -> None:
        """The data's tokenizer is the model's, or has the same tokens under the same numbers."""
        if not data.has_tokenizer:
            data.tokenizer = self.tokenizer
        if data.tokenizer is not self.tokenizer:
            own, other = self.tokenizer.get_vocab(), data.tokenizer.get_vocab()
            if own != other:
                raise ValueError(
                    f"the data's tokenizer has {len(other):,} tokens, not the same as the model's "
                    f"{len(own):,}; leave --data.tokenizer out to use the model's"
                )
        check_tokenizer(data.tokenizer, self.model.get_input_embeddings().weight.shape[0])
        room = getattr(self.model.config, "max_position_embeddings", None)
        if room is not None and data.block_size > room:
            raise ValueError(
                f"blocks of {data.block_size} tokens do not fit the model's {room} positions; set "
                f"--data.block_size {room} or less"
            )
        if self.evaluations and not data.has_split("test"):
            raise ValueError(
                f"evaluations ({', '.join(self.evaluations)}) run with the test, but there is no "
                "test split; give --data.test, or a test_fraction above 0"
            )
        data.setup()  # now that the tokenizer is known: a fault in any split shows before training

    def _same_base(self, then: str | None, now: str | None) -> None:
        if then is not None and now is not None and then != now:
            raise ValueError(
                f"the checkpoint was trained on other weights than {self.hparams.model} has now: "
                f"fingerprint {then[:19]}… then, {now[:19]}… now"
            )

    def set_frozen_modes(self) -> None:
        super().set_frozen_modes()
        for name, module in self.model.named_modules():
            if ".lora_dropout" in name:
                module.train()
        if self.hparams.grad_checkpointing:
            train_blocks(self.model)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Shape: input_ids [B, T] -> logits [B, T, V]; in eval mode by `evaluated`."""
        return (self.model if self.training else self.evaluated)(input_ids, use_cache=False).logits

    # ---- training and evaluation ----------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        if not any(p.requires_grad for p in self.model.parameters()):
            if self.trainer.max_steps != 0:
                raise ValueError(
                    "nothing would train: give preproj or lora, or set trainer.max_steps to 0 to "
                    "evaluate the base"
                )
            return None
        return super().configure_optimizers()

    def count(self, batch: dict[str, Tensor]) -> int:
        return batch["targets"].numel()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        nll, n = self._nll(self.model, batch, self.head)
        loss = nll / max(n, 1)  # of answers alone there may be none
        self.count_loss(loss, n, batch_idx)
        return loss

    def _nll(self, model: nn.Module, batch: dict[str, Tensor], head: LMHead) -> tuple[Tensor, int]:
        of = (batch["input_ids"], batch["targets"], None, head, batch.get("position_ids"))
        return through_forward(model, lambda: lm_loss(model, *of))

    def new_metrics(self, split: str) -> Sums:
        return Sums(nll=0, n=0)

    def evaluate(self, batch: dict[str, Tensor], split: str) -> None:
        if self.examples is None:
            self.examples = batch["input_ids"][: EXAMPLES[0], : EXAMPLES[1]].detach().cpu()
        head = self.head if self.ema is None else lm_head_of(self.evaluated)
        nll, n = self._nll(self.evaluated, batch, head)
        self.counted.update(nll=nll.double(), n=n)

    def figures(self, split: str) -> dict[str, Any]:
        sums = self.counted.compute()
        nll, n = sums["nll"], int(sums["n"])
        if not n:
            return {"n": 0}
        result: dict[str, Any] = {"n": n, "nll": nll, "loss": nll / n}
        data = Answers(self._data()).describe()
        facts, n_targets = data.get(split), (data.get("n_targets") or {}).get(split)
        if n == n_targets and facts:  # the whole split: its words and bytes count
            result |= {"words": facts["n_words"], "bytes": facts["n_bytes"]}
        return result

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        if self.evaluations:
            rank_zero_info(f"evaluating {', '.join(self.evaluations)}")
            with self.trainer.precision_plugin.forward_context():
                self.test_result["tasks"] = through_forward(
                    self.evaluated,
                    run_suite,
                    self.evaluated,
                    self.tokenizer,
                    self.evaluations,
                    progress=self.trainer.progress_bar_callback is not None,
                    held=self.held,
                )

    # ---- checkpoints ----------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A probe's holds what is trained, without the base."""
        state = super().state_dict(*args, **kwargs)
        return {n: state[n] for n in self._trained()} if self.hparams.freeze_base else state

    def _trained(self) -> list[str]:
        return [name for name, p in self.named_parameters() if p.requires_grad]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError if a probe's parameters are not those that this one trains."""
        wrong = sorted(set(self._trained()) ^ state_dict.keys())
        if self.hparams.freeze_base and wrong:
            raise ValueError(
                f"the checkpoint's trained parameters are not this model's: {wrong[0]!r} and "
                f"{len(wrong) - 1} others are in one of them only"
            )
        return super().load_state_dict(state_dict, *args, **kwargs)

    def saved_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "base_fingerprint": self.base_fingerprint,
            "tokenizer_hash": tokenizer_hash(self.tokenizer),
        }
        if self.hparams.model is None:  # nowhere else to get it from
            facts["tokenizer"] = to_text(self.tokenizer)
        return facts

    def load_facts(self, facts: dict[str, Any]) -> None:
        saved = facts.get("base_fingerprint")
        self._same_base(saved, self.base_fingerprint)
        self.base_fingerprint = saved or self.base_fingerprint
        if self.tokenizer is None and facts.get("tokenizer"):
            self.tokenizer = from_text(facts["tokenizer"])
        if self.tokenizer is not None:
            check_hash(self.tokenizer, facts.get("tokenizer_hash"))

    # ---- records and what is shown --------------------------------------------------------------

    def adopt(self, data: Any) -> None:
        if Answers(data).gives == self.needs:
            data.tokenizer = self.tokenizer

    def facts(self) -> dict[str, Any]:
        h = self.hparams
        peft = getattr(self.model, "active_peft_config", None)  # its rank may have been solved
        return {
            "model": h.model or h.model_type,
            "preproj": h.preproj,
            "lora": h.lora and {**h.lora, **({} if peft is None else {"rank": peft.r})},
            "optimizer": h.optimizer,
            "base_fingerprint": self.base_fingerprint,
            "precision": str(self.trainer.precision) if self._trainer is not None else None,
        }

    def metrics(self, result: dict[str, Any] | None) -> dict[str, Any] | None:
        """{"loss": …, "perplexity": {"token": …, "word": …, "byte": …}, "tasks": …}.

        Words and bytes are known of a whole split alone.
        """
        if not result or not result.get("n"):
            return None
        n, loss = int(result["n"]), result["loss"]
        nll = result.get("nll", loss * n)
        counts = {"token": n, "word": result.get("words"), "byte": result.get("bytes")}
        return {
            "loss": {"value": finite(loss), "n": n},
            "perplexity": {
                unit: {"value": mean_exp(nll, count), "n": int(count)} if count else None
                for unit, count in counts.items()
            },
            "tasks": result.get("tasks") or {},
        }

    def headline(self, metrics: dict[str, Any]) -> list[list[str]]:
        figures = metrics.get("perplexity") or {}
        rows = [
            [f"test perplexity per {unit}", f"{f['value']:,.3f}  n = {f['n']:,} {unit}s"]
            for unit, f in figures.items()
            if f and f["value"] is not None
        ]
        tasks = metrics.get("tasks") or {}
        return rows + [[name, task_line(result)] for name, result in tasks.items()]

    def gather(self, folder: Path) -> None:
        if self.hparams.preproj is not None and self.hparams.freeze_base:
            mmpreproj.save(self.model, folder / "adapter")

    def finish(self, folder: Path | None, reported: TrainedModule | None, data: Any) -> None:
        """Write the trained parameters as a small folder, and continue the prompts."""
        if reported is None or folder is None:
            return
        model, adapter = reported.evaluated, folder / "adapter"
        if self.hparams.preproj is not None and self.hparams.freeze_base:
            card = run_card(Answers(data).describe(), self.metrics(self.test_result))
            print(f"the new parameters: {mmpreproj.save(model, adapter, card=card)}", flush=True)
        elif self.hparams.lora is not None:
            print(f"the new parameters: {adapter}", flush=True)
            model.save_pretrained(str(adapter), save_embedding_layers=False)
        if self.hparams.prompts:
            asked, n = enumerate(self.hparams.prompts, SEED), self.hparams.prompt_tokens
            texts = [continue_text(model, self.tokenizer, prompt, n, i) for i, prompt in asked]
            text = "\n\n".join(texts) + "\n"
            (folder / "sample.txt").write_text(text, encoding="utf-8")
            print(f"\nsample:\n{text}", flush=True)
