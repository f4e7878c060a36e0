"""Flat buffers that are lent, taken back and lent again.

First touch of new memory costs about three times a copy into memory already touched, so what is freed
and needed again within the same step is kept.
"""

import torch


class BufferPool:
    """Lends flat tensors, few sizes many times; the content of a lent buffer is arbitrary."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.allocated_bytes = 0

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] of `dtype`: a free buffer of just that size, else a new one."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self._device)
        free = self._free.setdefault((numel, dtype), [])
        if not free:
            self.allocated_bytes += numel * dtype.itemsize
            return torch.empty(numel, dtype=dtype, device=self._device)
        return free.pop()

    def take_back(self, lent: torch.Tensor) -> None:
        """A lent buffer is free again."""
        if lent.numel():
            self._free[lent.numel(), lent.dtype].append(lent)
