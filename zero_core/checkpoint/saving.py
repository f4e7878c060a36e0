"""Saving a sharded state: each rank writes what it owns, and rank 0 commits; at once, or behind the training.

What is stored is the logical space of the layout, cut at the saving N. Tensors lie in safetensors files, all
else in the JSON manifest; nothing is pickled. Collective: an error on one rank is an error on all. How files
are written and committed is the business of `writing`.

Kinds of state: `master` (fp32; the parameters themselves in fp32 training) and the optimizer's moments
(`momentum`, `variance`) for trainable units, `model` for frozen ones, and the model's buffers. The manifest
carries the counts of steps and of updates, and the loss scale.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from zero_core.budget import save_copy_bytes
from zero_core.checkpoint import manifest as manifests
from zero_core.checkpoint.container import (
    Contents,
    buffer_contents,
    dtype_name,
    fitting_block_bytes,
    held_dtype,
    item_bytes,
    rank_contents,
    tensor_name,
)
from zero_core.checkpoint.manifest import BUFFERS, SAVING, Manifest, Place
from zero_core.checkpoint.store import Store, open_store
from zero_core.checkpoint.tensors import bytes_of
from zero_core.checkpoint.writing import Part, Payload, Work, temporary_name, understood, write_behind
from zero_core.config import ZeroConfig
from zero_core.engine import ZeroEngine
from zero_core.errors import CheckpointError, FencedError, UsageError, ZeroError
from zero_core.memory import SaveCopy
from zero_core.snapshot import held_states, optimizer_kind, persistent_buffers, state_kinds

_SPARE_BYTES = 1 << 20
"""Left free beside the tensors, for headers, receipts and the manifest."""

_Hold = Callable[[str, Contents, Sequence[torch.Tensor]], Sequence[memoryview]]
"""Makes of a file's tensors, in the order of its contents, the bytes to be written."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A committed checkpoint: `bytes` of all ranks' files, `seconds` this rank spent in the save."""

    location: str
    step: int
    bytes: int
    seconds: float

    @property
    def path(self) -> Path:
        """Of a local one. Raises CheckpointError for a remote one: use `location`."""
        return manifests.local_path(self.location)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save behind the training ended: with a checkpoint, or with an error."""

    step: int
    generation: int
    saved: SavedCheckpoint | None
    error: CheckpointError | None


@dataclass(frozen=True, slots=True)
class _Told:
    """What the caller says of a save."""

    extra: Mapping[str, Any]
    generation: int
    fenced: bool
    seed: int | None
    versions: Mapping[str, str] | None


def save(
    engine: ZeroEngine,
    root: Place,
    *,
    extra: Mapping[str, Any],
    generation: int,
    fenced: bool = False,
    seed: int | None = None,
    versions: Mapping[str, str] | None = None,
) -> SavedCheckpoint:
    """Write the state after the last step to a folder of its own under `root`, and commit it.

    root   a local folder, or a URI of any store that fsspec knows
    extra  JSON values to be returned by `load`; rank 0's count
    fenced whether only the generation that `manifest.open_generation` has last opened may commit
    seed, versions  put into the manifest for whoever reads it

    A step that this generation has already committed is not written again. Raises CheckpointError on every
    rank if any rank failed; then nothing is committed: FencedError where a newer generation has begun.
    """
    began = time.perf_counter()
    store, told = open_store(root), _Told(extra, generation, fenced, seed, versions)
    work, size = _prepare(engine, store, told, lambda _, __, tensors: [_bytes_of(one) for one in tensors])
    if work is not None:
        try:
            _together(engine, work, work.write)
            size = _together(engine, work, lambda: work.commit(work.receipts()) if engine.rank == 0 else 0)
        except BaseException:
            if engine.rank == 0:
                work.abandon()
            raise
    location = store.location(manifests.folder_name(engine.steps_done, generation))
    return SavedCheckpoint(location, engine.steps_done, size, time.perf_counter() - began)


class Saver:
    """Saves behind the training, one at a time; one for each process, through all engines it serves.

    The step stops only while the state is copied to host memory, which is kept for the next time. `on_done`
    is called with how each save ended, from the thread that wrote it: on every rank, with an error wherever
    any rank failed. A save is over when `on_done` has returned.
    """

    def __init__(self, on_done: Callable[[Outcome], None]) -> None:
        self._on_done = on_done
        self._thread: Thread | None = None
        self._staging: dict[str, torch.Tensor] = {}
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def held_bytes(self) -> int:
        """Host memory of the copy; nothing before the first save."""
        return sum(staging.numel() for staging in self._staging.values())

    def serve(self, engine: ZeroEngine) -> None:
        """Have the engine's memory report and budget count the copy; `begin` does so by itself.

        A copy of another size, taken of an engine before, goes, unless a save is still written from it.
        """
        config, rank = engine.config, engine.rank
        buffers = sum(one.nbytes for one in persistent_buffers(engine.module).values())
        predicted = save_copy_bytes(engine.layout, config, rank, buffer_bytes=buffers)
        if not self.busy and self.held_bytes != predicted:
            self._staging.clear()
        engine.peak.save_copy = SaveCopy(predicted, lambda: self.held_bytes)

    def begin(
        self,
        engine: ZeroEngine,
        root: Place,
        *,
        extra: Mapping[str, Any],
        generation: int,
        fenced: bool = False,
        seed: int | None = None,
        versions: Mapping[str, str] | None = None,
        first: Callable[[], None] | None = None,
    ) -> int:
        """Copy the state after the last step, and write it behind; returns the step. Arguments: see `save`.

        first  called on each rank before it writes, from the thread that does; if it raises, the save fails

        Collective. A save that is under way is waited for first. Nothing that is done to the engine or to
        `extra` after this returns reaches the files. Raises CheckpointError on every rank, and `on_done` is
        not called, where already the beginning fails: no space, a newer generation, a dtype of no name.
        """
        if self._closed:
            raise UsageError("this Saver is closed: begin no more saves with it")
        self.wait()
        began, step = time.perf_counter(), engine.steps_done
        self.serve(engine)
        store, asked = open_store(root), _Told(extra, generation, fenced, seed, versions)
        work, size = _prepare(engine, store, asked, self._stage)
        location = store.location(manifests.folder_name(step, generation))

        def run() -> None:
            try:
                written = size if work is None else write_behind(work, first)
                saved = SavedCheckpoint(location, step, written, time.perf_counter() - began)
                outcome = Outcome(step, generation, saved, None)
            except Exception as error:  # whatever it is, it must reach somebody
                told = error if isinstance(error, CheckpointError) else CheckpointError(repr(error))
                outcome = Outcome(step, generation, None, told)
            self._on_done(outcome)

        self._thread = Thread(target=run, name=f"save-{step}", daemon=True)
        self._thread.start()
        return step

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when no save is under way. Raises CheckpointError if one still is after `timeout_s`."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(f"{self._thread.name} is still under way after {timeout_s:g} s")
        self._thread = None

    def close(self) -> None:
        """Wait for a save that is under way, and give the memory back."""
        self._closed = True
        self.wait()
        self._staging.clear()

    @torch.no_grad()
    def _stage(self, name: str, contents: Contents, tensors: Sequence[torch.Tensor]) -> Sequence[memoryview]:
        """One copy of all tensors, laid out as in the file."""
        need, key = contents.data_bytes, "buffers" if name == BUFFERS else "states"
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        staging = self._staging.get(key)
        if staging is None or staging.numel() != need or staging.is_pinned() != on_gpu:
            self._staging.pop(key, None)
            del staging
            staging = torch.empty(need, dtype=torch.uint8, pin_memory=on_gpu)
            self._staging[key] = staging
        for entry, tensor in zip(contents.entries, tensors, strict=True):
            place = staging[entry.start : entry.stop].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=tensor.is_cuda)
        if on_gpu:
            torch.cuda.synchronize()
        return [_bytes_of(staging)]


@dataclass(frozen=True, slots=True)
class _State:
    """What one rank is to save: tensors in the order of their file's contents, and the manifest to be."""

    draft: Manifest
    contents: Contents
    tensors: Sequence[torch.Tensor]
    parts: tuple[Part, ...]
    buffer_contents: Contents
    buffers: Sequence[torch.Tensor]


def _prepare(engine: ZeroEngine, store: Store, told: _Told, hold: _Hold) -> tuple[Work | None, int]:
    """All ranks agree on a save, and rank 0 makes its folder.

    Returns the work, or None and the bytes of a checkpoint that is there already.
    """
    engine.require_state()
    final = manifests.folder_name(engine.steps_done, told.generation)
    place = manifests.staging_name(told.generation) if told.fenced and store.moves else ""
    what, failure, there, number = f"saving step {engine.steps_done} to {store.location(final)}", None, -1, 0
    payloads: dict[str, Payload] = {}
    try:
        state = _state_of(engine, told)
        name = manifests.shard_name(engine.rank)
        payloads[name] = Payload(state.contents, hold(name, state.contents, state.tensors))
        if engine.rank == 0:
            held = hold(BUFFERS, state.buffer_contents, state.buffers)
            payloads[BUFFERS] = Payload(state.buffer_contents, held)
            there = _bytes_there(store, final)
            if there < 0:
                # Rank 0's random number names the folder, so that two savers can never share one.
                number = secrets.randbits(48)
                _make_room(store, place, final, _need(state))
                store.make_folder(temporary_name(store, place, final, _token(number)), parents=not place)
    except Exception as error:
        failure = error if isinstance(error, ZeroError) else None
        failure = understood(store, place, what, engine.rank, error) if failure is None else failure
    try:
        rows = _agree(engine, what, failure, there, number)
    except BaseException:
        if number and engine.rank == 0:
            store.remove_tree(temporary_name(store, place, final, _token(number)))
        raise
    there, number = int(rows[0][1]), int(rows[0][2])
    if there >= 0:
        return None, there
    patience_s = engine.config.collective_timeout_s
    return Work(
        store, state.draft, engine.rank, _token(number), told.fenced, patience_s, payloads, state.parts
    ), 0


def _token(number: int) -> str:
    return f"{number:012x}"


def _state_of(engine: ZeroEngine, told: _Told) -> _State:
    buffers = persistent_buffers(engine.module)
    draft = Manifest(
        step=engine.steps_done,
        generation=told.generation,
        stage=engine.config.stage,
        precision=engine.config.precision,
        layout=engine.layout,
        kinds=state_kinds(engine.config),
        files=(),
        extra=_copied(told.extra) if engine.rank == 0 else {},
        created=0.0,
        updates=engine.optimizer.steps_done,
        buffers=tuple((name, dtype_name(str(one.dtype)), tuple(one.shape)) for name, one in buffers.items()),
        aliases=_aliases(engine.module),
        loss_scale=engine.gate.state_dict(),
        seed=told.seed,
        versions=dict(told.versions or {}),
        optimizer=_optimizer(engine.config),
    )
    largest = rank_contents(draft, 0).data_bytes  # of rank 0, who owns no less than others
    draft = replace(draft, block_bytes=fitting_block_bytes(largest))
    contents = rank_contents(draft, engine.rank)
    of_buffers = buffer_contents(draft.buffers, draft.block_bytes)
    held = {
        tensor_name(one.kind, one.unit): one
        for one in held_states(engine.optimizer.states, engine.units, whole_replicas=False)
        if one.tensor.numel()
    }
    found = {name: (dtype_name(str(one.tensor.dtype)), one.tensor.numel()) for name, one in held.items()}
    wanted = {entry.name: (entry.dtype, entry.shape[0]) for entry in contents.entries}
    if found != wanted:
        wrong = sorted(found.items() ^ wanted.items())[:4]
        raise CheckpointError(f"the engine holds other states than its layout says, of (kind/unit): {wrong}")
    return _State(
        draft,
        contents,
        [held[entry.name].tensor for entry in contents.entries],
        tuple((one.kind, one.unit, one.start, one.start + one.tensor.numel()) for one in held.values()),
        of_buffers,
        [buffers[entry.name] for entry in of_buffers.entries],
    )


def _optimizer(config: ZeroConfig) -> dict[str, Any]:
    """What decides how parameters are stepped: for whoever reads it, but for `kind`."""
    return {
        "kind": optimizer_kind(config),
        **asdict(config.optimizer),
        "groups": [asdict(group) for group in config.groups],
        "schedule": asdict(config.schedule),
        "clip_norm": config.clip_norm,
    }


def _copied(extra: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(json.loads(json.dumps(extra, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"extra must be JSON values, without nan and inf: {error}") from error


def _aliases(module: torch.nn.Module) -> dict[str, str]:
    """The first name of each parameter by its other names."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            found[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return found


def _bytes_there(store: Store, final: str) -> int:
    """Bytes of the checkpoint of that name, -1 if there is none. Raises CheckpointError if it is damaged."""
    if not manifests.is_committed(store, final):
        return -1
    try:
        return manifests.read(store.location(final)).bytes
    except CheckpointError as error:
        raise CheckpointError(
            f"{final} cannot be saved, it is there and damaged: move it away ({error})"
        ) from error


def _need(state: _State) -> int:
    """Bytes of all ranks' tensors."""
    draft = state.draft
    trained = draft.layout.numel(trainable=True) * item_bytes("F32") * len(draft.kinds)
    frozen = sum(
        unit.numel * item_bytes(held_dtype(unit.dtype, draft.precision))
        for unit in draft.layout.units
        if not unit.trainable
    )
    return trained + frozen + state.buffer_contents.data_bytes


def _make_room(store: Store, place: str, final: str, need: int) -> None:
    """Take away what killed saves left, and look whether there is space."""
    if place:  # only this generation fills it, and only one save at a time
        for name in store.names(place):
            if name.startswith(SAVING):
                store.remove_tree(f"{place}/{name}")
    if final in store.names():
        store.remove_tree(final)  # without a manifest: of a deletion, or a remote save, that was cut short
    free = store.free_bytes()
    if free is not None and free < need + _SPARE_BYTES:
        raise CheckpointError(
            f"{store} has {free} bytes free and the checkpoint takes {need}: make room, or keep fewer"
        )


def _together(engine: ZeroEngine, work: Work, act: Callable[[], int | None]) -> int:
    """What one rank fails in, all fail in. Returns what rank 0's `act` did."""
    failure, result = None, 0
    try:
        result = act() or 0
    except Exception as error:
        failure = work.understood(error)
    return int(_agree(engine, work.what, failure, result)[0][1])


def _agree(engine: ZeroEngine, what: str, failure: ZeroError | None, *numbers: float) -> list[list[float]]:
    """Every rank's row, its first number aside. Raises this rank's failure, or that of another one."""
    flag = 0 if failure is None else 2 if isinstance(failure, FencedError) else 1
    rows = engine.collectives.gather_numbers((flag, *numbers))
    if failure is not None:
        raise failure
    failed = [rank for rank, row in enumerate(rows) if row[0]]
    if failed:
        kind = FencedError if any(row[0] == 2 for row in rows) else CheckpointError
        raise kind(f"{what} failed on rank(s) {failed[:8]}: see their errors")
    return rows


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """[bytes] of a tensor, in place where it is contiguous and on the CPU."""
    return bytes_of(tensor.detach().resolve_conj().cpu().contiguous())
