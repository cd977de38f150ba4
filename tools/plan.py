"""What a run costs, before it is begun: operations, memory, what fits, how long it takes.

    python tools/plan.py configs/imagenet/vit_base.yaml --devices 8 --device-memory 80 \\
        --tflops 989 --utilisation 0.4 --items 1281167 --classes 1000
    python tools/plan.py configs/pythia/probe_160m.yaml --devices 8 --device-memory 80 \\
        --base '{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, …}'

One training step of the config's model is run without memory: its tensors have shapes alone
(torch's FakeTensorMode), every operation is counted, and every tensor from its making to its end.
Attention is the kind that keeps no map (flash), counted without the half that a causal mask spares.
Optimisers that work on all parameters at once (`foreach`, torch's choice on a GPU) may need up to
the size of the gradients more for a moment. Workspaces of kernels and what the allocator wastes are
not in it: leave a tenth of the device free.
"""

import argparse
import collections
import gc
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from planning.counting import FORMULAS, Memory, flash, without_memory
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import mmpreproj
from mmpreproj.analysis.records import read_yaml
from mmpreproj.backbones import building
from mmpreproj.preproj import PreProjConfig
from mmpreproj.training.console import run_tool
from mmpreproj.training.recipe import OptimizerConfig, make_optimizer
from mmpreproj.training.sharding import blocks_of


def build(spec: dict[str, Any], classes: int, base: dict[str, Any] | None) -> nn.Module:
    """The model of a config's `model:`, on meta, attached and frozen as training does it."""
    init = spec.get("init_args") or {}
    preproj = init.get("preproj")
    preproj = None if preproj is None else PreProjConfig(**preproj)
    with torch.device("meta"):
        if spec["class_path"].endswith("LanguageModel"):
            from mmpreproj.backbones.lm import new_language_model
            from mmpreproj.backbones.modes import set_checkpointing, train_blocks

            base = dict(
                base or {"model_type": init.get("model_type"), **init.get("model_args", {})}
            )
            kind = base.pop("model_type", None)
            if kind is None:
                raise ValueError(
                    f"{init.get('model')} is not looked at: give its configuration, with its "
                    'model_type, as JSON: --base \'{"model_type": "llama", …}\''
                )
            model = new_language_model(
                kind, base, preproj=preproj, dtype=init.get("dtype", "float32")
            )
            if init.get("freeze_base"):
                mmpreproj.freeze_base(model)
            if init.get("grad_checkpointing"):
                set_checkpointing(model.train())
                train_blocks(model)
            return model.train()
        default = {
            "ImageClassifier": "vit_preproj_tiny",
            "VideoClassifier": "video_vit_preproj_tiny",
        }
        name = init.get("model") or default[spec["class_path"].rpartition(".")[2]]
        model = building.build_model(name, classes, init.get("model_args"), preproj=preproj).train()
        if init.get("freeze_base"):
            building.freeze(model)
            building.set_frozen_modes(model)
        if init.get("grad_checkpointing"):
            model.set_grad_checkpointing(True)
    return model


def batch_of(model: nn.Module, size: int, tokens: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of `size` images, clips or blocks of tokens."""
    if hasattr(model, "get_input_embeddings") and hasattr(model, "lm_head"):
        ids = torch.zeros(size, tokens, dtype=torch.long)
        return ids, ids
    shape = building.input_config(model)["input_size"]
    return torch.zeros(size, *shape), torch.zeros(size, dtype=torch.long)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """What a training step takes the gradient of."""
    if inputs.is_floating_point():
        return F.cross_entropy(model(inputs).float(), targets)
    from mmpreproj.backbones.lm.lm_head import LMHead, hidden_states
    from mmpreproj.training.lm_loss import whole_loss

    head = LMHead(model.get_output_embeddings())
    hidden = hidden_states(model, inputs)
    return whole_loss(head, hidden.flatten(0, 1), targets.flatten()) / targets.numel()


def measure(
    model: nn.Module,
    config: OptimizerConfig,
    size: int,
    tokens: int = 0,
    half: bool = False,
    devices: int = 1,
    accumulated: bool = False,
) -> dict[str, Any]:
    """Operations and bytes of a step of a model on meta, with a batch of `size`.

    Lightning gives the last step's gradients up between forward and backward, and with
    accumulation not at all.
    """
    pretended = FakeTensorMode()
    with pretended, mock.patch.object(F, "scaled_dot_product_attention", flash):
        without_memory(model)
        made, batch = make_optimizer(model, config), batch_of(model, size, tokens)
        counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
        memory = Memory(model, 1 / devices)
        with counter, memory:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = loss_of(model, *batch)
            kept, kept_beside_weights = memory.live, memory.split
            forward = memory.reset()
            # of the forward alone: in the backward, counts by module run into one another
            counts = {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}
            memory.backward = True
            loss.backward()
            del loss
            backward = memory.reset()
            made.step()
            update = memory.reset()
    gc.unfreeze()
    held = [t for state in made.state.values() for t in state.values() if isinstance(t, Tensor)]
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = bytes_of(model.parameters()) + bytes_of(model.buffers())
    found = {
        "weights": weights,
        "gradients": bytes_of(trained),
        "optimiser": bytes_of(held),
        "activations": kept - weights,
        "activations_split": kept_beside_weights,
        "flops": counter.get_total_flops() / size,
    }
    old, state = found["gradients"], found["optimiser"]
    again = old if accumulated else 0
    found["peak"] = max(forward[0] + old + state, backward[0] + again + state, update[0])
    found["unsplit"] = max(forward[1] + old / devices, backward[1] + again / devices)
    new = [n for n in counts if n.rpartition(".preproj.")[2] in ("up", "down", "skip") and "." in n]
    found["method_share"] = sum(counts[name] for name in new) / counts["Global"]
    return found


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """What tensors hold, each counted once."""
    return sum(t.numel() * t.element_size() for t in tensors)


def parts(model: nn.Module) -> dict[str, int]:
    """Parameters by part."""
    counts: collections.Counter[str] = collections.Counter()
    blocks = {p for block in blocks_of(model) for p in block.parameters()}
    for name, parameter in model.named_parameters():
        new = name.rpartition(".preproj.")[2] if ".preproj." in name else None
        part = "blocks" if parameter in blocks else "embeddings, head, norms"
        if new:
            part = "content skip" if new.startswith("skip") else "pre-projection"
        counts[part] += parameter.numel()
    return dict(counts)


def sharded(model: nn.Module, found: dict[str, Any], devices: int, half: bool) -> float:
    """Bytes on each of N devices that split everything, block by block (FSDP2)."""
    blocks = [list(block.parameters()) for block in blocks_of(model)]
    inside = {p for block in blocks for p in block}
    rest = [p for p in model.parameters() if p not in inside]

    def gathered(parameters: list[Tensor]) -> int:
        size = 2 if half else 4
        return sum(p.numel() * min(size, p.element_size()) for p in parameters)

    largest = max(blocks, key=gathered, default=[])
    # the block that runs and the next, whose weights are on their way; and its gradients, whole
    whole = gathered(rest) + 2 * gathered(largest)
    whole += bytes_of([p for p in (*largest, *rest) if p.requires_grad])
    return (found["weights"] + found["optimiser"]) / devices + found["unsplit"] + whole


def cache_bytes(model: nn.Module) -> int | None:
    """Of the keys and values of one token, in bfloat16; None for a model that does not generate."""
    config = getattr(model, "config", None)
    if not hasattr(model, "generate"):
        return None
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * 2


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, as plain types."""
    config = read_yaml(options.config)
    spec, data = config["model"], config.get("data", {}).get("init_args") or {}
    trainer, init = config.get("trainer") or {}, config["model"].setdefault("init_args", {})
    if options.model:
        init["model"] = options.model
    size = options.batch_size or data.get("batch_size", 1)
    tokens = options.tokens or data.get("block_size", 512)
    precision = options.precision or str(trainer.get("precision"))
    half = precision == "bf16-mixed"
    optimizer = OptimizerConfig((init.get("optimizer") or {}).get("opt", "adamw"))
    accumulated = (trainer.get("accumulate_grad_batches") or 1) > 1
    base = json.loads(options.base) if options.base else None
    if options.dtype:
        init["dtype"] = options.dtype
        init["preproj"] = {**(init.get("preproj") or {}), "dtype": "float32"}
    found: dict[str, Any] = {"batch_size": size, "precision": precision, "strategies": {}}
    for checkpointing in sorted({bool(init.get("grad_checkpointing")), True}):
        init["grad_checkpointing"] = checkpointing
        model = build(spec, options.classes, base)
        found |= {"parameters": parts(model), "cache_bytes": cache_bytes(model)}
        found["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        cost = measure(model, optimizer, size, tokens, half, options.devices, accumulated)
        if init.get("ema_decay"):
            cost["weights"] *= 2
            cost["peak"] += cost["weights"] / 2
        # DDP sends gradients from buckets, which are a second copy of them
        whole = cost["peak"] + (cost["gradients"] if options.devices > 1 else 0)
        split = sharded(model, cost, options.devices, half)
        name = ", recomputing" if checkpointing else ""
        for strategy, peak in ((f"ddp{name}", whole), (f"fsdp2{name}", split)):
            kept = cost["activations_split" if strategy.startswith("fsdp2") else "activations"]
            room = options.device_memory * 1e9 * 0.9 - (peak - kept)
            most = max(0, int(room / (kept / size)))
            figures = {"peak": peak, "activations": kept, "largest_batch": most}
            found["strategies"][strategy] = cost | figures
    return found


def show(found: dict[str, Any], options: argparse.Namespace) -> None:
    """Print what `plan` found."""
    total = sum(found["parameters"].values())
    print(f"{options.config}{f', {options.model}' if options.model else ''}: {total:,} parameters")
    for part, count in found["parameters"].items():
        print(f"  {part:24} {count:16,}  {count / total:6.1%}")
    print(f"  {'trained':24} {found['trained']:16,}  {found['trained'] / total:6.1%}")
    what, size = "item", found["batch_size"]
    print(
        f"batch {size} a device, {found['precision']}; {options.devices} devices of "
        f"{options.device_memory:g} GB, of which a tenth is left free; {options.tflops:g} TFLOP/s, "
        f"of which {options.utilisation:.0%} are had"
    )
    columns = ("GB a device", "weights", "gradients", "optimiser", "activations", "peak", "batch")
    print("  {:20} {:>9} {:>9} {:>9} {:>11} {:>8} {:>12}".format(*columns))
    for name, cost in found["strategies"].items():
        share = options.devices if name.startswith("fsdp2") else 1
        split = [cost[k] / share / 1e9 for k in ("weights", "gradients", "optimiser")]
        fits = "fits" if cost["largest_batch"] >= size else "does not"
        print(
            "  {:20} {:9.2f} {:9.2f} {:9.2f} {:11.2f} {:8.2f} {:>12}".format(
                name, *split, cost["activations"] / 1e9, cost["peak"] / 1e9,
                f"{fits}, {cost['largest_batch']}",
            )
        )  # fmt: skip
    print("  (batch: whether it fits, and the largest that does)")
    for name, cost in found["strategies"].items():
        if name.startswith("fsdp2"):
            continue
        seconds = cost["flops"] / (options.tflops * 1e12 * options.utilisation)
        told = f"{cost['flops'] / 1e9:,.1f} GFLOP an {what} (of the forward, "
        told += f"{cost['method_share']:.1%} the method's); "
        told += f"{1 / seconds:,.1f} {what}s/s a device"
        if options.items:
            hours = options.items * options.epochs * seconds / options.devices / 3600
            took = f"{hours:,.1f} hours" if hours < 48 else f"{hours / 24:,.1f} days"
            told += f"; {took} for {options.epochs:g} x {options.items:,}"
        print(f"  {name.replace('ddp', 'a step')}: {told}")
    if found["cache_bytes"]:
        print(
            f"  keys and values: {found['cache_bytes']:,} bytes a token in bfloat16, as the base's"
        )


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--device-memory", type=float, default=80.0, help="GB of each")
    parser.add_argument("--tflops", type=float, default=989.0, help="of a device, at its peak")
    parser.add_argument("--utilisation", type=float, default=0.4, help="share of it that is had")
    parser.add_argument("--items", type=int, help="images, clips or blocks of tokens in an epoch")
    parser.add_argument("--epochs", type=float, help="default: the config's")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--model", help="another one than the config's")
    parser.add_argument("--base", help="a language model's configuration, as JSON")
    parser.add_argument("--dtype", help="of its weights, beside new parameters in float32")
    parser.add_argument("--batch-size", type=int, help="of a device; default: the config's")
    parser.add_argument("--tokens", type=int, help="in a block; default: the config's")
    parser.add_argument("--precision", help="default: the config's")
    options = parser.parse_args(args)
    if options.epochs is None:
        options.epochs = (read_yaml(options.config).get("trainer") or {}).get("max_epochs", 1)
    show(plan(options), options)


if __name__ == "__main__":
    sys.exit(run_tool(main))
