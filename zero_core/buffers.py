"""Flat buffers that are lent, taken back and lent again.

First touch of new memory costs about three times a copy into memory already touched, so what is freed
and needed again within the same step is kept.
"""

from collections.abc import Callable

import torch


class BufferPool:
    """Lends flat tensors, few sizes many times; the content of a lent buffer is arbitrary.

    `allocate(numel, dtype)` makes a new one. `most_lent_bytes` is the peak of what was out at one time.
    """

    def __init__(self, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._allocate = allocate
        self._lent_bytes = 0
        self.most_lent_bytes = 0
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.allocated_bytes = 0

    def reserve(self, numel: int, dtype: torch.dtype, *, count: int) -> None:
        """Have so many buffers of a size ready before they are needed."""
        self.allocated_bytes += count * numel * dtype.itemsize
        ready = self._free.setdefault((numel, dtype), [])
        ready += [self._allocate(numel, dtype) for _ in range(count)]

    def has_free(self, numel: int, dtype: torch.dtype) -> bool:
        """Whether `lend` of the same would need no new memory."""
        return numel == 0 or bool(self._free.get((numel, dtype)))

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] of `dtype`: a free buffer of just that size, else a new one."""
        if numel == 0:
            return self._allocate(0, dtype)
        self._lent_bytes += numel * dtype.itemsize
        self.most_lent_bytes = max(self.most_lent_bytes, self._lent_bytes)
        free = self._free.setdefault((numel, dtype), [])
        if not free:
            self.allocated_bytes += numel * dtype.itemsize
            return self._allocate(numel, dtype)
        return free.pop()

    def take_back(self, lent: torch.Tensor) -> None:
        """A lent buffer is free again."""
        if lent.numel():
            self._lent_bytes -= lent.numel() * lent.element_size()
            self._free[lent.numel(), lent.dtype].append(lent)
