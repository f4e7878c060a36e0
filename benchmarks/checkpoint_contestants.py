"""Who saves and loads: this repository's engine, FSDP2 with torch.distributed.checkpoint, and plain files.

Each holds the same GPT in fp32 with AdamW states, cut over the ranks: the engine at stage 3, as FSDP2 has it.
Nothing is trained: states are filled with random numbers, so that their memory exists and has been touched
before anything is timed, of all alike. A contestant's calls are collective.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.checkpoint_results import OURS, PEER, PLAIN, STATE_BYTES
from benchmarks.elastic_model import build_model
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.checkpoint import load, save

LR, BETAS, EPS, DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
_PIECE_BYTES = 8 << 20
_SUMMED_AT_ONCE = 1 << 20


class Contestant(Protocol):
    """One rank's part of a state that can be saved and loaded."""

    def fill(self, seed: int) -> None:
        """Give it values: the same seed, the same values."""

    def save(self, folder: Path) -> Path:
        """Write it below `folder`, durably; where it can be loaded from."""

    def load(self, folder: Path) -> None:
        """Fill it with what was saved there, by any number of ranks."""

    def prints(self) -> list[int]:
        """A number for each kind of state. Added up over the ranks they depend on the state's bits alone."""


def build(name: str, size: str) -> Contestant:
    """The contestant of that name, for the GPT of that size. Collective."""
    makers = {OURS: Ours, PEER: Dcp, PLAIN: Plain}
    return makers[name](size)


def _parameters_of(size: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(size).parameters())


class Ours:
    """The engine of this repository at stage 3, otherwise at its defaults; digests are verified by a load."""

    def __init__(self, size: str) -> None:
        with torch.device("meta"):
            model = build_model(size)
        adamw = AdamWConfig(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        self.engine = ZeroEngine(model, ZeroConfig(stage=3, optimizer=adamw), device="cpu", blank=True)

    def fill(self, seed: int) -> None:
        pieces = self.engine.begin_filling().pieces
        _randomise([tensor for _, tensor in pieces.values()], seed)
        self.stand_at(step=1)

    def stand_at(self, *, step: int) -> None:
        """Let the state, as it is, be the one after that step."""
        self.engine.begin_filling()
        self.engine.filled(step=step, updates=step, gate=None)
        self.engine.refresh_parameters()

    def held(self) -> list[tuple[str, torch.Tensor]]:
        """All that this rank holds of the state, with its kind."""
        (live,) = self.engine.snapshots()
        return [(kind, tensor) for (_, kind), (_, tensor) in live.pieces.items()]

    def save(self, folder: Path) -> Path:
        return save(self.engine, folder, extra={}, generation=1).path

    def load(self, folder: Path) -> None:
        load(self.engine, folder)

    def prints(self) -> list[int]:
        found: dict[str, int] = {}
        for kind, tensor in self.held():
            found[kind] = found.get(kind, 0) + _print(tensor)
        return list(found.values())


class _State(Stateful):
    """Model and optimizer as the documentation of torch.distributed.checkpoint puts them together."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


class Dcp:
    """FSDP2 and fused AdamW; torch.distributed.checkpoint at its defaults, which sync the files."""

    def __init__(self, size: str) -> None:
        warnings.filterwarnings("ignore", module=r"torch\.distributed")
        with torch.device("meta"):
            model = build_model(size)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": DECAY},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._model = model
        self._optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
        self._state = {"app": _State(model, self._optimizer)}

    def fill(self, seed: int) -> None:
        self._state["app"].state_dict()  # has the optimizer make its states
        for kind, tensors in enumerate(self._held()):
            _randomise(tensors, seed + 1_000 * kind)

    def save(self, folder: Path) -> Path:
        dcp.save(self._state, storage_writer=dcp.FileSystemWriter(folder, sync_files=True))
        return folder

    def load(self, folder: Path) -> None:
        dcp.load(self._state, storage_reader=dcp.FileSystemReader(folder))

    def prints(self) -> list[int]:
        return [sum(map(_print, tensors)) for tensors in self._held()]

    def _held(self) -> Iterator[list[torch.Tensor]]:
        parameters = list(self._model.parameters())
        yield [p.detach().to_local() for p in parameters]
        for key in ("exp_avg", "exp_avg_sq"):
            yield [self._optimizer.state[p][key].to_local() for p in parameters]


class Plain:
    """Each rank has a buffer of an equal share of the state's bytes, and saves it to a file of its own."""

    def __init__(self, size: str) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._first, last = (
            _parameters_of(size) * place // self._world_size * STATE_BYTES
            for place in (self._rank, self._rank + 1)
        )
        self._buffer = torch.empty(last - self._first, dtype=torch.uint8)

    def fill(self, seed: int) -> None:
        _randomise([self._buffer.view(torch.float32)], seed)

    def save(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder / f"{self._rank:05d}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        view, done = self._view(), 0
        while done < len(view):
            done += os.pwrite(descriptor, view[done : done + _PIECE_BYTES], done)
        os.fsync(descriptor)
        os.close(descriptor)
        for place in (folder, folder.parent):
            descriptor = os.open(place, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        dist.barrier()
        return folder

    def load(self, folder: Path) -> None:
        """This rank's share of what all files hold, laid end to end."""
        view, done, reached = self._view(), 0, 0
        for path in sorted(folder.iterdir()):
            size = path.stat().st_size
            descriptor = os.open(path, os.O_RDONLY)
            while done < len(view) and self._first + done < reached + size:
                offset = self._first + done - reached
                length = min(_PIECE_BYTES, len(view) - done, size - offset)
                done += os.preadv(descriptor, [view[done : done + length]], offset)
            os.close(descriptor)
            reached += size

    def prints(self) -> list[int]:
        return [_print(self._buffer.view(torch.float32))]

    def _view(self) -> memoryview:
        return memoryview(self._buffer.numpy())


@torch.no_grad()
def _randomise(tensors: Sequence[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(1_000_000 * dist.get_rank() + seed)
    for tensor in tensors:
        tensor.uniform_(-1, 1, generator=generator)


def _print(tensor: torch.Tensor) -> int:
    """The bits of each element as an integer, added up: the same however the tensor is cut."""
    bits = tensor.contiguous().view(-1).view(torch.int32)
    return sum(int(piece.sum(dtype=torch.int64)) for piece in bits.split(_SUMMED_AT_ONCE))
