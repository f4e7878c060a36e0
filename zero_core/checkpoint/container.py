"""The file that tensors of a checkpoint lie in: standard safetensors, every byte of it computed beforehand.

    [8 bytes: length of the header][header: JSON, padded with spaces][data: the tensors, without gaps]

What a file holds follows from the manifest (`rank_contents`, `buffer_contents`), so where anything lies is
never read from the file. The header's `__metadata__` carries a digest of every chunk of the data, and one of
every block, by which ranges are verified. The length of a header depends on the contents only: the data can
be written before their digests are known.

Pure: knows neither files nor torch. Any reader of safetensors opens such a file without this package.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

import xxhash

from zero_core.errors import CheckpointError
from zero_core.layout import Layout

FORMAT = "elastic-zero/2"

CHUNK_BYTES = 4 << 20
"""What is written at a time, and has a digest of its own; the last may be shorter."""

BLOCK_BYTES = 1 << 16
"""What is verified at a time, but in huge files: a range costs two of these more at most; the last may be
shorter. Readers go by what the manifest says."""

LEAST_BLOCK_BYTES = 4096

_MOST_BLOCKS = 1 << 17
"""In a file, if a chunk allows: whoever reads a part of it reads all digests, which are in the header."""

DIGEST_DIGITS = 32

MODEL = "model"
"""The kind of state of a frozen unit: its parameters as they are held. Trainable ones have masters."""

_ALIGNMENT = 4096
"""Data begin at a multiple of a page, so that no page belongs to two chunks."""

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4,
    "U16": 2, "U8": 1, "BOOL": 1, "C64": 8, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip

DTYPE_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
"""Safetensors' names of dtypes by torch's."""

_COMPUTE = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}

_BETWEEN = b'","blocks":"'
_DIGITS = b"0123456789abcdef"

_Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype in safetensors' names, and shape."""


class Described(Protocol):
    """What the contents of a rank's file follow from; a manifest is one."""

    @property
    def layout(self) -> Layout: ...
    @property
    def kinds(self) -> tuple[str, ...]: ...
    @property
    def precision(self) -> str: ...
    @property
    def block_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's place: bytes [start, stop) of the data section. `dtype` in safetensors' names, as "F32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Digests(NamedTuple):
    """Of a file's data section: those of all chunks, and of all blocks, in order and without gaps."""

    chunks: str
    blocks: str

    def fit(self, contents: "Contents") -> bool:
        """Whether there are as many as these contents have chunks and blocks."""
        wanted = contents.chunks * DIGEST_DIGITS, contents.blocks * DIGEST_DIGITS
        return (len(self.chunks), len(self.blocks)) == wanted


@dataclass(frozen=True)
class Contents:
    """All tensors of one file, in the order in which they lie in it, one right behind the other."""

    entries: tuple[Entry, ...]
    block_bytes: int = BLOCK_BYTES

    @property
    def data_bytes(self) -> int:
        return self.entries[-1].stop if self.entries else 0

    @property
    def chunks(self) -> int:
        """How many chunks the data section has, the last of which may be short."""
        return -(-self.data_bytes // CHUNK_BYTES)

    @property
    def blocks(self) -> int:
        """How many blocks the data section has, the last of which may be short."""
        return -(-self.data_bytes // self.block_bytes)

    @cached_property
    def blank(self) -> tuple[bytes, bytes, bytes]:
        """The header without its digests: what comes before those of chunks, between the two, and behind."""
        table: dict[str, object] = {
            "__metadata__": {
                "format": FORMAT,
                "chunk_bytes": str(CHUNK_BYTES),
                "block_bytes": str(self.block_bytes),
                "chunks": "",
                "blocks": "",
            }
        }
        for entry in self.entries:
            table[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [entry.start, entry.stop],
            }
        before, between, behind = json.dumps(table, separators=(",", ":")).encode().partition(_BETWEEN)
        room = 8 + len(before + between + behind) + (self.chunks + self.blocks) * DIGEST_DIGITS
        whole = -(-room // _ALIGNMENT) * _ALIGNMENT
        return (whole - 8).to_bytes(8, "little") + before, between, behind.ljust(whole - room + len(behind))

    @property
    def header_bytes(self) -> int:
        """Bytes in front of the data section, the length among them."""
        return sum(map(len, self.blank)) + (self.chunks + self.blocks) * DIGEST_DIGITS

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.data_bytes

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    def chunk(self, index: int) -> tuple[int, int]:
        """Bytes [start, stop) of the data section that digest number `index` of the chunks is for."""
        return index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self.data_bytes)

    def block(self, index: int) -> tuple[int, int]:
        """Bytes [start, stop) of the data section that digest number `index` of the blocks is for."""
        return index * self.block_bytes, min((index + 1) * self.block_bytes, self.data_bytes)


def item_bytes(dtype: str) -> int:
    """Bytes of one element. Raises CheckpointError for a dtype that safetensors has no name for."""
    if dtype not in _ITEM_BYTES:
        raise CheckpointError(f"dtype {dtype!r} is none of {', '.join(_ITEM_BYTES)}")
    return _ITEM_BYTES[dtype]


def dtype_name(dtype: str) -> str:
    """Safetensors' name of a dtype by torch's, with or without "torch." in front."""
    name = dtype.removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise CheckpointError(
            f"a tensor of dtype {name} cannot be saved: safetensors knows {', '.join(DTYPE_NAMES)}"
        )
    return DTYPE_NAMES[name]


def held_dtype(name: str, precision: str) -> str:
    """Safetensors' name of what a unit of layout dtype `name` is held in."""
    if name != "compute":
        return dtype_name(name)
    if precision not in _COMPUTE:
        raise CheckpointError(f"precision {precision!r} is none of {', '.join(_COMPUTE)}")
    return _COMPUTE[precision]


def tensor_name(kind: str, unit: int) -> str:
    """What a rank's part of a unit is called in its file."""
    return f"{kind}/{unit}"


def kinds_of(described: Described, unit: int) -> tuple[str, ...]:
    """The kinds of state that a checkpoint has of a unit."""
    return described.kinds if described.layout.units[unit].trainable else (MODEL,)


def kind_dtype(described: Described, unit: int, kind: str) -> str:
    """The dtype of a kind of state of a unit: masters and moments are fp32."""
    return held_dtype(described.layout.units[unit].dtype, described.precision) if kind == MODEL else "F32"


def fitting_block_bytes(data_bytes: int) -> int:
    """How large blocks of files of up to `data_bytes` are: 64 KiB up to 8 GiB, at most a chunk."""
    size = BLOCK_BYTES
    while size < CHUNK_BYTES and data_bytes > size * _MOST_BLOCKS:
        size *= 2
    return size


def rank_contents(described: Described, rank: int) -> Contents:
    """What the file of one rank holds: the flat part that it owns of each unit, by kind and unit.

    Kind by kind, units in order, parts without elements left out; but wider elements come first, so that
    every tensor begins at a multiple of its element.
    """
    layout = described.layout
    parts = []
    for kind in (*described.kinds, MODEL):
        for index, unit in enumerate(layout.units):
            start, stop = layout.owned(index, rank)
            if unit.trainable != (kind == MODEL) and stop > start:
                dtype = kind_dtype(described, index, kind)
                parts.append((tensor_name(kind, index), dtype, (stop - start,)))
    return _placed(parts, described.block_bytes)


def buffer_contents(buffers: Iterable[_Tensor], block_bytes: int = BLOCK_BYTES) -> Contents:
    """What the file of the model's buffers holds: all of them, whole, also those without elements."""
    return _placed(buffers, block_bytes)


def header(contents: Contents, digests: Digests) -> bytes:
    """The bytes in front of the data section."""
    if not digests.fit(contents):
        raise CheckpointError(
            f"{contents.chunks} chunks and {contents.blocks} blocks need a digest each of {DIGEST_DIGITS} "
            f"digits, got {len(digests.chunks)} and {len(digests.blocks)} digits"
        )
    before, between, behind = contents.blank
    return b"".join((before, digests.chunks.encode(), between, digests.blocks.encode(), behind))


def digests_in(header_bytes: bytes, contents: Contents) -> Digests:
    """The digests, from a header that is what `contents` say in every other byte."""
    before, between, _ = contents.blank
    first = len(before), len(before) + contents.chunks * DIGEST_DIGITS
    second = first[1] + len(between), first[1] + len(between) + contents.blocks * DIGEST_DIGITS
    parts = [header_bytes[start:stop] for start, stop in (first, second)]
    digests = Digests(*("" if part.translate(None, _DIGITS) else part.decode() for part in parts))
    if not digests.fit(contents) or header_bytes != header(contents, digests):
        raise CheckpointError(
            f"the header of {len(header_bytes)} bytes is not the one that the manifest leads to: it is "
            "damaged, or of another checkpoint"
        )
    return digests


def digest(*buffers: bytes | bytearray | memoryview) -> str:
    """xxh3 of 128 bits over all bytes in order, as 32 hexadecimal digits."""
    if len(buffers) == 1:
        return xxhash.xxh3_128_hexdigest(buffers[0])
    running = xxhash.xxh3_128()
    for buffer in buffers:
        running.update(buffer)
    return running.hexdigest()


def digests_of(buffers: Sequence[memoryview], size: int) -> list[str]:
    """A digest of every `size` bytes, in order; the last ones may be fewer."""
    taken, found = xxhash.xxh3_128_hexdigest, list[str]()
    parts, missing = list[memoryview](), size
    for buffer in buffers:
        at = 0
        if parts:
            parts.append(buffer[:missing])
            at, missing = len(parts[-1]), missing - len(parts[-1])
            if missing:
                continue
            found.append(digest(*parts))
            parts, missing = [], size
        rest = len(buffer) - (len(buffer) - at) % size
        found += [taken(buffer[start : start + size]) for start in range(at, rest, size)]
        if rest < len(buffer):
            parts, missing = [buffer[rest:]], size - (len(buffer) - rest)
    return [*found, digest(*parts)] if parts else found


def _placed(tensors: Iterable[_Tensor], block_bytes: int) -> Contents:
    entries, stop = [], 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -item_bytes(tensor[1])):
        start, stop = stop, stop + prod(shape) * item_bytes(dtype)
        entries.append(Entry(name, dtype, shape, start, stop))
    return Contents(tuple(entries), block_bytes)
