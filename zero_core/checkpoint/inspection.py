"""Looking into checkpoints without an engine: is one whole, how do two differ, what would a new N read.

Reads verified bytes through `reading`, a few megabytes at a time. Knows neither torch nor process groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zero_core.checkpoint import manifest as manifests
from zero_core.checkpoint.container import item_bytes, kind_dtype, kinds_of
from zero_core.checkpoint.manifest import Manifest, Place
from zero_core.checkpoint.reading import Reader, Want, read_manifest, segments, wants_of
from zero_core.checkpoint.store import open_store
from zero_core.errors import CheckpointError, DamagedError
from zero_core.layout import Slot

BUFFER = "buffer"
"""What `diff` calls the kind of a model's buffers."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes [start, stop) of a file of a checkpoint that are not as they were written, and in what way."""

    file: str
    start: int
    stop: int
    what: str


@dataclass(frozen=True, slots=True)
class Difference:
    """How two checkpoints differ in one kind of state of one parameter.

    name, kind  of the parameter, or of a buffer with kind "buffer"
    what        in words
    elements    how many differ; all of those that one checkpoint alone has
    largest     greatest absolute difference of floating values; None where there is none to be taken
    """

    name: str
    kind: str
    what: str
    elements: int
    largest: float | None = None


def verify(folder: Place) -> list[Damage]:
    """Read a whole checkpoint and say what is wrong with it; nothing, if the list is empty."""
    store = open_store(folder)
    try:
        manifest, _ = read_manifest(store, sizes=False)
    except DamagedError as error:
        return [Damage(manifests.MANIFEST, error.start, error.stop, error.what)]
    reader = Reader(store, manifest)
    found = []
    for file, (expected, _) in enumerate(manifest.files):
        name = reader.name(file)
        size = store.size(name)
        if size is None:
            found.append(Damage(name, 0, expected, "the file is missing"))
            continue
        if size > expected:
            found.append(Damage(name, expected, size, f"{size - expected} bytes too many"))
        found += [Damage(name, error.start, error.stop, error.what) for error in reader.damage(file)]
    return found


def dry_run(folder: Place, world_size: int, *, stage: int | None = None) -> list[int]:
    """The bytes that each rank of a group of `world_size` would read from the tensor files to load it.

    stage  of that group; None: as it was saved
    """
    if world_size < 1:
        raise CheckpointError(f"world_size {world_size} must be at least 1")
    reader = Reader(folder)
    manifest, layout = reader.manifest, reader.manifest.layout.at(world_size)
    stage = manifest.stage if stage is None else stage
    _, buffers = reader.plan_buffers()
    found = []
    for rank in range(world_size):
        reads = [*reader.plan(wants_of(manifest, layout, stage=stage, rank=rank)), buffers]
        found.append(sum(read.bytes + reader.contents(read.file).header_bytes for read in reads))
    return found


def diff(a: Place, b: Place) -> list[Difference]:
    """Where two checkpoints differ in what they hold, whatever N, stage and units they were saved with.

    Raises DamagedError where one of them is damaged.
    """
    first, second = Reader(a), Reader(b)
    places = _places(first.manifest), _places(second.manifest)
    found: list[Difference] = []
    for name in [*places[0], *(n for n in places[1] if n not in places[0])]:
        found += _compared(name, (first, second), (places[0].get(name), places[1].get(name)))
    return [*found, *_compared_buffers(first, second)]


_Home = tuple[int, Slot]


def _places(manifest: Manifest) -> dict[str, _Home]:
    """Of every parameter its unit and its slot in it."""
    return {
        slot.name: (index, slot) for index, unit in enumerate(manifest.layout.units) for slot in unit.slots
    }


def _compared(
    name: str, readers: tuple[Reader, Reader], places: tuple[_Home | None, _Home | None]
) -> Iterator[Difference]:
    """The differences in one parameter."""
    kinds = [
        {}
        if place is None
        else {k: kind_dtype(r.manifest, place[0], k) for k in kinds_of(r.manifest, place[0])}
        for r, place in zip(readers, places, strict=True)
    ]
    for kind in [*kinds[0], *(k for k in kinds[1] if k not in kinds[0])]:
        forms = [
            None if kind not in k or p is None else (p[1].shape, k[kind])
            for p, k in zip(places, kinds, strict=True)
        ]
        mine, theirs = forms
        if mine is None or theirs is None:
            yield _one_sided(name, kind, mine, theirs)
        elif mine != theirs:
            yield _other_form(name, kind, mine, theirs)
        else:
            assert places[0] is not None
            assert places[1] is not None
            yield from _values(name, kind, mine[1], readers, (places[0], places[1]))


def _values(
    name: str, kind: str, dtype: str, readers: tuple[Reader, Reader], places: tuple[_Home, _Home]
) -> Iterator[Difference]:
    count, largest = 0, None
    for start, stop in segments(places[0][1].numel, item_bytes(dtype)):
        sides = [
            reader.fetch([Want(kind, unit, slot.offset + start, slot.offset + stop)])[0]
            for reader, (unit, slot) in zip(readers, places, strict=True)
        ]
        differing, distance = _distance(sides[0], sides[1], dtype)
        count += differing
        largest = distance if largest is None else max(largest, distance or 0.0)
    if count:
        yield Difference(name, kind, "values differ", count, largest)


def _compared_buffers(first: Reader, second: Reader) -> Iterator[Difference]:
    forms = [
        {name: (tuple(shape), dtype) for name, dtype, shape in reader.manifest.buffers}
        for reader in (first, second)
    ]
    mine, theirs = first.fetch_buffers(), second.fetch_buffers()
    for name in [*forms[0], *(n for n in forms[1] if n not in forms[0])]:
        left, right = forms[0].get(name), forms[1].get(name)
        if left is None or right is None:
            yield _one_sided(name, BUFFER, left, right)
        elif left != right:
            yield _other_form(name, BUFFER, left, right)
        else:
            count, largest = _distance(mine[name], theirs[name], left[1])
            if count:
                yield Difference(name, BUFFER, "values differ", count, largest)


_Form = tuple[tuple[int, ...], str]


def _one_sided(name: str, kind: str, a: _Form | None, b: _Form | None) -> Difference:
    form = a or b
    assert form is not None
    return Difference(name, kind, f"only in the {'first' if a else 'second'}", int(np.prod(form[0])))


def _other_form(name: str, kind: str, a: _Form, b: _Form) -> Difference:
    said = [f"{list(shape)} of {dtype}" for shape, dtype in (a, b)]
    return Difference(name, kind, f"{said[0]} in the first, {said[1]} in the second", int(np.prod(a[0])))


def _distance(a: bytearray, b: bytearray, dtype: str) -> tuple[int, float | None]:
    """How many elements differ in any bit, and by how much at most if they are floating."""
    if a == b:
        return 0, None
    size = item_bytes(dtype)
    bits = [np.frombuffer(side, dtype=f"u{size}") for side in (a, b)]
    count = int(np.count_nonzero(bits[0] != bits[1]))
    with np.errstate(invalid="ignore", over="ignore"):
        values = [_floats(side, dtype) for side in bits]
        if values[0] is None or values[1] is None:
            return count, None
        gaps = np.abs(values[0] - values[1])
    return count, float(np.max(np.where(bits[0] == bits[1], 0.0, gaps)))


def _floats(bits: npt.NDArray[np.unsignedinteger], dtype: str) -> npt.NDArray[np.floating] | None:
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    kind = {"F16": np.float16, "F32": np.float32, "F64": np.float64}.get(dtype)
    return None if kind is None else bits.view(kind).astype(np.float64)
