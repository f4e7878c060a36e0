"""Reading ranges of a checkpoint: which bytes of which files, each block once, every block verified.

Owns the plan (`plan`, `block_reads`: plain integers) and carrying it out (`Reader`). Ranges of the logical
space are cut by who owned them at the saving N, the pieces are grouped by file, and a file is walked from its
beginning to its end. Where all of a chunk is wanted, it is verified as a whole, else by blocks: what is asked
for of a block goes straight to its target, the rest to a scratch buffer. Digests are taken while the bytes
are in the cache. Nothing is read twice by one call.

Knows nothing of engines, process groups or tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from zero_core.checkpoint import manifest as manifests
from zero_core.checkpoint.container import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    MODEL,
    Contents,
    Digests,
    buffer_contents,
    digest,
    digests_in,
    item_bytes,
    kind_dtype,
    kinds_of,
    rank_contents,
    running_digest,
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
"""Neighbours are asked of a remote store together, up to so many bytes."""

_STRIP_BYTES = 1 << 19
"""Of a chunk, what is read and taken into its digest at a time, while the core's own cache has it."""

_OTHER = "not what was written: the checkpoint is damaged, load an older one"

_KEPT_BYTES = 16 * CHUNK_BYTES
"""What `Reader.fetch` keeps of what it has read."""

_MOST_BUFFERS = 64
"""A block that falls into more buffers is read whole and copied: cheaper, and below every system's limit."""


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


class BlockRead(NamedTuple):
    """Block number `number`, bytes [start, stop) of the data section, and the pieces in it, in order.

    chunk  it is a chunk instead, all of which is wanted
    """

    number: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    chunk: bool = False


@dataclass(frozen=True, slots=True)
class FileRead:
    """What is read of file number `file`: a rank's, or, numbered as the world size, that of the buffers."""

    file: int
    blocks: tuple[BlockRead, ...]

    @property
    def bytes(self) -> int:
        return sum(block.stop - block.start for block in self.blocks)


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


def block_reads(pieces: Sequence[Piece], block_bytes: int, data_bytes: int) -> Iterator[BlockRead]:
    """The blocks that pieces, ordered and apart from each other, lie in: each once, in order."""
    index, inside = -1, list[Piece]()
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            if start // block_bytes != index:
                if inside:
                    yield _block(index, inside, block_bytes, data_bytes)
                index, inside = start // block_bytes, []
            stop = min(piece.stop, (index + 1) * block_bytes)
            inside.append(Piece(start, stop, piece.want, piece.offset + start - piece.start))
            start = stop
    if inside:
        yield _block(index, inside, block_bytes, data_bytes)


def verifiable_reads(pieces: Sequence[Piece], data_bytes: int) -> Iterator[BlockRead]:
    """The chunks all of which the pieces want, and the blocks they lie in elsewhere, in order."""
    for chunk in block_reads(pieces, CHUNK_BYTES, data_bytes):
        if sum(piece.stop - piece.start for piece in chunk.pieces) == chunk.stop - chunk.start:
            yield chunk._replace(chunk=True)
        else:
            yield from block_reads(chunk.pieces, BLOCK_BYTES, data_bytes)


def segments(numel: int, item: int) -> Iterator[tuple[int, int]]:
    """Elements [0, numel) in stretches of which one can be in memory; `item`: bytes of one element."""
    step = _SEGMENT_BYTES // item
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


def _block(index: int, pieces: list[Piece], block_bytes: int, data_bytes: int) -> BlockRead:
    start = index * block_bytes
    return BlockRead(index, start, min(start + block_bytes, data_bytes), tuple(pieces))


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
        self._places = Places(self.manifest)
        self._contents: dict[int, Contents] = {}
        self._digests: dict[int, Digests] = {}
        self._kept: dict[tuple[int, int, int], memoryview] = {}
        # A request to a remote store waits for its answer; here what is read at once is to stay in the cache.
        self._near = self._store.moves
        self._most_bytes = CHUNK_BYTES if self._near else _REQUEST_BYTES
        self._scratch = memoryview(bytearray(self._most_bytes))

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
        """Which blocks of which files make up the wants; nothing is read."""
        pieces = plan(self.manifest.layout, wants, self._places)
        return [self._file_read(file, pieces[file]) for file in sorted(pieces)]

    def plan_whole(self, file: int) -> FileRead:
        """Every chunk of a file, for no want: to verify it."""
        contents = self.contents(file)
        spans = (contents.chunk(index) for index in range(contents.chunks))
        return FileRead(file, tuple(BlockRead(i, *span, (), chunk=True) for i, span in enumerate(spans)))

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
                for blocks in _neighbours(read.blocks, self._most_bytes):
                    self._read_blocks(read.file, fill, blocks, digests, targets)
                    yield blocks[-1].stop - blocks[0].start

    def damage(self, file: int) -> Iterator[DamagedError]:
        """Read a whole file; yields what is wrong with it, block by block."""
        try:
            digests = self._digests_of(file)
        except DamagedError as error:
            yield error
            return
        fill = partial(self._store.read_into, self.name(file))
        for blocks in _neighbours(self.plan_whole(file).blocks, self._most_bytes):
            try:
                self._read_blocks(file, fill, blocks, digests, ())
            except DamagedError as found:
                closer = [error for block in blocks for error in self._closer(file, fill, block, digests)]
                yield from closer or [found]

    def _fetch(self, reads: Sequence[FileRead], sizes: Sequence[int]) -> list[bytearray]:
        found = [bytearray(size) for size in sizes]
        for read in reads:
            for blocks in _neighbours(read.blocks, self._most_bytes):
                for block, data in zip(blocks, self._kept_blocks(read.file, blocks), strict=True):
                    for piece in block.pieces:
                        end = piece.offset + piece.stop - piece.start
                        found[piece.want][piece.offset : end] = data[
                            piece.start - block.start : piece.stop - block.start
                        ]
        return found

    def _kept_blocks(self, file: int, blocks: Sequence[BlockRead]) -> list[memoryview]:
        """Whole blocks or chunks, verified; from memory where they were among the last."""
        keys = [(file, block.start, block.stop) for block in blocks]
        missing = [block for block, key in zip(blocks, keys, strict=True) if key not in self._kept]
        fill = partial(self._store.read_into, self.name(file))
        for run in _neighbours(missing, self._most_bytes):
            memory = [memoryview(bytearray(block.stop - block.start)) for block in run]
            whole = [
                block._replace(pieces=(Piece(block.start, block.stop, number, 0),))
                for number, block in enumerate(run)
            ]
            self._read_blocks(file, fill, whole, self._digests_of(file), memory)
            self._kept |= {(file, b.start, b.stop): data for b, data in zip(run, memory, strict=True)}
        found = [self._kept.pop(key) for key in keys]
        self._kept |= dict(zip(keys, found, strict=True))
        while sum(map(len, self._kept.values())) > _KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return found

    def _file_read(self, file: int, pieces: Sequence[Piece]) -> FileRead:
        buffers = file == self.manifest.world_size
        size = self.contents(file).data_bytes if buffers else self._places.data_bytes(file)
        return FileRead(file, tuple(verifiable_reads(pieces, size)))

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

    def _read_blocks(
        self,
        file: int,
        fill: Fill,
        blocks: Sequence[BlockRead],
        digests: Digests,
        targets: Sequence[Target],
    ) -> None:
        """Read neighbours at once, and verify each before any of it is copied on."""
        base, begin = blocks[0].start, self.contents(file).header_bytes
        memory = [_buffers(b, targets, self._scratch[b.start - base : b.stop - base]) for b in blocks]
        if self._near and blocks[0].chunk:
            found = [self._taken_in(file, fill, begin + base, memory[0][0])]
        else:
            whole = [buffer for buffers, _ in memory for buffer in buffers]
            self._fill(file, fill, begin + base, whole, blocks[-1].stop - base)
            found = [digest(*buffers) for buffers, _ in memory]
        for block, told, (_, copies) in zip(blocks, found, memory, strict=True):
            if told != (digests.chunks if block.chunk else digests.blocks)[block.number]:
                raise next(
                    self._closer(file, fill, block, digests),
                    self._damaged(file, begin + block.start, begin + block.stop, f"the bytes are {_OTHER}"),
                )
            for piece, view in copies:
                target = targets[piece.want]
                if isinstance(target, memoryview):
                    target[piece.offset : piece.offset + len(view)] = view
                else:
                    target(piece.offset, view)

    def _taken_in(self, file: int, fill: Fill, offset: int, buffers: Sequence[memoryview]) -> str:
        """Fill the buffers from an offset on, strip by strip; the digest of it all."""
        running = running_digest()
        for buffer in buffers:
            for start in range(0, len(buffer), _STRIP_BYTES):
                strip = buffer[start : start + _STRIP_BYTES]
                self._fill(file, fill, offset, (strip,), len(strip))
                running.update(strip)
                offset += len(strip)
        return running.hexdigest()

    def _closer(self, file: int, fill: Fill, chunk: BlockRead, digests: Digests) -> Iterator[DamagedError]:
        """Which blocks of a damaged chunk are; of a block nothing more is known."""
        if not chunk.chunk:
            return
        contents = self.contents(file)
        first = chunk.start // BLOCK_BYTES
        for number in range(first, -(-chunk.stop // BLOCK_BYTES)):
            try:
                block = BlockRead(number, *contents.block(number), ())
                self._read_blocks(file, fill, [block], digests, ())
            except DamagedError as error:
                yield error


def _neighbours(blocks: Sequence[BlockRead], most_bytes: int) -> Iterator[list[BlockRead]]:
    """Blocks and chunks that follow each other in the file, of so many bytes at most together."""
    run = list[BlockRead]()
    for block in blocks:
        if run and (block.stop - run[0].start > most_bytes or block.start != run[-1].stop):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _buffers(
    block: BlockRead, targets: Sequence[Target], scratch: memoryview
) -> tuple[list[memoryview], list[tuple[Piece, memoryview]]]:
    """Memory for all bytes of a block, in order; and the pieces that have to be copied on from `scratch`."""
    first = block.pieces[0] if block.pieces else None
    if first is not None and first.start == block.start and first.stop == block.stop:
        target = targets[first.want]
        if isinstance(target, memoryview):
            return [target[first.offset : first.offset + first.stop - first.start]], []
    buffers, copies, reached = list[memoryview](), list[tuple[Piece, memoryview]](), block.start
    apart = 2 * len(block.pieces) + 1 > _MOST_BUFFERS
    for piece in block.pieces:
        aside = scratch[piece.start - block.start : piece.stop - block.start]
        target = targets[piece.want]
        if apart or not isinstance(target, memoryview):
            copies.append((piece, aside))
            continue
        if reached < piece.start:
            buffers.append(scratch[reached - block.start : piece.start - block.start])
        buffers.append(target[piece.offset : piece.offset + piece.stop - piece.start])
        reached = piece.stop
    if reached < block.stop:
        buffers.append(scratch[reached - block.start : block.stop - block.start])
    return buffers, copies
