"""Reading ranges of a checkpoint: which bytes of which files, each chunk once, every chunk verified.

Owns the plan (`plan`, `chunk_reads`: plain integers) and carrying it out (`Reader`). Ranges of the logical
space are cut by who owned them at the saving N, the pieces are grouped by file, and a file is walked chunk by
chunk. A chunk is the unit of verification: what is asked for of it goes straight to its target, the rest to
a scratch buffer, and the digest is taken while the chunk is in the cache. No chunk is read twice by one call.

Knows nothing of engines, process groups or tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from zero_core.checkpoint import manifest as manifests
from zero_core.checkpoint.container import (
    CHUNK_BYTES,
    MODEL,
    Contents,
    buffer_contents,
    digest,
    digests_in,
    item_bytes,
    kind_dtype,
    kinds_of,
    rank_contents,
)
from zero_core.checkpoint.manifest import Manifest, Place
from zero_core.checkpoint.store import open_store
from zero_core.errors import CheckpointError, DamagedError
from zero_core.layout import Layout, pulls

Target: TypeAlias = "memoryview | Callable[[int, memoryview], None]"
"""Where a want goes: bytes that are read into directly, or a function that takes (byte offset, verified
bytes) and copies them: the memory is used again."""

_SEGMENT_BYTES = 16 * CHUNK_BYTES
"""What is in memory at a time where all of a checkpoint is gone through."""

_CHUNKS_OF_A_REQUEST = 8
"""Neighbouring chunks that are asked of a remote store together."""

_OTHER = "not what was written: the checkpoint is damaged, load an older one"

_KEPT_CHUNKS = 16
"""Chunks that `Reader.fetch` keeps."""

_MOST_BUFFERS = 64
"""A chunk that falls into more buffers is read whole and copied: cheaper, and below every system's limit."""


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


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of a file's data section; they are those from `offset` on of want number `want`."""

    start: int
    stop: int
    want: int
    offset: int


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """Chunk number `index`, bytes [start, stop) of the data section, and the pieces in it, in order."""

    index: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class FileRead:
    """What is read of file number `file`: a rank's, or, numbered as the world size, that of the buffers."""

    file: int
    chunks: tuple[ChunkRead, ...]

    @property
    def bytes(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


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
        chunk = layout.chunk(want.unit)
        for move in pulls(layout, unit=want.unit, start=want.start, stop=want.stop):
            begin, item = place(move.source, want.kind, want.unit)
            first = move.source * chunk
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


def chunk_reads(pieces: Sequence[Piece], chunk_bytes: int, data_bytes: int) -> Iterator[ChunkRead]:
    """The chunks that pieces, ordered and apart from each other, lie in: each once, in order."""
    index, inside = -1, list[Piece]()
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            if start // chunk_bytes != index:
                if inside:
                    yield _chunk(index, inside, chunk_bytes, data_bytes)
                index, inside = start // chunk_bytes, []
            stop = min(piece.stop, (index + 1) * chunk_bytes)
            inside.append(Piece(start, stop, piece.want, piece.offset + start - piece.start))
            start = stop
    if inside:
        yield _chunk(index, inside, chunk_bytes, data_bytes)


def segments(numel: int, item: int) -> Iterator[tuple[int, int]]:
    """Elements [0, numel) in stretches of which one can be in memory; `item`: bytes of one element."""
    step = _SEGMENT_BYTES // item
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


def _chunk(index: int, pieces: list[Piece], chunk_bytes: int, data_bytes: int) -> ChunkRead:
    start = index * chunk_bytes
    return ChunkRead(index, start, min(start + chunk_bytes, data_bytes), tuple(pieces))


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
        self._places = Places(self.manifest)
        self._contents: dict[int, Contents] = {}
        self._digests: dict[int, tuple[str, ...]] = {}
        self._kept: dict[tuple[int, int], memoryview] = {}
        # Each request to a remote store waits for its answer; on this machine chunks stay in the cache.
        self._at_once = 1 if self._store.moves else _CHUNKS_OF_A_REQUEST
        self._scratch = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(self._at_once)]

    def name(self, file: int) -> str:
        """Of a file by its number."""
        return manifests.shard_name(file) if file < self.manifest.world_size else manifests.BUFFERS

    def contents(self, file: int) -> Contents:
        """What lies where in a file."""
        if file not in self._contents:
            buffers = file == self.manifest.world_size
            self._contents[file] = (
                buffer_contents(self.manifest.buffers) if buffers else rank_contents(self.manifest, file)
            )
        return self._contents[file]

    def plan(self, wants: Sequence[Want]) -> list[FileRead]:
        """Which chunks of which files make up the wants; nothing is read."""
        pieces = plan(self.manifest.layout, wants, self._places)
        return [self._file_read(file, pieces[file]) for file in sorted(pieces)]

    def plan_whole(self, file: int) -> FileRead:
        """Every chunk of a file, for no want: to verify it."""
        contents = self.contents(file)
        chunks = (contents.chunk(index) for index in range(contents.chunks))
        return FileRead(file, tuple(ChunkRead(i, *span, ()) for i, span in enumerate(chunks)))

    def plan_buffers(self) -> tuple[list[str], FileRead]:
        """The names of the model's buffers, in the order of the wants that the plan's pieces speak of."""
        file = self.manifest.world_size
        entries = self.contents(file).entries
        pieces = [Piece(entry.start, entry.stop, number, 0) for number, entry in enumerate(entries)]
        return [entry.name for entry in entries], self._file_read(file, pieces)

    def fetch(self, wants: Sequence[Want]) -> list[bytearray]:
        """The bytes of each want, in new memory; for going through a checkpoint in small steps.

        The last few chunks are kept, so that neighbours in one chunk are read once.
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
            for chunks in _neighbours(read.chunks, self._at_once):
                self._read_chunks(read.file, chunks, digests, targets)
                yield sum(chunk.stop - chunk.start for chunk in chunks)

    def damage(self, file: int) -> Iterator[DamagedError]:
        """Read a whole file; yields what is wrong with it, chunk by chunk."""
        try:
            digests = self._digests_of(file)
        except DamagedError as error:
            yield error
            return
        for chunk in self.plan_whole(file).chunks:
            try:
                self._read_chunks(file, [chunk], digests, ())
            except DamagedError as error:
                yield error

    def _fetch(self, reads: Sequence[FileRead], sizes: Sequence[int]) -> list[bytearray]:
        found = [bytearray(size) for size in sizes]
        for read in reads:
            for chunk in read.chunks:
                data = self._kept_chunk(read.file, chunk)
                for piece in chunk.pieces:
                    end = piece.offset + piece.stop - piece.start
                    found[piece.want][piece.offset : end] = data[
                        piece.start - chunk.start : piece.stop - chunk.start
                    ]
        return found

    def _kept_chunk(self, file: int, chunk: ChunkRead) -> memoryview:
        """A whole chunk, verified; from memory if it was among the last."""
        key = file, chunk.index
        data = self._kept.pop(key, None)
        if data is None:
            data = memoryview(bytearray(chunk.stop - chunk.start))
            whole = replace(chunk, pieces=(Piece(chunk.start, chunk.stop, 0, 0),))
            self._read_chunks(file, [whole], self._digests_of(file), [data])
        self._kept[key] = data
        if len(self._kept) > _KEPT_CHUNKS:
            del self._kept[next(iter(self._kept))]
        return data

    def _file_read(self, file: int, pieces: Sequence[Piece]) -> FileRead:
        buffers = file == self.manifest.world_size
        size = self.contents(file).data_bytes if buffers else self._places.data_bytes(file)
        return FileRead(file, tuple(chunk_reads(pieces, CHUNK_BYTES, size)))

    def _digests_of(self, file: int) -> tuple[str, ...]:
        """Of all chunks of a file, once its header has turned out to be as it was written."""
        if file not in self._digests:
            contents = self.contents(file)
            head = bytearray(contents.header_bytes)
            self._fill(file, 0, [memoryview(head)], len(head))
            if digest(head) != self.manifest.files[file][1]:
                raise self._damaged(file, 0, len(head), f"the header is {_OTHER}")
            try:
                self._digests[file] = digests_in(bytes(head), contents)
            except CheckpointError as error:
                raise self._damaged(file, 0, len(head), str(error)) from error
        return self._digests[file]

    def _fill(self, file: int, offset: int, buffers: Sequence[memoryview], size: int) -> None:
        try:
            self._store.read_into(self.name(file), offset, buffers)
        except (OSError, CheckpointError) as error:
            raise self._damaged(file, offset, offset + size, f"cannot be read: {error}") from error

    def _damaged(self, file: int, start: int, stop: int, what: str) -> DamagedError:
        return DamagedError(self._store.location(self.name(file)), start, stop, what)

    def _read_chunks(
        self, file: int, chunks: Sequence[ChunkRead], digests: Sequence[str], targets: Sequence[Target]
    ) -> None:
        """Read neighbouring chunks at once, and verify each before any of it is copied on."""
        memory = [
            _buffers(chunk, targets, scratch)
            for chunk, scratch in zip(chunks, self._scratch[: len(chunks)], strict=True)
        ]
        begin, size = self.contents(file).header_bytes, chunks[-1].stop - chunks[0].start
        self._fill(file, begin + chunks[0].start, [b for buffers, _ in memory for b in buffers], size)
        for chunk, (buffers, copies) in zip(chunks, memory, strict=True):
            if digest(*buffers) != digests[chunk.index]:
                raise self._damaged(file, begin + chunk.start, begin + chunk.stop, f"the bytes are {_OTHER}")
            for piece, view in copies:
                target = targets[piece.want]
                if isinstance(target, memoryview):
                    target[piece.offset : piece.offset + len(view)] = view
                else:
                    target(piece.offset, view)


def _neighbours(chunks: Sequence[ChunkRead], most: int) -> Iterator[list[ChunkRead]]:
    """Chunks that follow each other in the file, so many at most together."""
    run = list[ChunkRead]()
    for chunk in chunks:
        if run and (len(run) == most or chunk.index != run[-1].index + 1):
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run


def _buffers(
    chunk: ChunkRead, targets: Sequence[Target], scratch: memoryview
) -> tuple[list[memoryview], list[tuple[Piece, memoryview]]]:
    """Memory for all bytes of a chunk, in order; and the pieces that have to be copied on from `scratch`."""
    buffers, copies, reached = list[memoryview](), list[tuple[Piece, memoryview]](), chunk.start
    apart = 2 * len(chunk.pieces) + 1 > _MOST_BUFFERS
    for piece in chunk.pieces:
        aside = scratch[piece.start - chunk.start : piece.stop - chunk.start]
        target = targets[piece.want]
        if apart or not isinstance(target, memoryview):
            copies.append((piece, aside))
            continue
        if reached < piece.start:
            buffers.append(scratch[reached - chunk.start : piece.start - chunk.start])
        buffers.append(target[piece.offset : piece.offset + piece.stop - piece.start])
        reached = piece.stop
    if reached < chunk.stop:
        buffers.append(scratch[reached - chunk.start : chunk.stop - chunk.start])
    return buffers, copies
