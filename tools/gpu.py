"""What a GPU does with all of this, in one table and at most ten minutes.

    python tools/gpu.py --out docs/gpu.md
    python tools/gpu.py --small --device cpu        # the same parts, tiny: do they run?

Runs alternate; a ratio is the median of those by round. What there is no time left for, or what
fails, stands in the table as that. Language models have SmolLM2-135M's form and random weights, so
that nothing is fetched.
"""

import argparse
import copy
import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import timm
import torch
from benchmark import alternate
from torch import nn

import mmpreproj
from mmpreproj.analysis.records import read_record

Row = tuple[str, str, str]
ROOT = Path(__file__).parents[1]
LLAMA = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
TINY_LLAMA = LLAMA | {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
TINY_VIT = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}


def filled(model: nn.Module) -> nn.Module:
    """The model with numbers where W_down and W_skip start as zeros, which may be quicker."""
    with torch.no_grad():
        for module in mmpreproj.preproj_modules(model).values():
            for parameter in module.parameters():
                parameter.normal_(std=0.02)
    return model


class Bench:
    """The parts of the table; each yields rows of (what, figures, ratio)."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.small, self.device = options.small, torch.device(options.device)
        self.repeats = 2 if options.small else 9

    def compare(self, what: str, runs: dict[str, Callable[[], object]], half: bool) -> Row:
        def timed(run: Callable[[], object]) -> None:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
                run()
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        timed_runs = {name: functools.partial(timed, run) for name, run in runs.items()}
        values = alternate(timed_runs, "seconds", self.repeats)
        (one, a), (two, b) = values.items()
        ratio = statistics.median(x / y for x, y in zip(a, b, strict=True))
        told = (
            f"{one} {statistics.median(a) * 1e3:.2f} ms, {two} {statistics.median(b) * 1e3:.2f} ms"
        )
        return what, told, f"{ratio:.3f}"

    def steps(self) -> Iterator[Row]:
        """Forward and backward with both parts against neither, eager and compiled."""
        size, batch = (TINY_VIT, 2) if self.small else ({}, 64)
        off = {"pre_projection": False, "content_skip": False}
        models = {
            "method": filled(timm.create_model("vit_preproj_base", **size)).to(self.device),
            "neither": timm.create_model("vit_preproj_base", **size, **off).to(self.device),
        }
        images = torch.randn(batch, 3, *[size.get("img_size", 224)] * 2, device=self.device)

        def step(model: nn.Module) -> None:
            model(images).float().logsumexp(1).sum().backward()
            model.zero_grad(set_to_none=True)

        for compiled in (False, True):
            if compiled:
                for model in models.values():
                    model.compile(backend="eager" if self.small else "inductor")
            for half in (False, True):
                name = f"vit_preproj_base, batch {batch}: a step"
                name += f"{', bf16 autocast' if half else ''}{', compiled' if compiled else ''}"
                runs = {key: functools.partial(step, model) for key, model in models.items()}
                yield self.compare(name, runs, half)

    def language(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**(TINY_LLAMA if self.small else LLAMA)))

    def decoding(self) -> Iterator[Row]:
        """Greedy decoding with the method against without it."""
        base, tokens = self.language().to(self.device).eval(), 4 if self.small else 64
        attached = filled(mmpreproj.attach(copy.deepcopy(base)))
        ids = torch.ones(1, 8, dtype=torch.long, device=self.device)
        how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        for dtype in (torch.float32, torch.bfloat16):
            models = {"method": attached.to(dtype), "base": base.to(dtype)}
            runs = {
                name: functools.partial(model.generate, ids, pad_token_id=0, **how)
                for name, model in models.items()
            }
            yield self.compare(f"{tokens} tokens decoded, {str(dtype)[6:]}", runs, False)

    def probe(self) -> Iterator[Row]:
        """A frozen probe's step against LoRA's of equal parameters; scoring with and without."""
        from mmpreproj.backbones.lm.lm_head import lm_head_of
        from mmpreproj.training.lm_loss import lm_loss
        from mmpreproj.training.lora import LoraConfig, attach_lora

        equal = LoraConfig(rank=None, equal_to=mmpreproj.PreProjConfig())
        models = {
            "method": mmpreproj.freeze_base(filled(mmpreproj.attach(self.language()))),
            "LoRA": attach_lora(self.language(), equal),
        }
        models = {name: model.to(self.device).train() for name, model in models.items()}
        vocabulary = models["method"].config.vocab_size
        shape = (2, 16) if self.small else (8, 512)
        ids = torch.randint(vocabulary, shape, device=self.device)

        def loss(model: nn.Module) -> torch.Tensor:
            return lm_loss(model, ids, ids, head=lm_head_of(model))[0]

        def step(model: nn.Module) -> None:
            loss(model).backward()
            model.zero_grad(set_to_none=True)

        what = f"{shape[0]} x {shape[1]} tokens"
        runs = {name: functools.partial(step, model) for name, model in models.items()}
        yield self.compare(f"a frozen probe's step, {what}, bf16 autocast", runs, True)
        scored = {"method": models["method"], "base": self.language().to(self.device)}
        score = torch.no_grad()(loss)
        runs = {name: functools.partial(score, model) for name, model in scored.items()}
        yield self.compare(f"scoring {what}, bf16 autocast", runs, True)

    def defaults(self) -> Iterator[Row]:
        """Steps of the configs that need no data, by tools/train.py, and with weights split."""
        steps = 1 if self.small else 100
        ways = [(name, []) for name in ("vit", "video", "lm", "probe")]
        ways = ways[:1] if self.small else ways
        if not self.small:
            ways += [("vit", ["--trainer.strategy", way]) for way in ("fsdp2", "fsdp")]
        for name, more in ways:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, str(ROOT / "tools/train.py"), f"configs/{name}.yaml"]
                command += ["--trainer.max_steps", str(steps), "--run.test", "false", *more]
                command += ["--run.root", folder, "--trainer.precision", "bf16-mixed"]
                command += ["--trainer.accelerator", "gpu" if self.device.type == "cuda" else "cpu"]
                command += ["--trainer.devices", "1", "--trainer.limit_val_batches", "1"]
                done = subprocess.run(
                    command, cwd=ROOT, capture_output=True, text=True, timeout=120
                )
                what = " ".join([f"{steps} steps of configs/{name}.yaml", *more[1:]])
                if done.returncode:
                    yield what, f"failed: {done.stderr.strip().splitlines()[-1]}", ""
                    continue
                told = read_record(next(Path(folder).glob("*/*/record.json")))["training"]
                speed = {k: v for k, v in told.items() if k.endswith("_per_second") and v}
                rates = ", ".join(
                    f"{v:,.0f} {k.removesuffix('_per_second')}/s" for k, v in speed.items()
                )
                yield what, f"{told['seconds']:.1f} s, {rates}", ""


def table(options: argparse.Namespace) -> list[Row]:
    """All rows; parts that fail or find no time left are told."""
    bench, ends = Bench(options), time.monotonic() + 60 * options.minutes
    rows: list[Row] = []
    for part in (bench.steps, bench.decoding, bench.probe, bench.defaults):
        try:
            for row in part():
                rows.append(row)
                print("  ".join(row), flush=True)
                if time.monotonic() > ends:
                    break
        except Exception as error:  # the other parts are wanted all the same
            rows.append((part.__name__, f"failed: {type(error).__name__}: {error}", ""))
            print(*rows[-1], flush=True)
        if time.monotonic() > ends:
            rows.append(("the rest", f"not run: {options.minutes:g} minutes were over", ""))
            break
    return rows


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the table here, as Markdown")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0, help="start nothing after so many")
    parser.add_argument("--small", action="store_true", help="tiny models, two rounds, one step")
    options = parser.parse_args(args)
    rows = table(options)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU"
    text = (
        f"# On {name}\n\n`python tools/gpu.py`, torch {torch.__version__}, timm {timm.__version__}."
    )
    text += "\n\n| what | medians | first / second |\n|---|---|---|\n"
    text += "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
