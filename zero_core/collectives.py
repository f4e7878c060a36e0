"""Every byte between ranks goes through here, and is counted by what it was for.

Owns the process group, the constant-size staging buffer and the ledger. Knows chunks and ranges of flat
tensors, nothing of parameters, optimizers or stages.

On CPU (gloo) the reduction is an exchange, point to point, of low-precision contributions that the owner
sums in fp32 in rank order: gloo's own reduce-scatter moves twice the bytes, and rounds bf16 sums in
bf16. On GPU (NCCL) the native reduce-scatter and all-gather are used.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zero_core.errors import ConfigError
from zero_core.summation import GradientSum

# torch 2.13 renamed these; the old names are deprecated there, the new ones absent before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class Ledger:
    """Bytes sent and seconds spent since the last `take`, by kind."""

    sent: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def take(self) -> tuple[dict[str, int], dict[str, float]]:
        """Hand over the figures and start again from zero."""
        taken = dict(self.sent), dict(self.seconds)
        self.sent.clear()
        self.seconds.clear()
        return taken

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - began


class Collectives:
    """Collectives over flat tensors that are cut into N equal chunks, one for each owner."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, staging_bytes: int) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised: call init_process_group first, also for one process"
            )
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.device = device
        self.native = device.type == "cuda"
        self.ledger = Ledger()
        self.staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)

    def reduce_to_owners(
        self,
        full: torch.Tensor,
        chunk: int,
        numel: int,
        total: GradientSum,
        *,
        active: int,
        tag: int,
    ) -> None:
        """Bring the first `active` ranks' `full` tensors to their owners; each adds its part up in `total`.

        full: [world_size * chunk] or longer, compute dtype; elements from `numel` on are padding.
        A rank at or beyond `active` contributes nothing, whatever its `full` holds. `tag` tells the pieces
        of different units apart, so that ranks out of step wait (and time out) instead of mixing them.
        """
        assert total.owned.numel() == self._owned(chunk, numel, self.rank), "exactly the owned elements"
        with self.ledger.timed("reduce"):
            if self.native:
                self._reduce_native(full, chunk, total, active=active)
            else:
                self._reduce_by_exchange(full, chunk, numel, total, active=active, tag=tag)
            total.end_exchange(active)

    def gather_from_owners(
        self, full: torch.Tensor, chunk: int, numel: int, *, kind: str, tag: int, active: int | None = None
    ) -> None:
        """Fill `full` ([world_size * chunk] or longer) in place: each owner's own part is already there.

        Only the first `active` ranks (default: all) receive; the others may pass a tensor of which just
        their own part is valid.
        """
        if self.world_size == 1:
            return
        with self.ledger.timed("gather"):
            if self.native:
                own = full[self.rank * chunk : (self.rank + 1) * chunk]
                _all_gather(full[: self.world_size * chunk], own, group=self.group)
                self.ledger.sent[kind] += (self.world_size - 1) * own.numel() * own.element_size()
                return
            receivers = self.world_size if active is None else active
            own = self._part(full, chunk, numel, self.rank)
            works: list[dist.Work | None] = []
            for peer in self._peers():
                if peer < receivers and own.numel():
                    works.append(self._send(own, peer, kind, tag))
                theirs = self._part(full, chunk, numel, peer)
                if self.rank < receivers and theirs.numel():
                    works.append(dist.irecv(theirs, group=self.group, group_src=peer, tag=tag))
            _wait(works)

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's few fp64 numbers, a row for each rank."""
        mine = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        if self.world_size == 1:
            return [mine.tolist()]
        with self.ledger.timed("control"):
            table = torch.empty(self.world_size * mine.numel(), dtype=torch.float64, device=self.device)
            _all_gather(table, mine, group=self.group)
            self.ledger.sent["control"] += (self.world_size - 1) * mine.numel() * mine.element_size()
        rows: list[list[float]] = table.view(self.world_size, -1).tolist()
        return rows

    def sum_in_rank_order(self, values: Sequence[float]) -> tuple[float, ...]:
        """Sum a few fp64 numbers over ranks, in rank order, so that all ranks get the same bits."""
        return tuple(sum(column) for column in zip(*self.gather_numbers(values), strict=True))

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Copy rank `source`'s tensor to all ranks, in place; used outside of steps."""
        if self.world_size > 1:
            dist.broadcast(tensor, group_src=source, group=self.group)
            if self.rank == source:
                self.ledger.sent["broadcast"] += (
                    (self.world_size - 1) * tensor.numel() * tensor.element_size()
                )

    def _reduce_native(self, full: torch.Tensor, chunk: int, total: GradientSum, *, active: int) -> None:
        full = full[: self.world_size * chunk]
        if self.rank >= active:
            full.zero_()
        part = torch.empty(chunk, dtype=full.dtype, device=full.device)
        if self.world_size == 1:
            part.copy_(full)
        else:
            _reduce_scatter(part, full, group=self.group)
            self.ledger.sent["reduce"] += (self.world_size - 1) * chunk * full.element_size()
        if total.owned.numel():
            total.absorb(0, [part[: total.owned.numel()]])

    def _reduce_by_exchange(
        self,
        full: torch.Tensor,
        chunk: int,
        numel: int,
        total: GradientSum,
        *,
        active: int,
        tag: int,
    ) -> None:
        """In pieces that fit the staging buffer: send others their part, receive mine, add it up."""
        senders = [peer for peer in self._peers() if peer < active]
        item = full.element_size()
        piece = max(1, self.staging.numel() // (max(1, self.world_size - 1) * item))
        received = self.staging[: self.staging.numel() // item * item].view(full.dtype)
        mine = self._part(full, chunk, numel, self.rank)
        for offset in range(0, chunk, piece):
            works: list[dist.Work | None] = []
            incoming: dict[int, torch.Tensor] = {}
            own = mine[offset : offset + piece]
            for index, peer in enumerate(senders):
                if own.numel():
                    incoming[peer] = received[index * piece : index * piece + own.numel()]
                    works.append(dist.irecv(incoming[peer], group=self.group, group_src=peer, tag=tag))
            if self.rank < active:
                incoming[self.rank] = own
                for peer in self._peers():
                    theirs = self._part(full, chunk, numel, peer)[offset : offset + piece]
                    if theirs.numel():
                        works.append(self._send(theirs, peer, "reduce", tag))
            _wait(works)
            if own.numel():
                total.absorb(offset, [incoming[rank] for rank in sorted(incoming)])

    def _send(self, tensor: torch.Tensor, peer: int, kind: str, tag: int) -> dist.Work | None:
        self.ledger.sent[kind] += tensor.numel() * tensor.element_size()
        return dist.isend(tensor, group=self.group, group_dst=peer, tag=tag)

    def _peers(self) -> Iterator[int]:
        """The other ranks, starting from the next one, so that not all talk to rank 0 first."""
        for step in range(1, self.world_size):
            yield (self.rank + step) % self.world_size

    @staticmethod
    def _owned(chunk: int, numel: int, rank: int) -> int:
        return max(0, min(chunk, numel - rank * chunk))

    def _part(self, full: torch.Tensor, chunk: int, numel: int, rank: int) -> torch.Tensor:
        return full[rank * chunk : rank * chunk + self._owned(chunk, numel, rank)]


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this rank belongs to its own group"
        work.wait()
