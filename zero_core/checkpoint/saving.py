"""Saving a sharded state: each rank writes what it owns, and rank 0 commits.

What is stored is the logical space of the layout, cut at the saving N. Tensors lie in safetensors files, all
else in the JSON manifest; nothing is pickled. Collective: an error on one rank is an error on all.

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
from safetensors.torch import save_file

from zero_core.agreement import together
from zero_core.checkpoint import manifest as manifests
from zero_core.checkpoint.manifest import Manifest
from zero_core.engine import ZeroEngine
from zero_core.errors import CheckpointError, FencedError
from zero_core.snapshot import held_states, persistent_buffers, state_kinds


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
        states=state_kinds(engine.config),
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


def _all_agree(engine: ZeroEngine, value: bool) -> bool:
    (votes,) = engine.collectives.sum_in_rank_order((float(value),))
    return votes == engine.world_size
