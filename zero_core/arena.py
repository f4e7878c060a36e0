"""One allocation, made once and handed out in aligned pieces (the ZeRO paper's MD, contiguous memory).

What lives long lies in one block, so that it leaves no holes between what lives shortly: the optimizer's
states for the life of the engine, the inputs of checkpointed units from forward to backward. An arena
only grows towards its end and is emptied as a whole; it knows nothing of what lies in it, nor of when it
may be emptied.
"""

import torch

from zero_core.budget import ALIGNMENT_BYTES, aligned
from zero_core.errors import ArenaError


class Arena:
    """`total_bytes` on `device`, in page-locked host memory if `pinned`, or in a given block, [bytes] uint8.

    Every piece begins at a multiple of 64 bytes, as memory from torch's own allocator does: kernels that
    round differently for other alignments see none.
    """

    def __init__(
        self,
        total_bytes: int,
        device: torch.device,
        *,
        pinned: bool = False,
        block: torch.Tensor | None = None,
    ) -> None:
        if total_bytes < 0:
            raise ArenaError(f"an arena of {total_bytes} bytes: the size must not be negative")
        place = torch.device("cpu") if pinned else device
        if block is None:
            block = torch.empty(aligned(total_bytes), dtype=torch.uint8, device=place, pin_memory=pinned)
        assert block.numel() == aligned(total_bytes), "a given block is exactly of that size"
        self._block = block
        assert self._block.data_ptr() % ALIGNMENT_BYTES == 0, "torch's allocators align to 64 bytes"
        self._end = 0
        self._padding = 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the whole block."""
        return self._block.numel()

    @property
    def used_bytes(self) -> int:
        """Bytes from the beginning to the end of the last piece, its alignment included."""
        return self._end

    @property
    def padding_bytes(self) -> int:
        """Bytes of `used_bytes` that only round pieces up to the alignment."""
        return self._padding

    def has_room(self, numel: int, dtype: torch.dtype) -> bool:
        """Whether `take` of the same would succeed."""
        return self._end + aligned(numel * dtype.itemsize) <= self.reserved_bytes

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] of `dtype`, uninitialised, that no other piece overlaps until `empty`.

        Raises ArenaError where the rest of the block is smaller.
        """
        asked = numel * dtype.itemsize
        if not self.has_room(numel, dtype):
            raise ArenaError(
                f"{numel:,} elements of {dtype} need {aligned(asked):,} bytes, and {self._end:,} of the "
                f"arena's {self.reserved_bytes:,} are taken: it must be built for all that is put into it"
            )
        # A tensor of its own over the same storage, not a view: views count in-place writes together, and
        # autograd would take a write to one piece for a write to all.
        piece = torch.empty(0, dtype=dtype, device=self._block.device)
        piece.set_(self._block.untyped_storage(), self._end // dtype.itemsize, (numel,), (1,))
        self._end += aligned(asked)
        self._padding += aligned(asked) - asked
        return piece

    def empty(self) -> None:
        """Forget all pieces; their memory is handed out again."""
        self._end = self._padding = 0
