"""Training on one process and on two that share the weights, in forked processes of one script.

    python sharded_runs.py FOLDER

writes FOLDER/NAME.PROCESSES.RANK.json for each run: the losses of its steps.
"""

import json
import os
import random
import socket
import sys
import traceback
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningDataModule, seed_everything
from text_data import character_tokenizer
from torch.utils.data import DataLoader
from training_data import Numbered, TinyData, classifier, trainer
from transformers import LlamaConfig, LlamaForCausalLM

import mmpreproj
from mmpreproj.data.loaders import EpochSampler
from mmpreproj.data.text import TextDataModule
from mmpreproj.training import LanguageModel, ShardedStrategy, VideoClassifier, cli
from mmpreproj.training.callbacks import Reproducible

ADAM = {"opt": "adamw", "lr": 0.01, "weight_decay": 0.05}
FLAT = {"sched": "none"}
STEPS = 3  # in an epoch, of two


class Clips(LightningDataModule):
    gives = "clips"

    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size
        self.label_sets = {"class": ["a", "b", "c"]}
        self.data_config = None

    def train_dataloader(self):
        data = Numbered(4 * STEPS, 3, 16)
        data.images = data.images[:, :, None].repeat(1, 1, 4, 1, 1)
        data.targets = data.targets[:, None]
        world, rank = self.trainer.world_size, self.trainer.global_rank
        return DataLoader(data, self.batch_size, sampler=EpochSampler(data, world, rank))


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


def language(folder, batch, **keywords):
    settings = {"preproj": {}, "optimizer": ADAM, "schedule": FLAT}
    module = LanguageModel(model=str(folder / "base"), **{**settings, **keywords})
    data = TextDataModule(
        train=str(folder / "text.txt"), block_size=16, batch_size=batch, num_workers=0,
        val_fraction=0.0, test_fraction=0.0,
    )  # fmt: skip
    return module, data


def image(folder, batch, **keywords):
    module = classifier(optimizer=ADAM, schedule=FLAT, **keywords)
    return module, TinyData(n=4 * STEPS, n_val=0, batch_size=batch)


def video(folder, batch, **keywords):
    args = {"img_size": 16, "patch_size": 8, "num_frames": 4, "embed_dim": 32, "depth": 2}
    module = VideoClassifier(model_args={**args, "num_heads": 2}, optimizer=ADAM, schedule=FLAT)
    return module, Clips(batch)


OFF = {"pre_projection": False}
RUNS = {
    "probe": (language, {"freeze_base": True}, {}),
    "whole language model": (language, {}, {}),
    "skip alone, recomputed": (
        language,
        {"freeze_base": True, "preproj": OFF, "grad_checkpointing": True},
        {},
    ),
    "half": (language, {"freeze_base": True}, {"precision": "bf16-mixed"}),
    "bfloat16 base": (
        language,
        {"freeze_base": True, "dtype": "bfloat16", "preproj": {"dtype": "float32"}},
        {"precision": "bf16-mixed"},
    ),
    "image": (image, {}, {}),
    "image, recomputed, accumulated": (
        image,
        {"grad_checkpointing": True},
        {"accumulate_grad_batches": 3},
    ),
    "attached image, last layer": (
        image,
        {"model": "vit_tiny_patch16_224", "preproj": {"layers": [-1]}, "freeze_base": True},
        {},
    ),
    "video": (video, {}, {}),
}


def fit(folder, name, processes, strategy="auto", resume=None, epochs=2, save=None, **told):
    make, keywords, settings = RUNS[name]
    seed_everything(0, verbose=False)
    module, data = make(folder, 4 // processes, **keywords)
    losses = Losses()
    runner = trainer(
        folder, devices=processes, strategy=strategy, max_epochs=epochs, gradient_clip_val=0.5,
        callbacks=[losses, Reproducible(0)], **settings,
    )  # fmt: skip
    runner.fit(module, data, ckpt_path=resume and str(folder / resume), weights_only=True)
    if save:
        runner.save_checkpoint(str(folder / save))
    return runner, module, losses.losses


def write(folder, name, processes, losses):
    rank = os.environ["RANK"]
    (folder / f"{name}.{processes}.{rank}.json").write_text(json.dumps(losses))


def one_first(folder):
    """The runs that sharded ones are to equal, and a checkpoint of one."""
    for name in RUNS:
        save = "plain.ckpt" if name == "probe" else None
        if save:
            fit(folder, name, 1, epochs=1, save=save)
        write(folder, name, 1, fit(folder, name, 1)[-1])


def two(folder):
    for name in RUNS:
        _, module, losses = fit(folder, name, 2, "fsdp2")
        write(folder, name, 2, losses)
        assert all(hasattr(p, "full_tensor") for p in module.model.parameters())
        if name == "probe":
            mmpreproj.save(module.model, folder / "adapter")
            fit(folder, name, 2, "fsdp2", epochs=1, save="one_file.ckpt")
            parts = ShardedStrategy(save_distributed_checkpoint=True)
            fit(folder, name, 2, parts, epochs=1, save="parts.ckpt")
            resume_all(folder, 2)
    (folder / "configs").mkdir(exist_ok=True)
    for strategy, name in (("fsdp2", "whole"), (PARTS, "parts")):
        config = CONFIG.replace("FOLDER", str(folder)).replace("STRATEGY", strategy)
        (folder / "configs" / f"{name}.yaml").write_text(config)
        torch.distributed.barrier()
        cli.main([str(folder / "configs" / f"{name}.yaml"), "--run.root", str(folder / "runs")])


def resume_all(folder, processes):
    """Go on with what one process wrote, two that gathered it, and two that wrote a part each."""
    plain = "auto" if processes == 1 else "fsdp2"
    for file, strategy in (
        ("plain.ckpt", plain),
        ("one_file.ckpt", plain),
        ("parts.ckpt", ShardedStrategy(save_distributed_checkpoint=True)),
    ):
        losses = fit(folder, "probe", processes, strategy, resume=file)[-1]
        write(folder, f"resumed {file}", processes, losses)


def one_last(folder):
    resume_all(folder, 1)


PARTS = (
    "{class_path: mmpreproj.training.ShardedStrategy, "
    "init_args: {save_distributed_checkpoint: true}}"
)
CONFIG = """
seed_everything: 0
model:
  class_path: mmpreproj.training.LanguageModel
  init_args:
    model: FOLDER/base
    preproj: {}
    freeze_base: true
data:
  class_path: mmpreproj.data.TextDataModule
  init_args:
    train: FOLDER/text.txt
    block_size: 16
    batch_size: 2
    num_workers: 0
    val_fraction: 0.1
    test_fraction: 0.1
trainer: {max_epochs: 1, accelerator: cpu, devices: 2, strategy: STRATEGY}
"""


def in_processes(run, folder, processes):
    """Fork: torch and Lightning are imported once. Nothing here has run a backward pass before."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        if (child := os.fork()) == 0:
            os.environ.update(
                TORCHELASTIC_RUN_ID="tests", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes), GROUP_RANK="0",
                RANK=str(rank), LOCAL_RANK=str(rank),
            )  # fmt: skip
            try:
                run(folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    # the first to fail ends all: others would wait for it
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, 9)
            raise SystemExit(1)


def main():
    folder = Path(sys.argv[1])
    seed_everything(1, verbose=False)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    character_tokenizer().save_pretrained(folder / "base")
    draw = random.Random(0)
    lines = ["".join(draw.choices("abcde ", k=15)) + "\n" for _ in range(4 * STEPS)]
    (folder / "text.txt").write_text("".join(lines) + "a")
    in_processes(one_first, folder, 1)
    in_processes(two, folder, 2)
    in_processes(one_last, folder, 1)


if __name__ == "__main__":
    main()
