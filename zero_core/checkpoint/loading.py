"""Loading a checkpoint at any N and stage: every rank reads the ranges it will hold, and no others.

From the two layouts a rank computes which ranges of which files it needs, and reads them into the engine's
own tensors (`reading`). Collective: ranks agree first on what can be known early (the model, the manifest,
the headers of all files), then after every gigabyte, so an error on one rank is soon one on all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero_core.checkpoint import manifest as manifests
from zero_core.checkpoint.container import kind_dtype
from zero_core.checkpoint.manifest import Manifest, Place
from zero_core.checkpoint.reading import Reader, Target, Want, read_manifest
from zero_core.checkpoint.store import open_store
from zero_core.checkpoint.tensors import TORCH_DTYPES, bytes_of, named
from zero_core.collectives import Collectives
from zero_core.engine import ZeroEngine
from zero_core.errors import CheckpointError, DamagedError
from zero_core.layout import Slot, Unit
from zero_core.snapshot import HeldState, held_states, optimizer_kind, persistent_buffers, state_kinds

_ROUND_BYTES = 1 << 30
"""What the rank that reads most reads between two times that ranks ask each other how they are."""

_OTHER_OPTIMIZER = "use the optimizer it was saved with, or export its parameters and import them"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load_newest` loaded.

    location  of the checkpoint's folder: a path or URI
    extra     what the saver gave with it
    skipped   newer checkpoints that cannot be read: name of the folder, and what is wrong with it
    """

    step: int
    generation: int
    location: str
    extra: dict[str, Any]
    skipped: tuple[tuple[str, str], ...]


def load(engine: ZeroEngine, folder: Place, *, cast: bool = False) -> dict[str, Any]:
    """Fill the engine with the state in `folder`, whatever N and stage wrote it; returns `extra`.

    folder  a path, or a URI of a remote store
    cast    whether the engine may run in another precision than the one that was saved in. Masters and
            moments are fp32 in each and stay exact; frozen parameters and buffers are rounded

    Collective. Raises CheckpointError on every rank if any rank cannot read what it needs, or if the
    checkpoint is of another model or precision, or of an optimizer that keeps other states; DamagedError
    where bytes are not those that were written. After an error in mid-reading the engine holds no state.
    """
    return dict(_load(engine, folder, cast=cast).extra)


def load_newest(
    engine: ZeroEngine, root: Place, *, not_after: int | None = None, cast: bool = False
) -> Loaded:
    """Fill the engine with the newest checkpoint under `root` that can be read, down to the last bit.

    not_after  no checkpoint of a later step

    Collective: all ranks load the same one. One that is damaged for any rank is passed over, and `skipped`
    says so; one of another model or precision is an error, as it is for `load`. Raises CheckpointError on
    every rank where none is left.
    """
    names, locations, failure = list[str](), list[str](), None
    try:
        if engine.rank == 0:  # one rank looks: another might see one more, or one less
            store = open_store(root)
            found = reversed(manifests.committed(store).items())
            names = [name for (step, _), name in found if not_after is None or step <= not_after]
            locations = [store.location(name) for name in names]
    except Exception as error:
        failure = error
    _agree(engine.collectives, f"looking for checkpoints in {root}", failure)
    names, locations = engine.collectives.gather_objects((names, locations))[0]
    skipped: list[tuple[str, str]] = []
    for name, location in zip(names, locations, strict=True):
        try:
            manifest = _load(engine, location, cast=cast, name=name)
        except DamagedError as error:
            skipped.append((name, str(error)))
            continue
        extra = dict(manifest.extra)
        return Loaded(manifest.step, manifest.generation, location, extra, tuple(skipped))
    limit = "" if not_after is None else f" of step {not_after} or before"
    reasons = "".join(f"\n  {name}: {why}" for name, why in skipped)
    raise CheckpointError(
        f"{root} has no checkpoint{limit} that can be read{reasons or ': it has none'}; begin anew, or "
        "restore one"
    )


def _load(engine: ZeroEngine, folder: Place, *, cast: bool, name: str | None = None) -> Manifest:
    engine.collectives.fence()  # a slower rank may still gather what is about to be written
    what, begun, failure = f"loading {folder}", None, None
    try:
        begun = _Loading(engine, folder, cast=cast, name=name)
    except Exception as error:
        failure = error
    account = begun.account() if begun else (0.0, 0.0)
    rows = _agree(engine.collectives, what, failure, (*account, *engine.step_under_way))
    assert begun is not None, "whoever failed has raised"
    if len({row[0] for row in rows}) > 1:
        raise CheckpointError(f"{what}: ranks see different manifests; is one folder behind that name?")
    engine.begin_filling([row[2:] for row in rows])
    begun.read(rounds=max(1, *(-(-int(row[1]) // _ROUND_BYTES) for row in rows)))
    begun.put_buffers()
    manifest = begun.manifest
    gate = manifest.loss_scale
    if gate is None and engine.config.precision != manifest.precision:
        gate = engine.gate.state_dict()
    engine.filled(step=manifest.step, updates=manifest.updates, gate=gate)
    engine.refresh_parameters()
    return manifest


class _Loading:
    """One rank's part of a load. Building it finds out, without writing anything, whether it can work."""

    def __init__(self, engine: ZeroEngine, folder: Place, *, cast: bool, name: str | None) -> None:
        self._collectives, self._what = engine.collectives, f"loading {folder}"
        self.manifest, self._digest = read_manifest(folder, sizes=engine.rank == 0)
        says = manifests.folder_name(self.manifest.step, self.manifest.generation)
        if name not in (None, says):
            file = f"{folder}/{manifests.MANIFEST}"
            raise DamagedError(file, 0, 0, f"says that it is {says}: a copy under another name")
        self._own = persistent_buffers(engine.module)
        _check_same_model(engine, self.manifest, self._own, str(folder), cast=cast)
        self._reader = Reader(folder, self.manifest)
        held = list(held_states(engine.optimizer.states, engine.units, whole_replicas=True))
        wants = [Want(h.kind, h.unit, h.start, h.start + h.tensor.numel()) for h in held]
        self._targets = [_target(self.manifest, one) for one in held]
        self._reads = self._reader.plan(wants)
        names, self._buffers_read = self._reader.plan_buffers()
        self._buffers = {
            name: torch.empty(shape, dtype=TORCH_DTYPES[dtype])
            for name, dtype, shape in self.manifest.buffers
        }
        self._buffer_targets: list[Target] = [bytes_of(self._buffers[name]) for name in names]
        self._reader.check_headers([*self._reads, self._buffers_read])

    def account(self) -> tuple[float, float]:
        """A number that stands for the manifest, and the bytes that will be read."""
        return float(int(self._digest[:12], 16)), float(self._bytes)

    @property
    def _bytes(self) -> int:
        return sum(read.bytes for read in (*self._reads, self._buffers_read))

    def read(self, *, rounds: int) -> None:
        """Read everything; after each of so many equal parts ranks hear of each other's failures."""
        progress, done, total = self._progress(), 0, self._bytes
        for number in range(1, rounds + 1):
            failure = None
            try:
                while done < total * number // rounds:
                    done += next(progress)
            except Exception as error:
                failure = error
            _agree(self._collectives, self._what, failure)
        assert (done, next(progress, None)) == (total, None), "all that was planned has been read"

    def _progress(self) -> Iterator[int]:
        yield from self._reader.read(self._reads, self._targets)
        yield from self._reader.read([self._buffers_read], self._buffer_targets)

    @torch.no_grad()
    def put_buffers(self) -> None:
        for name, buffer in self._own.items():
            buffer.copy_(self._buffers[name])


def _agree(
    collectives: Collectives, what: str, failure: Exception | None, told: Sequence[float] = ()
) -> list[list[float]]:
    """Every rank's `told`; where a rank failed, all raise: DamagedError if damage is all there is."""
    rows = collectives.gather_numbers((float(failure is not None), *told))
    ranks = [rank for rank, row in enumerate(rows) if row[0]]
    if not ranks:
        return [row[1:] for row in rows]
    reasons = collectives.gather_objects(_reason(failure))
    where = f"{what} failed on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
    other = next((reasons[rank] for rank in ranks if isinstance(reasons[rank], str)), None)
    if other is not None:
        raise CheckpointError(f"{where}: {other}") from failure
    file, start, stop, why = reasons[ranks[0]]
    raise DamagedError(file, start, stop, f"{why} ({where})") from failure


def _reason(failure: Exception | None) -> Any:
    """What other ranks are told: the parts of a DamagedError, or a text."""
    if isinstance(failure, DamagedError):
        return failure.file, failure.start, failure.stop, failure.what
    return str(failure) if isinstance(failure, CheckpointError) else repr(failure)


def _target(manifest: Manifest, held: HeldState) -> Target:
    """Where a held range is read to: its own memory, or by a copy to where the system cannot read."""
    tensor = held.tensor.detach()
    saved = TORCH_DTYPES[kind_dtype(manifest, held.unit, held.kind)]
    if tensor.device.type == "cpu" and tensor.dtype == saved:
        return bytes_of(tensor)

    @torch.no_grad()
    def put(offset: int, view: memoryview) -> None:
        # Chunks begin and end between elements: wider ones come first in a file.
        first, count = offset // saved.itemsize, len(view) // saved.itemsize
        tensor[first : first + count].copy_(torch.frombuffer(view, dtype=saved))

    return put


def _check_same_model(
    engine: ZeroEngine, manifest: Manifest, buffers: Mapping[str, torch.Tensor], folder: str, *, cast: bool
) -> None:
    """Raises CheckpointError that names what is missing, unknown or different."""
    if manifest.precision != engine.config.precision and not cast:
        raise CheckpointError(
            f"{folder} was saved in {manifest.precision}, the engine runs in {engine.config.precision}: "
            "use the same precision, or load with cast=True"
        )
    kinds = state_kinds(engine.config)
    if set(manifest.kinds) != set(kinds):
        raise CheckpointError(
            f"{folder} holds {', '.join(manifest.kinds)} of each parameter, and "
            f"{type(engine.config.optimizer).__name__} steps with {', '.join(kinds)}: {_OTHER_OPTIMIZER}"
        )
    kind = optimizer_kind(engine.config)
    if manifest.optimizer is not None and manifest.optimizer.get("kind") != kind:
        raise CheckpointError(
            f"{folder} was saved with {manifest.optimizer.get('kind')}, and the engine steps with {kind}: "
            f"{_OTHER_OPTIMIZER}"
        )
    found = _differences(manifest.layout.units, engine.layout.units)
    if found:
        raise CheckpointError(
            f"{folder} holds another model: {found}; build the engine from the model that was saved"
        )
    own = {name: _form(buffer) for name, buffer in buffers.items()}
    saved = {name: (TORCH_DTYPES[dtype], tuple(shape)) for name, dtype, shape in manifest.buffers}
    found = named(
        {
            "missing buffers": set(own) - set(saved),
            "unknown buffers": set(saved) - set(own),
            "buffers of another shape or dtype": {
                f"{name}: {_shown(saved[name])} saved, {_shown(own[name])} here"
                for name in set(own) & set(saved)
                if not _fits(saved[name], own[name], cast=cast)
            },
        }
    )
    if found:
        raise CheckpointError(
            f"{folder} holds another model: {found}; build the engine from the model that was saved"
        )


_Form = tuple[torch.dtype, tuple[int, ...]]


def _form(tensor: torch.Tensor) -> _Form:
    return tensor.dtype, tuple(tensor.shape)


def _shown(form: _Form) -> str:
    return f"{list(form[1])} of {str(form[0]).removeprefix('torch.')}"


def _fits(saved: _Form, own: _Form, *, cast: bool) -> bool:
    floating = saved[0].is_floating_point and own[0].is_floating_point
    return saved[1] == own[1] and (saved[0] == own[0] or (cast and floating))


def _differences(saved: Sequence[Unit], wanted: Sequence[Unit]) -> str:
    """What of the parameters is missing in `saved`, unknown to `wanted`, or not the same; "" if nothing."""
    if tuple(saved) == tuple(wanted):
        return ""
    old, new = _by_name(saved), _by_name(wanted)
    both = sorted(set(old) & set(new))
    found = named(
        {
            "missing": set(new) - set(old),
            "unknown": set(old) - set(new),
            "of another shape": {
                f"{name}: {list(old[name][0].shape)} saved, {list(new[name][0].shape)} here"
                for name in both
                if old[name][0].shape != new[name][0].shape
            },
            "trained there and frozen here": {
                n for n in both if old[n][1].trainable and not new[n][1].trainable
            },
            "frozen there and trained here": {
                n for n in both if new[n][1].trainable and not old[n][1].trainable
            },
            "of another dtype": {
                f"{name}: {old[name][1].dtype} saved, {new[name][1].dtype} here"
                for name in both
                if old[name][1].dtype != new[name][1].dtype
            },
            "in other units": {
                f"{n}: {old[n][1].name or 'the root'!r} saved, {new[n][1].name or 'the root'!r} here"
                for n in both
                if old[n][1].name != new[n][1].name
            },
        }
    )
    return found or "the same parameters, registered in another order"


def _by_name(units: Sequence[Unit]) -> dict[str, tuple[Slot, Unit]]:
    return {slot.name: (slot, unit) for unit in units for slot in unit.slots}
