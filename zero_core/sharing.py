"""Memory that the other ranks on this host can read without a copy through a socket.

Owns anonymous shared memory (`memfd`): it has no name, so nothing is left behind when a process is killed,
and no limit of a file system applies. Pages exist from the first touch on. What lies where, and when it may
be read, is the business of `links` and `collectives`.
"""

import contextlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_core.budget import aligned

_EXTENT_BYTES = 256 << 20
"""The file grows by at least so much; untouched pages take no memory."""

_LEAST_WRITE_BYTES = 1 << 16
"""Less is copied through the mapping."""

_WRITE_BYTES = 64 << 20
"""Most that is written by one call: there, it cannot be interrupted."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """`bytes` from `offset` in a file, mapped at `address` in this process."""

    offset: int
    bytes: int
    address: int


@dataclass(frozen=True, slots=True)
class _Extent(_Stretch):
    """A stretch of this rank's own file."""

    memory: mmap.mmap


class SharedMemory:
    """Memory in a file without a name, as seen by this process: keeps the file for as long as it is there.

    descriptor  a copy of the file's, closed with this object
    """

    def __init__(self, descriptor: int, stretches: Sequence[_Stretch]) -> None:
        self.descriptor = os.dup(descriptor)
        self._stretches = [_Stretch(s.offset, s.bytes, s.address) for s in stretches]

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.descriptor)

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Where in the file a contiguous tensor begins; None if it does not lie in it."""
        address = tensor.data_ptr()
        for stretch in self._stretches:
            if stretch.address <= address < stretch.address + stretch.bytes:
                return address - stretch.address + stretch.offset
        return None

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` to `target`, both contiguous and of one dtype, wherever either of them lies.

        Pages of this memory that nobody has touched are filled without being cleared first, which takes half
        the time of a copy through the mapping.
        """
        size = target.numel() * target.element_size()
        offset = self.offset(target) if size >= _LEAST_WRITE_BYTES else None
        if offset is None or source.device.type != "cpu":
            target.copy_(source)
            return
        view = source.detach().view(torch.uint8).numpy().data
        written = 0
        while written < len(view):
            written += os.pwrite(self.descriptor, view[written : written + _WRITE_BYTES], offset + written)


class SharedArena:
    """This rank's memory that others may map. Flat tensors are handed out one behind the other."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("elastic-zero", os.MFD_CLOEXEC)
        self._extents: list[_Extent] = []
        self._used = 0  # of the last extent

    def reserve(self, size: int) -> None:
        """Let the next `size` bytes lie in one piece."""
        if size:
            self._grow(size)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] of `dtype`, zeros, in a storage of its own."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        size = aligned(numel * dtype.itemsize)
        if not self._extents or self._used + size > self._extents[-1].bytes:
            self._grow(size)
        start, self._used = self._used, self._used + size
        return torch.frombuffer(self._extents[-1].memory, dtype=dtype, count=numel, offset=start)

    def offset(self, tensor: torch.Tensor) -> int:
        """Where in the file a tensor's first element lies. An empty tensor is at 0."""
        if tensor.numel() == 0:
            return 0
        address = tensor.data_ptr()
        for extent in self._extents:
            if extent.address <= address < extent.address + extent.bytes:
                return address - extent.address + extent.offset
        raise AssertionError("only tensors of this arena can be read by others")

    def handle(self) -> SharedMemory:
        """What has been allocated so far, to be kept beyond `close`, or given to others."""
        return SharedMemory(self.descriptor, self._extents)

    def close(self) -> None:
        """Take no more part; the memory goes with the last tensor that lies in it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self._extents.clear()

    def _grow(self, size: int) -> None:
        begin = sum(extent.bytes for extent in self._extents)
        length = -(-max(size, _EXTENT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.descriptor, begin + length)
        memory = mmap.mmap(self.descriptor, length, offset=begin)
        address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self._extents.append(_Extent(begin, length, address, memory))
        self._used = 0


class PeerMemory:
    """Another rank's arena, as this rank reads it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory: mmap.mmap | None = None

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] of `dtype` at `offset` of the peer's arena; to be read only."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        if self._memory is None or offset + numel * dtype.itemsize > len(self._memory):
            # It has grown. Mapped writable, because torch warns of memory that is not.
            self._memory = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)

    def handle(self, offset: int, tensor: torch.Tensor) -> SharedMemory:
        """Of a tensor at `offset`, to be kept beyond `close`."""
        size = tensor.numel() * tensor.element_size()
        return SharedMemory(self._descriptor, [_Stretch(offset, size, tensor.data_ptr())])

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._memory = None
