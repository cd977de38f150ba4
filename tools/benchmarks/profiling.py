"""Where the time of a step or of a decoded token goes, part by part, by torch.profiler."""

import argparse
import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import mmpreproj
from mmpreproj.training.sharding import blocks_of

RANGE = "part: "
METHOD = {"up": "pre-projection", "down": "pre-projection", "skip": "content skip"}


def add_parsers(parts: "argparse._SubParsersAction") -> None:
    one = parts.add_parser("profile", help=profile_parts.__doc__)
    one.set_defaults(compare=profile_parts)
    one.add_argument("--model", default="vit_preproj_base", help="timm's, or a language model")
    one.add_argument("--batch-size", type=int, default=4)
    one.add_argument("--tokens", type=int, default=256, help="in a block; a decoded token's past")
    one.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    one.add_argument("--device", default="cpu")
    one.add_argument("--repeats", type=int, default=5)


def profile_parts(options: argparse.Namespace) -> Iterator[dict]:
    """A step, and a decoded token of a language model: seconds, operations and bytes by part."""
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    runs: dict[str, Callable[[], object]] = {}
    if timm.is_model(options.model):
        model = timm.create_model(options.model).to(options.device, dtype)
        size = timm.models.get_model_input_config(model)["input_size"]
        size = (size[0], *([model.num_frames] if hasattr(model, "num_frames") else []), *size[-2:])
        images = torch.randn(options.batch_size, *size, device=options.device, dtype=dtype)
        runs["step"] = lambda: model(images).float().logsumexp(1).sum().backward()
    else:
        from mmpreproj.backbones.lm import load_language_model
        from mmpreproj.backbones.lm.lm_head import lm_head_of
        from mmpreproj.training.lm_loss import lm_loss

        model = load_language_model(options.model, dtype=options.dtype).model.to(options.device)
        mmpreproj.freeze_base(mmpreproj.attach(model))
        rows, head = model.get_input_embeddings().weight.shape[0], lm_head_of(model)
        ids = torch.randint(rows, (options.batch_size, options.tokens), device=options.device)
        runs["step of the frozen probe"] = lambda: lm_loss(model, ids, ids, head=head)[0].backward()
        with torch.no_grad():
            past = model(ids[:1], use_cache=True).past_key_values

        @torch.no_grad()
        def decode() -> None:
            model(ids[:1, :1], past_key_values=past, use_cache=True)
            past.crop(-1)

        runs["decoded token"] = decode
    for name, run in runs.items():
        found = by_part(model, run, options.repeats)
        title = f"{options.model}, {options.dtype}, {options.device}: {name}"
        show(title, found)
        yield {"title": title, "runs": [], "parts": found}


def part_names(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What is timed: the children of blocks, the method within them, and what is beside blocks."""
    blocks = list(blocks_of(model))
    for block in blocks:
        yield from block.named_children()
    for path, module in model.named_modules():
        leaf = path.rpartition(".preproj.")[2] if ".preproj." in path else ""
        if leaf in METHOD:
            yield METHOD[leaf], module
    holders = [model]
    for holder in holders:
        for name, child in holder.named_children():
            if child not in blocks:
                within = any(module in blocks for module in child.modules())
                holders.append(child) if within else (yield name, child)


@contextlib.contextmanager
def ranges(model: nn.Module) -> Iterator[None]:
    """Inside, the profiler sees the parts of the model's forward as ranges."""
    hooks, entered = [], []

    def begin(name: str) -> None:
        entered.append(record_function(RANGE + name).__enter__())

    for name, module in part_names(model):
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: begin(name)))
        hooks.append(
            module.register_forward_hook(lambda *_: entered.pop().__exit__(None, None, None))
        )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def by_part(model: nn.Module, run: Callable[[], object], repeats: int) -> dict[str, Any]:
    """{part: forward and backward seconds, FLOP, bytes allocated} of one run, and the whole.

    An operation of the backward belongs to the part whose forward it is of, by autograd's sequence
    numbers. Operations are those of matrices and convolutions, as the profiler counts them.
    """
    run()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with (
        ranges(model),
        profile(activities=activities, with_flops=True, profile_memory=True) as told,
    ):
        for _ in range(repeats):
            run()
            model.zero_grad(set_to_none=True)
    events = told.events()
    owner: dict[int, str] = {}
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    backward = [e for e in events if top_backward(e)]
    of_backward = {id(each) for event in backward for each in below(event)}
    for event in events:
        if id(event) in of_backward:
            continue
        part = part_of(event)
        if event.sequence_nr >= 0:
            owner.setdefault(event.sequence_nr, part)
        add(found[part], "forward", event)
    for event in backward:
        part = owner.get(sequence(event), "rest")
        for each in below(event):
            add(found[part], "backward", each)
    return {
        part: {key: value / repeats for key, value in counts.items()}
        for part, counts in found.items()
    }


def add(counts: collections.Counter, when: str, event: Any) -> None:
    time = event.self_device_time_total or event.self_cpu_time_total
    counts[when] += time * 1e-6
    counts["flops"] += event.flops or 0
    counts["bytes"] += max(0, event.self_cpu_memory_usage + event.self_device_memory_usage)


def part_of(event: Any) -> str:
    while event is not None:
        if event.name.startswith(RANGE):
            return event.name.removeprefix(RANGE)
        event = event.cpu_parent
    return "rest"


def top_backward(event: Any) -> bool:
    return event.name.startswith("autograd::engine::evaluate_function")


def sequence(event: Any) -> int:
    return max(each.sequence_nr for each in below(event))


def below(event: Any) -> Iterator[Any]:
    yield event
    for child in event.cpu_children:
        yield from below(child)


def show(title: str, found: dict[str, Any]) -> None:
    print(f"\n{title}")
    print(f"  {'':24} {'forward':>10} {'backward':>10} {'share':>7} {'GFLOP':>9} {'MB':>9}")
    whole = sum(part.get("forward", 0) + part.get("backward", 0) for part in found.values())
    for name, part in sorted(found.items(), key=lambda item: -item[1].get("forward", 0)):
        there, back = part.get("forward", 0), part.get("backward", 0)
        print(
            f"  {name:24} {there * 1e3:7.2f} ms {back * 1e3:7.2f} ms {(there + back) / whole:7.1%}"
            f" {part.get('flops', 0) / 1e9:9.3f} {part.get('bytes', 0) / 1e6:9.2f}"
        )
