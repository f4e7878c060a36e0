"""What lies where in a file of a checkpoint, and that any reader of safetensors understands it."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.unit.zero_core.written import digests_of
from zero_core.checkpoint import container
from zero_core.checkpoint.container import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    Contents,
    buffer_contents,
    digest,
    digests_in,
    fitting_block_bytes,
    header,
    rank_contents,
)
from zero_core.errors import CheckpointError
from zero_core.layout import Layout, ParameterSpec, build_layout

DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8,
    "uint64": torch.uint64, "uint32": torch.uint32, "uint16": torch.uint16, "uint8": torch.uint8,
    "bool": torch.bool, "complex64": torch.complex64, "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz, "float8_e5m2": torch.float8_e5m2,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
}  # fmt: skip


@dataclass(frozen=True)
class Described:
    layout: Layout
    kinds: tuple[str, ...] = ("master", "momentum", "variance")
    precision: str = "fp32"
    block_bytes: int = BLOCK_BYTES


def layout_of(*sizes: int, world_size: int, frozen: tuple[int, ...] = (), dtype: str = "uint8") -> Layout:
    specs = [ParameterSpec(f"w{i}", (size,)) for i, size in enumerate(sizes)]
    specs += [ParameterSpec(f"f{i}", (size,), False, dtype) for i, size in enumerate(frozen)]
    return build_layout(specs, lambda name: name, tile=64, world_size=world_size)


def written(path: Path, contents: Contents, data: bytes) -> bytes:
    """The file of these contents; returns its header."""
    assert len(data) == contents.data_bytes
    front = header(contents, digests_of(data))
    path.write_bytes(front + data)
    return front


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (3, 5)], ids=str)
def test_buffers_of_every_dtype_and_shape_are_read_back_by_safetensors(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    """K2 (PyTorch 192485): a 0-d step of 123 is not 0.0, and integers do not crash."""
    tensors = {}
    for name, dtype in DTYPES.items():
        raw = torch.arange(1, prod(shape) * dtype.itemsize + 1, dtype=torch.uint8)
        if dtype == torch.bool:
            raw %= 2
        tensors[name] = raw.view(dtype).reshape(shape)
    contents = buffer_contents((n, container.dtype_name(n), shape) for n in tensors)
    data = b"".join(bytes_of(tensors[entry.name]) for entry in contents.entries)
    written(tmp_path / "x", contents, data)
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert file.metadata()["format"] == "elastic-zero/2"
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert bytes_of(found) == bytes_of(tensor)


def test_dtypes_that_have_no_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match="complex128 cannot be saved"):
        container.dtype_name("torch.complex128")
    with pytest.raises(CheckpointError, match="dtype 'X9' is none of"):
        buffer_contents([("a", "X9", (1,))])
    with pytest.raises(CheckpointError, match="precision 'fp8' is none of"):
        rank_contents(Described(layout_of(frozen=(3,), dtype="compute", world_size=1), precision="fp8"), 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("sizes", [(1,), (2,), (127, 1, 8191), (64, 0, 128), (1009, 3, 63, 65)], ids=str)
def test_files_of_all_ranks_cover_every_element_once(
    sizes: tuple[int, ...], world_size: int, tmp_path: Path
) -> None:
    """K3 (DeepSpeed 5105, 1317): no padding is stored, so that prime totals shift nothing."""
    described = Described(layout_of(*sizes, world_size=world_size, frozen=(13,)))
    parts: dict[str, int] = {}
    for rank in range(world_size):
        contents = rank_contents(described, rank)
        written(tmp_path / "x", contents, bytes(contents.data_bytes))
        assert (tmp_path / "x").stat().st_size == contents.file_bytes
        at = 0
        for entry in contents.entries:
            assert entry.start == at
            assert entry.start % container.item_bytes(entry.dtype) == 0
            assert entry.stop > entry.start, "no ghost entries"
            at = entry.stop
            parts[entry.name] = parts.get(entry.name, 0) + prod(entry.shape)
        assert at == contents.data_bytes
        with safe_open(tmp_path / "x", framework="pt") as file:
            assert set(file.keys()) == set(contents.by_name)
    want = {f"{kind}/{i}": size for kind in described.kinds for i, size in enumerate(sizes) if size}
    assert parts == {**want, f"model/{len(sizes)}": 13}


def test_kinds_come_one_after_the_other_and_wider_elements_first() -> None:
    layout = layout_of(5, 3, world_size=1, frozen=(3,), dtype="bool")
    assert [
        (e.name, e.dtype) for e in rank_contents(Described(layout, kinds=("master", "momentum")), 0).entries
    ] == [
        ("master/0", "F32"),
        ("master/1", "F32"),
        ("momentum/0", "F32"),
        ("momentum/1", "F32"),
        ("model/2", "BOOL"),
    ]
    wide = layout_of(5, world_size=1, frozen=(3,), dtype="int64")
    assert rank_contents(Described(wide), 0).entries[0].name == "model/1"
    half = layout_of(world_size=1, frozen=(3,), dtype="compute")
    assert rank_contents(Described(half, precision="bf16"), 0).entries[0].dtype == "BF16"


@pytest.mark.parametrize(
    "size",
    [1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, CHUNK_BYTES, CHUNK_BYTES + 2 * BLOCK_BYTES + 7],
)
def test_every_chunk_and_block_has_a_digest_and_the_header_a_length_known_beforehand(size: int) -> None:
    contents = buffer_contents([("a", "U8", (size,))])
    assert (contents.chunks, contents.blocks) == (-(-size // CHUNK_BYTES), -(-size // BLOCK_BYTES))
    digests = digests_of(bytes([7]) * size)
    front = header(contents, digests)
    assert len(front) == contents.header_bytes
    assert len(front) % 4096 == 0
    assert int.from_bytes(front[:8], "little") + 8 == len(front)
    assert digests_in(front, contents) == digests
    assert contents.block(contents.blocks - 1)[1] == contents.chunk(contents.chunks - 1)[1] == size
    for few in (digests._replace(blocks=digests.blocks[1:]), digests._replace(chunks=digests.chunks[1:])):
        with pytest.raises(CheckpointError, match="need a digest each"):
            header(contents, few)


def test_blocks_of_huge_files_are_larger_so_that_headers_are_not() -> None:
    """A header is read whole by whoever reads a part of its file; safetensors takes 100 MB at most."""
    sizes = {exponent: fitting_block_bytes(1 << exponent) for exponent in (0, 20, 33, 34, 38, 39, 45)}
    assert list(sizes.values()) == [1 << 16, 1 << 16, 1 << 16, 1 << 17, 1 << 21, 1 << 22, 1 << 22]
    assert fitting_block_bytes((1 << 33) + 1) == 1 << 17
    for exponent in (33, 36, 39):
        contents = buffer_contents([("a", "U8", (1 << exponent,))], sizes.get(exponent, 1 << 19))
        assert contents.header_bytes < 9 << 20


def test_a_file_without_tensors_is_one_too(tmp_path: Path) -> None:
    contents = buffer_contents([])
    front = written(tmp_path / "x", contents, b"")
    assert digests_in(front, contents) == ("", "")
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert list(file.keys()) == []


def test_any_change_of_a_header_but_of_its_digests_is_an_error() -> None:
    """Digests in a header are covered by the header's own, which is in the manifest."""
    contents = buffer_contents([("naïve", "F32", (3,)), ("b", "BOOL", ())])
    digests = digests_of(b"x")
    front = header(contents, digests)
    refused = 0
    for at in range(len(front)):
        flipped = bytearray(front)
        flipped[at] ^= 1
        try:
            assert digests_in(bytes(flipped), contents) != digests
        except CheckpointError:
            refused += 1
    assert refused >= len(front) - 64
    for other in (b"", front[:-1], front + b" ", header(buffer_contents([("c", "F32", (3,))]), digests)):
        with pytest.raises(CheckpointError, match="not the one that the manifest leads to"):
            digests_in(other, contents)


def test_a_digest_is_of_the_concatenation() -> None:
    assert digest(b"ab", b"", b"c") == digest(b"abc") == digest(memoryview(b"abc"))
    assert digest() == digest(b"")
    assert len(digest(b"")) == container.DIGEST_DIGITS
