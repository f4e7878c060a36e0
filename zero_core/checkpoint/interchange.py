"""Models as others store them: safetensors folders in the style of Hugging Face, out of and into checkpoints.

    model.safetensors                       one file, or
    model-00001-of-00003.safetensors ...    several, none larger than asked for, and
    model.safetensors.index.json            which tensor is in which

Export streams from a checkpoint's files, without an engine. Import fills an engine, each rank reading no more
than its own slices. A tied parameter is stored once, under its first name; the others stand in the metadata.
Optimizer states are no part of such a folder. Knows nothing of how checkpoints are written.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, Literal

import torch

from zero_core.agreement import together
from zero_core.checkpoint.container import MODEL, dtype_name, item_bytes, kind_dtype
from zero_core.checkpoint.manifest import Place
from zero_core.checkpoint.reading import Reader, Want, segments
from zero_core.checkpoint.store import LocalStore, Store, open_store
from zero_core.checkpoint.tensors import TORCH_DTYPES, bytes_of, named
from zero_core.engine import ZeroEngine
from zero_core.errors import CheckpointError, UsageError
from zero_core.snapshot import HeldState, held_states, persistent_buffers

ExportDtype = Literal["master", "fp32", "bf16", "fp16"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_FLOATING = frozenset(("F64", "F32", "F16", "BF16"))
_SHARD = re.compile(r"[\w.-]+\.safetensors")
_MOST_HEADER_BYTES = 100 << 20
"""As in safetensors itself."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor to be written.

    saved, dtype  in the checkpoint and in the file
    unit, kind, offset  where it is in the checkpoint; a buffer has unit -1
    """

    name: str
    shape: tuple[int, ...]
    saved: str
    dtype: str
    unit: int
    kind: str
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * item_bytes(self.dtype)


# -- export ---------------------------------------------------------------------------------------


def export_model(
    folder: Place, target: Place, *, dtype: ExportDtype = "master", max_shard_bytes: int = 5_000_000_000
) -> list[str]:
    """Write the parameters and buffers of a checkpoint to the folder `target`; returns where the files are.

    dtype  of floating parameters: "master" as they are saved, fp32 for all that are trained; or one for all.
           Integers and buffers stay as they are
    max_shard_bytes  of tensors in one file; a larger tensor gets a file of its own

    Some megabytes are in memory at a time. Raises CheckpointError where `target` has a model already, and
    DamagedError where the checkpoint is damaged; then nothing is left of the file that was being written.
    """
    if dtype != "master" and dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r} of an export must be 'master', {', '.join(map(repr, _DTYPES))}")
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes {max_shard_bytes} must be at least 1")
    store, reader = open_store(target), Reader(folder)
    there = [name for name in store.names() if name == INDEX or name.endswith(".safetensors")]
    if there:
        raise CheckpointError(f"{target} holds a model already ({there[0]}): export to another folder")
    with suppress(FileExistsError):
        store.make_folder("")
    shards = _shards(_tensors(reader, dtype), max_shard_bytes)
    aliases = dict(reader.manifest.aliases)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE]
    for name, tensors in zip(names, shards, strict=True):
        _write_shard(store, name, tensors, reader, aliases)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.bytes for shard in shards for t in shard), **aliases},
            "weight_map": {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard},
        }
        store.write(INDEX, json.dumps(index, indent=2).encode())
        names.append(INDEX)
    store.sync_folder()
    return [store.location(name) for name in names]


def _tensors(reader: Reader, dtype: ExportDtype) -> list[_Tensor]:
    """Everything to be written, in the order of the checkpoint."""
    manifest, found = reader.manifest, []
    for index, unit in enumerate(manifest.layout.units):
        kind = "master" if unit.trainable else MODEL
        saved = kind_dtype(manifest, index, kind)
        wanted = _DTYPES[dtype] if dtype != "master" and saved in _FLOATING else saved
        found += [_Tensor(s.name, s.shape, saved, wanted, index, kind, s.offset) for s in unit.slots]
    found += [_Tensor(name, tuple(shape), d, d, -1, "", 0) for name, d, shape in manifest.buffers]
    return found


def _shards(tensors: Sequence[_Tensor], most_bytes: int) -> list[list[_Tensor]]:
    """Neighbours together, as many as go into one file; in a file wider elements first, for alignment."""
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.bytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    return [sorted(shard, key=lambda tensor: -item_bytes(tensor.dtype)) for shard in shards]


def _write_shard(
    store: Store, name: str, tensors: Sequence[_Tensor], reader: Reader, aliases: Mapping[str, str]
) -> None:
    """Under another name first, where the store can rename: a file of its own name is whole."""
    kept = {tensor.name for tensor in tensors}
    tied = {other: first for other, first in aliases.items() if first in kept}
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **tied}}
    stop = 0
    for tensor in tensors:
        start, stop = stop, stop + tensor.bytes
        table[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, stop]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    draft = f".{name}.part" if store.moves else name
    store.remove(draft)  # what a killed process left
    with store.writing(draft, len(head) + stop) as out:
        offset = 0
        for data in chain([memoryview(head)], _datas(tensors, reader)):
            out.write(offset, [data])
            offset += len(data)
    if draft != name:
        store.rename(draft, name)


def _datas(tensors: Sequence[_Tensor], reader: Reader) -> Iterator[memoryview]:
    """The bytes of all tensors, in pieces."""
    buffers = reader.fetch_buffers() if any(tensor.unit < 0 for tensor in tensors) else {}
    for tensor in tensors:
        if tensor.unit < 0:
            yield memoryview(buffers[tensor.name])
            continue
        for start, stop in segments(tensor.numel, item_bytes(tensor.saved)):
            want = Want(tensor.kind, tensor.unit, tensor.offset + start, tensor.offset + stop)
            data = reader.fetch([want])[0]
            if tensor.dtype == tensor.saved:
                yield memoryview(data)
            else:
                values = torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.saved])
                yield bytes_of(values.to(TORCH_DTYPES[tensor.dtype]))


# -- import ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a tensor lies: `start` is the byte of its file at which it begins."""

    store: Store
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int


@torch.no_grad()
def import_model(engine: ZeroEngine, folder: Place) -> None:
    """Fill the parameters and buffers of an engine that has not stepped from a folder of safetensors files.

    Floating values of any dtype become fp32 masters; moments are zeros, the step is 0. A tied parameter may
    be stored under any of its names, or under several if they agree.

    Collective; every rank reads its own slices. Raises CheckpointError on every rank, naming what is missing,
    unknown or of another shape; UsageError where the engine has stepped.
    """
    if engine.steps_done:
        raise UsageError(f"the engine has done {engine.steps_done} steps: import into one that has done none")
    engine.collectives.fence()
    what = f"importing {folder}"
    with together(engine.collectives, what, CheckpointError):
        store = open_store(folder)
        sources = _sources(store, str(folder))
        found = _matched(engine, sources, str(folder))
    gate = engine.gate.state_dict()
    engine.begin_filling()
    with together(engine.collectives, what, CheckpointError):
        for held in held_states(engine.optimizer.states, engine.units, whole_replicas=True):
            if held.kind in ("master", MODEL):
                _fill(engine, found, held)
            else:
                held.tensor.zero_()
        for name, buffer in persistent_buffers(engine.module).items():
            flat = torch.empty(buffer.numel(), dtype=buffer.dtype)
            _copy(found[name], flat, 0, buffer.numel(), name)
            buffer.copy_(flat.view(buffer.shape))
    engine.filled(step=0, updates=0, gate=gate)
    engine.refresh_parameters()


def _fill(engine: ZeroEngine, found: Mapping[str, list[_Source]], held: HeldState) -> None:
    """Read the parts of parameters that lie in a held range."""
    stop = held.start + held.tensor.numel()
    for slot in engine.layout.units[held.unit].slots:
        first, last = max(held.start, slot.offset), min(stop, slot.stop)
        if first < last:
            place = held.tensor[first - held.start : last - held.start]
            _copy(found[slot.name], place, first - slot.offset, last - slot.offset, slot.name)


def _copy(sources: Sequence[_Source], place: torch.Tensor, first: int, last: int, name: str) -> None:
    """Elements [first, last) of a tensor, converted; all of its copies in the files must agree."""
    item = item_bytes(sources[0].dtype)
    for start, stop in segments(last - first, item):
        datas = [bytearray((stop - start) * item) for _ in sources]
        for source, data in zip(sources, datas, strict=True):
            source.store.read_into(source.file, source.start + (first + start) * item, [memoryview(data)])
        if any(data != datas[0] for data in datas[1:]):
            raise CheckpointError(f"{name} is tied, but differs under its names: tie it, or store it once")
        place[start:stop].copy_(torch.frombuffer(datas[0], dtype=TORCH_DTYPES[sources[0].dtype]))


def _matched(engine: ZeroEngine, sources: Mapping[str, _Source], folder: str) -> dict[str, list[_Source]]:
    """Of each parameter and buffer, by its first name, where its values are."""
    parameters = dict(engine.module.named_parameters())
    persistent = persistent_buffers(engine.module)
    own: dict[str, torch.Tensor] = {**parameters, **persistent}
    first = {id(tensor): name for name, tensor in own.items()}
    names: dict[str, list[str]] = {name: [] for name in own}
    everything = (
        *engine.module.named_parameters(remove_duplicate=False),
        *engine.module.named_buffers(remove_duplicate=False),
    )
    for name, tensor in everything:
        if id(tensor) in first:
            names[first[id(tensor)]].append(name)
    known = {other for others in names.values() for other in others}
    found = {name: [sources[o] for o in others if o in sources] for name, others in names.items()}
    wrong = {
        f"{name}: {list(source.shape)} of {source.dtype} in the file, {list(own[name].shape)} of "
        f"{dtype_name(str(own[name].dtype))} here"
        for name, given in found.items()
        for source in given
        if source.shape != tuple(own[name].shape)
        or not _converts(source.dtype, dtype_name(str(own[name].dtype)))
        or source.dtype != given[0].dtype
    }
    problems = named(
        {
            "missing": {name for name, given in found.items() if not given},
            "unknown": set(sources) - known,
            "of another shape or dtype": wrong,
        }
    )
    if problems:
        raise CheckpointError(
            f"{folder} holds another model: {problems}; build the engine from the model that is stored there"
        )
    return found


def _converts(stored: str, own: str) -> bool:
    return stored == own or (stored in _FLOATING and own in _FLOATING)


def _sources(store: Store, folder: str) -> dict[str, _Source]:
    """Where every tensor of a folder lies. File names are checked, nothing outside of it is opened."""
    there = set(store.names(""))
    listed: dict[str, str] | None = None
    if SINGLE in there:
        files = [SINGLE]
    elif INDEX in there:
        home, name = _target(store, INDEX)
        listed = _index(home.read(name), folder)
        files = sorted(set(listed.values()))
    else:
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}: it holds no model to import")
    found: dict[str, _Source] = {}
    lies_in: dict[str, str] = {}
    for file in files:
        if not _SHARD.fullmatch(file) or file not in there:
            raise CheckpointError(f"{folder}: {INDEX} names {file!r}, which is no file of that folder")
        for name, source in _header(*_target(store, file), folder).items():
            if name in found:
                raise CheckpointError(f"{folder}: {name} is in {lies_in[name]} and in {file}")
            found[name], lies_in[name] = source, file
    if listed is not None:
        lost = sorted(name for name, file in listed.items() if lies_in.get(name) != file)
        if lost:
            raise CheckpointError(f"{folder}: {lost[:5]} are not where {INDEX} says: is a file missing?")
    return found


def _target(store: Store, file: str) -> tuple[Store, str]:
    """What a link points to: model hubs keep files apart and link to them from the folders they show."""
    if not isinstance(store, LocalStore):
        return store, file
    path = store.path(file).resolve()
    return LocalStore(path.parent), path.name


def _index(text: bytes, folder: str) -> dict[str, str]:
    try:
        listed = json.loads(text)["weight_map"]
        if not all(isinstance(name, str) and isinstance(file, str) for name, file in listed.items()):
            raise TypeError("weight_map holds names of files, by names of tensors")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {INDEX} is no index of a model: {error!r}") from error
    return dict(listed)


def _header(store: Store, file: str, folder: str) -> dict[str, _Source]:
    """The tensors of one safetensors file; every offset is checked against its size."""
    size = store.size(file) or 0
    try:
        length = bytearray(8)
        store.read_into(file, 0, [memoryview(length)])
        count = int.from_bytes(length, "little")
        if not 2 <= count <= min(_MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {count} bytes in a file of {size}")
        text = bytearray(count)
        store.read_into(file, 8, [memoryview(text)])
        found = {}
        for name, entry in json.loads(text).items():
            if name == "__metadata__":
                continue
            shape = tuple(int(n) for n in entry["shape"])
            start, stop = entry["data_offsets"]
            if min(start, *shape, 0) < 0 or stop - start != prod(shape) * item_bytes(entry["dtype"]):
                raise ValueError(f"{name} of shape {list(shape)} in bytes {start} to {stop}")
            if 8 + count + stop > size:
                raise ValueError(f"{name} ends at byte {stop} of {size - 8 - count}")
            found[name] = _Source(store, file, entry["dtype"], shape, 8 + count + start)
    except (ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
        raise CheckpointError(f"{folder}: {file} is no whole safetensors file: {error}") from error
    return found
