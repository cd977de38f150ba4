"""Training with weights, gradients and optimiser state split over processes: FSDP2, by Lightning.

    trainer.strategy: fsdp2

Each block of the model is a unit: its weights are gathered when it runs, and given up again. A
checkpoint is one file, the same as of any other strategy, so that a run goes on with another number
of processes, or unsharded. Where a checkpoint is too large for one process to hold:

    trainer.strategy:
      class_path: mmpreproj.training.ShardedStrategy
      init_args: {save_distributed_checkpoint: true}

which makes it a folder, with a part by each process.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["ShardedStrategy", "read_checkpoint", "shard"]


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy with all processes sharing in the data.

    Args:
        save_distributed_checkpoint: write checkpoints as folders, each process its own part,
            instead of as one file that the first process gathers.
        process_group_backend: of torch.distributed; None: nccl for GPUs, gloo for CPUs.
    """

    def __init__(
        self, save_distributed_checkpoint: bool = False, process_group_backend: str | None = None
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
        )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    # Lightning's own numbers an optimiser's parameters in the model's order, a plain optimiser its
    # own in that of its groups: one could not go on with the other's file.

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
        )

        optimizer = getattr(optimizer, "_optimizer", optimizer)
        whole = not self._save_distributed_checkpoint
        options = StateDictOptions(full_state_dict=whole, cpu_offload=True)
        state = get_optimizer_state_dict(self.model, optimizer, options=options)
        if not whole or not state:  # gathered on the first process alone
            return state
        return _renamed(state, {name: i for i, name in enumerate(self._names(optimizer))})

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_optimizer_state_dict,
        )

        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            return super().load_checkpoint(path, weights_only)
        checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
        own, saved = self.model.state_dict(), checkpoint.pop("state_dict")
        mine = {name: _part(tensor, own.get(name)) for name, tensor in saved.items()}
        self.model.load_state_dict(mine, strict=self.lightning_module.strict_loading)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        states = checkpoint.get("optimizer_states") or ()
        for optimizer, state in zip(self.optimizers, states, strict=False):  # a test has none
            named = _renamed(state, dict(enumerate(self._names(optimizer))))
            set_optimizer_state_dict(self.model, optimizer, named, options=options)
        return checkpoint

    def _names(self, optimizer: Optimizer) -> list[str]:
        """Of the optimiser's parameters, in its order."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [names[p] for group in optimizer.param_groups for p in group["params"]]


StrategyRegistry.register(
    "fsdp2", ShardedStrategy, "weights split over processes, block by block (FSDP2)", override=True
)


def _part(whole: Tensor, like: Tensor | None) -> Tensor:
    """This process's part of a tensor, split as another is; nothing is sent."""
    if not hasattr(like, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(like.device, like.dtype)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _renamed(state: dict[str, Any], new: dict[Any, Any]) -> dict[str, Any]:
    """An optimiser's state with its parameters called otherwise."""
    groups = [{**g, "params": [new[p] for p in g["params"]]} for g in state["param_groups"]]
    return {"state": {new[p]: held for p, held in state["state"].items()}, "param_groups": groups}


def shard(model: nn.Module, mesh: Any, precision: str) -> None:
    """Split the parameters of `model` over a mesh of Lightning's, in place.

    In mixed precision, weights are gathered in bfloat16, and gradients summed in float32.

    Raises:
        ValueError: for a mesh of tensor parallelism.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if mesh["tensor_parallel"].size() > 1:
        raise ValueError(
            f"tensor_parallel_size={mesh['tensor_parallel'].size()}: models here are split by "
            "their parameters alone; set trainer.strategy: fsdp2, or tensor_parallel_size: 1 and "
            "data_parallel_size to the number of processes"
        )
    policy = MixedPrecisionPolicy()
    if precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*blocks_of(model), model):
        fully_shard(module, mesh=mesh["data_parallel"], mp_policy=policy)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of equal modules that have parts."""
    for child in module.children():
        repeated = isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1
        # by name: with the method in some of them, they are of different classes
        if repeated and len({type(m).__name__ for m in child}) == 1 and any(child[0].children()):
            yield from child
        else:
            yield from blocks_of(child)


# What torch's own metadata are made of.
_CHECKPOINT = "torch.distributed.checkpoint"
METADATA = {
    *((f"{_CHECKPOINT}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(
        (f"{_CHECKPOINT}.metadata", f"{kind}StorageMetadata")
        for kind in ("Bytes", "Chunk", "Tensor")
    ),
    *((f"{_CHECKPOINT}.metadata", name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((f"{_CHECKPOINT}.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")),
    *(("torch", name) for name in ("Size", "float32", "bfloat16", "float16", "float64", "int64")),
    *(("torch", name) for name in ("bool", "uint8")),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
}


class _Metadata(pickle.Unpickler):
    """Reads the `.metadata` of a sharded checkpoint, a pickle, without running code from it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in METADATA:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint's content, on the CPU; of a folder, without the optimiser's state.

    No code in it is run.
    """
    if not path.is_dir():
        return torch.load(path, map_location="cpu", weights_only=True)
    from torch.distributed.checkpoint import FileSystemReader, load

    with open(path / ".metadata", "rb") as file:
        metadata = _Metadata(file).load()
    reader = FileSystemReader(path)
    reader.read_metadata = lambda *_, **__: metadata  # its own runs what the pickle says
    state = {
        name.removeprefix("state_dict."): torch.empty(held.size, dtype=held.properties.dtype)
        for name, held in metadata.state_dict_metadata.items()
        if name.startswith("state_dict.")
    }
    with warnings.catch_warnings():  # that one process reads it alone
        warnings.simplefilter("ignore", UserWarning)
        load({"state_dict": state}, storage_reader=reader, no_dist=True)
    return {**torch.load(path / "meta.pt", weights_only=True), "state_dict": state}
