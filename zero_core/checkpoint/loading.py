"""Loading a checkpoint at any N and stage: every rank reads the ranges it will hold, and no others.

From the two layouts a rank computes which ranges of which files it needs. Collective: an error on one rank is
an error on all.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from zero_core.agreement import together
from zero_core.checkpoint import manifest as manifests
from zero_core.checkpoint.manifest import Manifest
from zero_core.engine import ZeroEngine
from zero_core.errors import CheckpointError
from zero_core.layout import pulls
from zero_core.snapshot import HeldState, held_states, persistent_buffers, state_kinds


def load(engine: ZeroEngine, folder: Path) -> dict[str, Any]:
    """Fill the engine with the state in `folder`, whatever N and stage wrote it; returns `extra`.

    Raises CheckpointError on every rank if any rank cannot read what it needs, or if the checkpoint is of
    another model or precision, or of an optimizer that keeps other states.
    """
    engine.collectives.fence()  # a slower rank may still gather what is about to be written
    with together(engine.collectives, f"loading {folder}", CheckpointError):
        manifest = manifests.read(folder)
        _check_same_model(engine, manifest, folder)
        engine.begin_filling()
        with _Shards(folder) as shards:
            for held in held_states(engine.optimizer.states, engine.units, whole_replicas=True):
                _fill(engine, manifest, shards, held)
        _load_buffers(engine, folder / manifests.BUFFERS)
    engine.filled(step=manifest.step, updates=manifest.updates, gate=manifest.loss_scale)
    engine.refresh_parameters()
    return dict(manifest.extra)


def _check_same_model(engine: ZeroEngine, manifest: Manifest, folder: Path) -> None:
    if manifest.precision != engine.config.precision:
        raise CheckpointError(
            f"{folder} was saved in {manifest.precision}, the engine runs in {engine.config.precision}: "
            "use the same precision"
        )
    if set(manifest.kinds) != set(state_kinds(engine.config)):
        raise CheckpointError(
            f"{folder} holds {', '.join(manifest.kinds)} of each parameter, and "
            f"{type(engine.config.optimizer).__name__} steps with {', '.join(state_kinds(engine.config))}: "
            "use the optimizer it was saved with"
        )
    if manifest.layout.units == engine.layout.units:
        return
    saved = {(s.name, s.shape, u.trainable) for u in manifest.layout.units for s in u.slots}
    wanted = {(s.name, s.shape, u.trainable) for u in engine.layout.units for s in u.slots}
    missing, extra = sorted(wanted - saved)[:5], sorted(saved - wanted)[:5]
    raise CheckpointError(
        f"{folder} holds another model (name, shape, trainable): not in it {missing}, only in it {extra}; "
        "or the same parameters grouped into other units"
    )


class _Shards:
    """The ranks' files of a checkpoint, opened when first needed, read by ranges."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, Any] = {}

    def __enter__(self) -> "_Shards":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)

    def read(self, rank: int, name: str, start: int, stop: int) -> torch.Tensor:
        if rank not in self._open:
            opened = safe_open(self._folder / manifests.shard_name(rank), framework="pt")
            self._open[rank] = opened.__enter__()  # type: ignore[no-untyped-call]
        part: torch.Tensor = self._open[rank].get_slice(name)[start:stop]
        return part


def _fill(engine: ZeroEngine, manifest: Manifest, shards: _Shards, held: HeldState) -> None:
    """Read a held range from the files of its old owners."""
    stop = held.start + held.tensor.numel()
    for move in pulls(manifest.layout, unit=held.unit, start=held.start, stop=stop):
        offset = manifest.layout.owned(move.unit, move.source)[0]
        part = shards.read(move.source, f"{held.kind}/{held.unit}", move.start - offset, move.stop - offset)
        if part.dtype != held.tensor.dtype or part.numel() != move.stop - move.start:
            raise CheckpointError(
                f"{held.kind} of unit {engine.layout.units[held.unit].name!r}, elements {move.start} to "
                f"{move.stop}: the file of rank {move.source} holds {part.numel()} of {part.dtype}, "
                f"not {held.tensor.dtype}"
            )
        held.tensor[move.start - held.start : move.stop - held.start].copy_(part)


@torch.no_grad()
def _load_buffers(engine: ZeroEngine, path: Path) -> None:
    own = persistent_buffers(engine.module)
    with safe_open(path, framework="pt") as file:
        saved = set(file.keys())
        if saved != set(own):
            raise CheckpointError(
                f"{path}: missing buffers {sorted(set(own) - saved)}, unknown {sorted(saved - set(own))}"
            )
        for name, buffer in own.items():
            buffer.copy_(file.get_tensor(name))
