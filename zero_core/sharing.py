"""Memory that the other ranks on this host can read without a copy through a socket.

Owns anonymous shared memory (`memfd`): it has no name, so nothing is left behind when a process is killed,
and no limit of a file system applies. Pages exist from the first touch on. What lies where, and when it may
be read, is the business of `links` and `collectives`.
"""

import mmap
import os
from dataclasses import dataclass

import torch

from zero_core.budget import aligned

_EXTENT_BYTES = 256 << 20
"""The file grows by at least so much; untouched pages take no memory."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """A mapped stretch of the file: `bytes` from `offset` in the file, at `address` in this process."""

    memory: mmap.mmap
    offset: int
    bytes: int
    address: int


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
        self._extents.append(_Extent(memory, begin, length, address))
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

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._memory = None
