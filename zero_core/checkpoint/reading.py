"""Reading ranges of a checkpoint: which bytes of which files, each block once, every block verified.

Owns the plan (`plan`, `stretches`: plain integers) and carrying it out (`Reader`). Ranges of the logical
space are cut by who owned them at the saving N, the pieces are grouped by file, and a file is walked from its
beginning to its end. Blocks that follow each other are one stretch, read in strips: what is asked for goes
straight to its target, the rest to a scratch buffer, and each block is verified while the cache has it.
Nothing is read twice by one call.

Knows nothing of engines, process groups or tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from zero_core.checkpoint import manifest as manifests
from zero_core.checkpoint.container import (
    CHUNK_BYTES,
    DIGEST_DIGITS,
    MODEL,
    Contents,
    Digests,
    buffer_contents,
    digest,
    digests_in,
    digests_of,
    item_bytes,
    kind_dtype,
    kinds_of,
    rank_contents,
)
from zero_core.checkpoint.manifest import Manifest, Place
from zero_core.checkpoint.store import Fill, open_store
from zero_core.errors import CheckpointError, DamagedError
from zero_core.layout import Layout, pulls

Target: TypeAlias = "memoryview | Callable[[int, memoryview], None]"
"""Where a want goes: bytes that are read into directly, or a function that takes (byte offset, verified
bytes) and copies them: the memory is used again."""

_SEGMENT_BYTES = 64 << 20
"""What is in memory at a time where all of a checkpoint is gone through."""

_REQUEST_BYTES = 8 * CHUNK_BYTES
"""What is asked of a remote store at a time: a request waits for its answer."""

_STRIP_BYTES = CHUNK_BYTES // 4
"""What is read at a time elsewhere: its digests are taken while the core's own cache has it."""

_AT_ONCE = 16
"""Strips that are made ready together."""

_OTHER = "not what was written: the checkpoint is damaged, load an older one"

_KEPT_BYTES = 64 << 20
"""What `Reader.fetch` keeps of what it has read."""


@dataclass(frozen=True, slots=True)
class Want:
    """Elements [start, stop) of a unit (an index), of one kind of state."""

    kind: str
    unit: int
    start: int
    stop: int


def wants_of(manifest: Manifest, layout: Layout, *, stage: int, rank: int) -> list[Want]:
    """All that a rank holds of the checkpoint's states in a group of `layout` at a stage."""
    wants = []
    for index, unit in enumerate(layout.units):
        whole = stage == 0 or (stage < 3 and not unit.trainable)
        start, stop = (0, unit.numel) if whole else layout.owned(index, rank)
        wants += [Want(kind, index, start, stop) for kind in kinds_of(manifest, index)]
    return wants


class Piece(NamedTuple):
    """Bytes [start, stop) of a file's data section; they are those from `offset` on of want number `want`."""

    start: int
    stop: int
    want: int
    offset: int


class Stretch(NamedTuple):
    """Whole blocks, bytes [start, stop) of a file's data section, and the pieces in them, in order."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    def strips(self, most_bytes: int) -> Iterator["Stretch"]:
        """The same, `most_bytes` at a time, a multiple of a block; pieces are cut where a strip ends."""
        index = 0
        for start in range(self.start, self.stop, most_bytes):
            stop, inside = min(start + most_bytes, self.stop), list[Piece]()
            while index < len(self.pieces) and self.pieces[index].start < stop:
                first, last, want, offset = self.pieces[index]
                begin = max(first, start)
                inside.append(Piece(begin, min(last, stop), want, offset + begin - first))
                if last > stop:
                    break
                index += 1
            yield Stretch(start, stop, tuple(inside))


@dataclass(frozen=True, slots=True)
class FileRead:
    """What is read of file number `file`: a rank's, or, numbered as the world size, that of the buffers."""

    file: int
    stretches: tuple[Stretch, ...]

    @property
    def bytes(self) -> int:
        return sum(stretch.stop - stretch.start for stretch in self.stretches)


def plan(
    layout: Layout, wants: Sequence[Want], place: Callable[[int, str, int], tuple[int, int]]
) -> dict[int, list[Piece]]:
    """The pieces of each rank's file that make up the wants, in the order of the file.

    layout  of the saving N
    place   where in the data section of a rank's file its part of (kind, unit) begins, and the bytes of one
            element; asked once for each piece

    Wants do not overlap. Takes time in proportion to the number of pieces, whatever N.
    """
    found: dict[int, list[Piece]] = {}
    for number, want in enumerate(wants):
        part = layout.chunk(want.unit)
        for move in pulls(layout, unit=want.unit, start=want.start, stop=want.stop):
            begin, item = place(move.source, want.kind, want.unit)
            first = move.source * part
            found.setdefault(move.source, []).append(
                Piece(
                    begin + (move.start - first) * item,
                    begin + (move.stop - first) * item,
                    number,
                    (move.start - want.start) * item,
                )
            )
    for pieces in found.values():
        pieces.sort(key=lambda piece: piece.start)
        assert all(a.stop <= b.start for a, b in pairwise(pieces)), "wants do not overlap"
    return found


def stretches(pieces: Sequence[Piece], block_bytes: int, data_bytes: int) -> Iterator[Stretch]:
    """The blocks that pieces, ordered and apart from each other, lie in: each once, in order."""
    start, stop, inside = 0, 0, list[Piece]()
    for piece in pieces:
        if piece.start == piece.stop:
            continue
        first = piece.start // block_bytes * block_bytes
        if inside and first > stop:
            yield Stretch(start, stop, tuple(inside))
            inside = []
        start = start if inside else first
        stop = -(-piece.stop // block_bytes) * block_bytes
        inside.append(piece)
    if inside:
        yield Stretch(start, min(stop, data_bytes), tuple(inside))


def segments(numel: int, item: int) -> Iterator[tuple[int, int]]:
    """Elements [0, numel) in stretches of which one can be in memory; `item`: bytes of one element."""
    step = _SEGMENT_BYTES // item
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


class Places:
    """Where parts lie in the data sections of ranks' files: as `rank_contents` says, but for many ranks."""

    def __init__(self, manifest: Manifest) -> None:
        layout = manifest.layout
        parts = [
            (kind, index, item_bytes(kind_dtype(manifest, index, kind)))
            for kind in (*manifest.kinds, MODEL)
            for index in range(len(layout.units))
            if kind in kinds_of(manifest, index)
        ]
        parts.sort(key=lambda part: -part[2])
        self._numbers = {(kind, unit): number for number, (kind, unit, _) in enumerate(parts)}
        self._items = [item for _, _, item in parts]
        self._bytes = np.array([layout.units[unit].numel * item for _, unit, item in parts], dtype=np.int64)
        self._cuts = np.array([layout.chunk(unit) * item for _, unit, item in parts], dtype=np.int64)
        self._starts: dict[int, list[int]] = {}

    def __call__(self, rank: int, kind: str, unit: int) -> tuple[int, int]:
        """The byte at which a rank's part begins, and the bytes of one element."""
        number = self._numbers[kind, unit]
        return self._of(rank)[number], self._items[number]

    def data_bytes(self, rank: int) -> int:
        return self._of(rank)[-1]

    def _of(self, rank: int) -> list[int]:
        """Where each part begins, and where the last one ends."""
        if rank not in self._starts:
            owned = np.clip(self._bytes - rank * self._cuts, 0, self._cuts)
            self._starts[rank] = [0, *np.cumsum(owned).tolist()]
        return self._starts[rank]


def read_manifest(folder: Place, *, sizes: bool = True) -> tuple[Manifest, str]:
    """The manifest of a committed checkpoint, and the digest of its file.

    sizes  whether to see that all files are there in their sizes: once is enough for all ranks

    Raises DamagedError.
    """
    store = open_store(folder)
    text = b""
    try:
        text = store.read(manifests.MANIFEST)
        if sizes:
            return manifests.read(store), digest(text)
        return Manifest.from_json(text.decode(), store.location(manifests.MANIFEST)), digest(text)
    except FileNotFoundError as error:
        nothing = "there is no such file: no checkpoint is there, or it is not whole"
        raise DamagedError(store.location(manifests.MANIFEST), 0, 0, nothing) from error
    except (OSError, CheckpointError, UnicodeDecodeError) as error:
        raise DamagedError(store.location(manifests.MANIFEST), 0, len(text), str(error)) from error


class Reader:
    """Reads ranges of one committed checkpoint, verified.

    folder    of the checkpoint
    manifest  what it says of itself; None: to be read
    """

    def __init__(self, folder: Place, manifest: Manifest | None = None) -> None:
        self._store = open_store(folder)
        self.manifest = read_manifest(self._store)[0] if manifest is None else manifest
        self._block_bytes = self.manifest.block_bytes
        self._places = Places(self.manifest)
        self._contents: dict[int, Contents] = {}
        self._digests: dict[int, Digests] = {}
        self._kept: dict[tuple[int, int], memoryview] = {}
        self._most_bytes = max(self._block_bytes, _STRIP_BYTES) if self._store.moves else _REQUEST_BYTES
        self._scratch = memoryview(bytearray(self._most_bytes))

    def name(self, file: int) -> str:
        """Of a file by its number."""
        return manifests.shard_name(file) if file < self.manifest.world_size else manifests.BUFFERS

    def contents(self, file: int) -> Contents:
        """What lies where in a file."""
        if file not in self._contents:
            told = self.manifest
            self._contents[file] = (
                rank_contents(told, file)
                if file < told.world_size
                else buffer_contents(told.buffers, told.block_bytes)
            )
        return self._contents[file]

    def plan(self, wants: Sequence[Want]) -> list[FileRead]:
        """Which blocks of which files make up the wants; nothing is read."""
        pieces = plan(self.manifest.layout, wants, self._places)
        return [self._file_read(file, pieces[file]) for file in sorted(pieces)]

    def plan_buffers(self) -> tuple[list[str], FileRead]:
        """The names of the model's buffers, in the order of the wants that the plan's pieces speak of."""
        file = self.manifest.world_size
        entries = self.contents(file).entries
        pieces = [Piece(entry.start, entry.stop, number, 0) for number, entry in enumerate(entries)]
        return [entry.name for entry in entries], self._file_read(file, pieces)

    def fetch(self, wants: Sequence[Want]) -> list[bytearray]:
        """The bytes of each want, in new memory; for going through a checkpoint in small steps.

        The last few blocks are kept, so that neighbours in one block are read once.
        """
        sizes = [(w.stop - w.start) * item_bytes(kind_dtype(self.manifest, w.unit, w.kind)) for w in wants]
        return self._fetch(self.plan(wants), sizes)

    def fetch_buffers(self) -> dict[str, bytearray]:
        """The bytes of every buffer of the model, by name."""
        names, read = self.plan_buffers()
        entries = self.contents(read.file).by_name
        sizes = [entries[name].stop - entries[name].start for name in names]
        return dict(zip(names, self._fetch([read], sizes), strict=True))

    def check_headers(self, reads: Sequence[FileRead]) -> None:
        """Read the headers of the files first: what is wrong with most damaged files shows at once."""
        for read in reads:
            self._digests_of(read.file)

    def read(self, reads: Sequence[FileRead], targets: Sequence[Target]) -> Iterator[int]:
        """Carry a plan out; yields bytes read, once they are verified and in their targets.

        targets  of each want, in order: of just its bytes, or a function

        Raises DamagedError, naming file and range, where bytes are not those that were written.
        """
        for read in reads:
            digests = self._digests_of(read.file)
            with self._opened(read.file) as fill:
                strips = (strip for one in read.stretches for strip in one.strips(self._most_bytes))
                while some := list(islice(strips, _AT_ONCE)):
                    # What is read drives all else out of the cache, so what can be is done beforehand.
                    for strip in [self._prepared(read.file, strip, digests, targets) for strip in some]:
                        self._take(read.file, fill, strip)
                        yield strip.bytes

    def damage(self, file: int) -> Iterator[DamagedError]:
        """Read a whole file; yields what is wrong with it, block by block."""
        try:
            digests = self._digests_of(file)
        except DamagedError as error:
            yield error
            return
        contents, most = self.contents(file), max(self._most_bytes, CHUNK_BYTES)
        fill, memory = partial(self._store.read_into, self.name(file)), memoryview(bytearray(most))
        for strip in Stretch(0, contents.data_bytes, ()).strips(most):
            room = memory[: strip.stop - strip.start]
            try:
                self._fill(file, fill, contents.header_bytes + strip.start, [room], len(room))
            except DamagedError as found:
                yield from list(self._closer(file, fill, strip, digests)) or [found]
                continue
            first = strip.start // CHUNK_BYTES
            told = digests.chunks[first * DIGEST_DIGITS :]
            for number in _unlike(digests_of([room], CHUNK_BYTES), told):
                chunk = Stretch(*contents.chunk(first + number), ())
                other = self._other(file, chunk.start, chunk.stop)
                yield from list(self._closer(file, fill, chunk, digests)) or [other]

    def _closer(self, file: int, fill: Fill, stretch: Stretch, digests: Digests) -> Iterator[DamagedError]:
        """What is wrong with each block of a damaged stretch."""
        for block in stretch.strips(self._block_bytes):
            try:
                self._take(file, fill, self._prepared(file, block, digests, ()))
            except DamagedError as error:
                yield error

    def _fetch(self, reads: Sequence[FileRead], sizes: Sequence[int]) -> list[bytearray]:
        found = [bytearray(size) for size in sizes]
        for read in reads:
            for stretch in read.stretches:
                for strip in stretch.strips(max(self._most_bytes, CHUNK_BYTES)):
                    data = self._kept_blocks(read.file, strip)
                    for block in strip.strips(self._block_bytes):
                        for piece in block.pieces:
                            end = piece.offset + piece.stop - piece.start
                            found[piece.want][piece.offset : end] = data[block.start][
                                piece.start - block.start : piece.stop - block.start
                            ]
        return found

    def _kept_blocks(self, file: int, strip: Stretch) -> dict[int, memoryview]:
        """All blocks of a strip by where they begin, verified; from memory where they were among the last."""
        blocks = [(block.start, block.stop) for block in strip.strips(self._block_bytes)]
        missing = [block for block in blocks if (file, block[0]) not in self._kept]
        memory = [memoryview(bytearray(stop - start)) for start, stop in missing]
        pieces = [Piece(*block, number, 0) for number, block in enumerate(missing)]
        for _ in self.read([self._file_read(file, pieces)] if missing else [], memory):
            pass
        self._kept |= {(file, start): data for (start, _), data in zip(missing, memory, strict=True)}
        found = {start: self._kept.pop((file, start)) for start, _ in blocks}
        self._kept |= {(file, start): data for start, data in found.items()}
        while len(self._kept) * self._block_bytes > _KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return found

    def _file_read(self, file: int, pieces: Sequence[Piece]) -> FileRead:
        buffers = file == self.manifest.world_size
        size = self.contents(file).data_bytes if buffers else self._places.data_bytes(file)
        return FileRead(file, tuple(stretches(pieces, self._block_bytes, size)))

    def _digests_of(self, file: int) -> Digests:
        """Of all that lies in a file, once its header has turned out to be as it was written."""
        if file not in self._digests:
            contents = self.contents(file)
            head = bytearray(contents.header_bytes)
            with self._opened(file) as fill:
                self._fill(file, fill, 0, [memoryview(head)], len(head))
            if digest(head) != self.manifest.files[file][1]:
                raise self._damaged(file, 0, len(head), f"the header is {_OTHER}")
            try:
                self._digests[file] = digests_in(bytes(head), contents)
            except CheckpointError as error:
                raise self._damaged(file, 0, len(head), str(error)) from error
        return self._digests[file]

    @contextmanager
    def _opened(self, file: int) -> Iterator[Fill]:
        with ExitStack() as stack:
            try:
                fill = stack.enter_context(self._store.reading(self.name(file)))
            except OSError as error:
                raise self._damaged(file, 0, 0, f"cannot be read: {error}") from error
            yield fill

    def _fill(self, file: int, fill: Fill, offset: int, buffers: Sequence[memoryview], size: int) -> None:
        try:
            fill(offset, buffers)
        except (OSError, CheckpointError) as error:
            raise self._damaged(file, offset, offset + size, f"cannot be read: {error}") from error

    def _damaged(self, file: int, start: int, stop: int, what: str) -> DamagedError:
        return DamagedError(self._store.location(self.name(file)), start, stop, what)

    def _other(self, file: int, start: int, stop: int) -> DamagedError:
        """Of bytes [start, stop) of the data section that are not those that were written."""
        begin = self.contents(file).header_bytes
        return self._damaged(file, begin + start, begin + stop, f"the bytes are {_OTHER}")

    def _prepared(
        self, file: int, strip: Stretch, digests: Digests, targets: Sequence[Target]
    ) -> "_Prepared":
        buffers, copies = _buffers(strip, targets, self._scratch)
        first = strip.start // self._block_bytes
        last = -(-strip.stop // self._block_bytes)
        told = digests.blocks[first * DIGEST_DIGITS : last * DIGEST_DIGITS]
        offset = self.contents(file).header_bytes + strip.start
        return _Prepared(offset, strip.stop - strip.start, first, buffers, copies, told)

    def _take(self, file: int, fill: Fill, strip: "_Prepared") -> None:
        """Read a strip at once, and verify each block of it before any of it is copied on."""
        self._fill(file, fill, strip.offset, strip.buffers, strip.bytes)
        found = digests_of(strip.buffers, self._block_bytes)
        if "".join(found) != strip.told:
            wrong = _unlike(found, strip.told)[0]
            raise self._other(file, *self.contents(file).block(strip.first + wrong))
        for put, offset, view in strip.copies:
            put(offset, view)


class _Prepared(NamedTuple):
    """A strip that only has to be read: from a byte of the file on, into buffers, with their digests.

    first   number of its first block
    copies  functions, and what they get of it: offset and bytes
    told    digests of all its blocks
    """

    offset: int
    bytes: int
    first: int
    buffers: list[memoryview]
    copies: "_Copies"
    told: str


_Copies: TypeAlias = list[tuple[Callable[[int, memoryview], None], int, memoryview]]


def _buffers(
    strip: Stretch, targets: Sequence[Target], scratch: memoryview
) -> tuple[list[memoryview], _Copies]:
    """Memory for all bytes of a strip, in order; and what functions get of it: offset and bytes."""
    buffers, copies, reached = list[memoryview](), _Copies(), strip.start
    for start, stop, want, offset in strip.pieces:
        target = targets[want]
        if not isinstance(target, memoryview):
            copies.append((target, offset, scratch[start - strip.start : stop - strip.start]))
            continue
        if reached < start:
            buffers.append(scratch[reached - strip.start : start - strip.start])
        buffers.append(target[offset : offset + stop - start])
        reached = stop
    if reached < strip.stop:
        buffers.append(scratch[reached - strip.start : strip.stop - strip.start])
    return buffers, copies


def _unlike(found: Sequence[str], told: str) -> list[int]:
    """Which of these digests are others than those written, which follow each other in `told`."""
    return [
        number
        for number, one in enumerate(found)
        if one != told[number * DIGEST_DIGITS : (number + 1) * DIGEST_DIGITS]
    ]
