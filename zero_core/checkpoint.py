"""Saving a sharded state and loading it at any other world size and stage.

What is stored is the logical space of the layout, cut at the saving N: each rank writes the ranges it
owns, and at load every rank computes from the two layouts which ranges of which files it needs and reads
just those. Tensors lie in safetensors files, all else in the JSON manifest; nothing is pickled. Both
functions are collective: an error on one rank is an error on all.

Kinds of state: `master` (fp32; the parameters themselves in fp32 training) and the optimizer's moments
(`momentum`, `variance`) for trainable units, `model` for frozen ones, and the model's buffers. The manifest
carries the counts of steps and of updates, and the loss scale.
"""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from zero_core import manifest as manifests
from zero_core.agreement import together
from zero_core.engine import ZeroEngine
from zero_core.errors import CheckpointError, FencedError
from zero_core.layout import pulls
from zero_core.manifest import Manifest
from zero_core.snapshot import HeldState, held_states, persistent_buffers


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A committed checkpoint: `bytes` of all ranks' files, `seconds` this rank spent in the save."""

    path: Path
    step: int
    bytes: int
    seconds: float


def save(
    engine: ZeroEngine, root: Path, *, extra: Mapping[str, Any], generation: int, fenced: bool = False
) -> SavedCheckpoint:
    """Write the state after the last step to a folder of its own under `root`, and commit it.

    extra  JSON values to be returned by `load`
    fenced whether only the generation that `manifest.open_generation` has last opened may commit

    A step that this generation has already committed is not written again. Raises CheckpointError on every
    rank if any rank failed; then nothing is committed: FencedError where a newer generation has begun.
    """
    engine.require_state()
    began, step = time.perf_counter(), engine.steps_done
    final = root / manifests.folder_name(step, generation)
    if _all_agree(engine, (final / manifests.MANIFEST).is_file()):
        size = sum(manifests.read(final).files.values())
        return SavedCheckpoint(final, step, size, time.perf_counter() - began)
    # Rank 0's random number names the folder, so that two savers can never share one.
    (token,) = engine.collectives.sum_in_rank_order((float(secrets.randbits(48) if engine.rank == 0 else 0),))
    place = manifests.staging(root, generation) if fenced else root
    temporary = place / f".saving-{final.name}-{int(token):012x}"
    with (
        together(engine.collectives, f"saving step {step} to {final}", CheckpointError),
        _within(place, fenced),
    ):
        temporary.mkdir(parents=not fenced, exist_ok=True)
        _write_shard(engine, temporary)
    with together(engine.collectives, f"committing {final}", CheckpointError), _within(place, fenced):
        if engine.rank == 0:
            _commit(engine, temporary, final, extra, generation)
    size = sum(manifests.read(final).files.values())
    return SavedCheckpoint(final, step, size, time.perf_counter() - began)


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
    updates = manifest.step if manifest.updates is None else manifest.updates
    engine.filled(step=manifest.step, updates=updates, gate=manifest.loss_scale)
    engine.refresh_parameters()
    return dict(manifest.extra)


def _write_shard(engine: ZeroEngine, folder: Path) -> None:
    tensors = {
        f"{held.kind}/{held.unit}": held.tensor.detach().cpu().contiguous()
        for held in held_states(engine.optimizer.states, engine.units, whole_replicas=False)
        if held.tensor.numel()
    }
    _save_durably(tensors, folder / manifests.shard_name(engine.rank))
    if engine.rank == 0:
        kept = persistent_buffers(engine.module)
        buffers = {
            n: b.detach().cpu().contiguous() for n, b in engine.module.state_dict().items() if n in kept
        }
        _save_durably(buffers, folder / manifests.BUFFERS)


def _save_durably(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _commit(
    engine: ZeroEngine, temporary: Path, final: Path, extra: Mapping[str, Any], generation: int
) -> None:
    names = manifests.expected_files(engine.world_size)
    manifest = Manifest(
        step=engine.steps_done,
        generation=generation,
        stage=engine.config.stage,
        precision=engine.config.precision,
        layout=engine.layout,
        files={name: (temporary / name).stat().st_size for name in names},
        extra=extra,
        created=time.time(),
        updates=engine.optimizer.steps_done,
        states=_state_kinds(engine),
        loss_scale=engine.gate.state_dict(),
    )
    draft = temporary / f"{manifests.MANIFEST}.part"
    with draft.open("w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    draft.rename(temporary / manifests.MANIFEST)
    _sync_folder(temporary)
    temporary.rename(final)
    _sync_folder(final.parent)


@contextmanager
def _within(place: Path, fenced: bool) -> Iterator[None]:
    """What fails because the generation's own folder was taken away fails as FencedError."""
    try:
        yield
    except Exception as error:  # safetensors has errors of its own for a folder that is gone
        if fenced and not place.is_dir():
            raise FencedError(
                f"{place} is gone: a newer generation has begun, this one commits nothing"
            ) from error
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_same_model(engine: ZeroEngine, manifest: Manifest, folder: Path) -> None:
    if manifest.precision != engine.config.precision:
        raise CheckpointError(
            f"{folder} was saved in {manifest.precision}, the engine runs in {engine.config.precision}: "
            "use the same precision"
        )
    if set(manifest.states) != set(_state_kinds(engine)):
        raise CheckpointError(
            f"{folder} holds {', '.join(manifest.states)} of each parameter, and "
            f"{type(engine.config.optimizer).__name__} steps with {', '.join(_state_kinds(engine))}: "
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


def _state_kinds(engine: ZeroEngine) -> tuple[str, ...]:
    return "master", *engine.config.optimizer.moments


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


def _all_agree(engine: ZeroEngine, value: bool) -> bool:
    (votes,) = engine.collectives.sum_in_rank_order((float(value),))
    return votes == engine.world_size
