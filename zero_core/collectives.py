"""Every byte between ranks goes through here, and is counted by what it was for and how it travelled.

Owns the process group, the links to the other ranks and the constant-size staging buffer. Knows
chunks and ranges of flat tensors, nothing of parameters, optimizers or stages.

On CPU a reduction is an exchange of low-precision contributions, pair by pair, that the owner sums in fp32
in rank order: gloo's own reduce-scatter moves twice the bytes, and rounds bf16 sums in bf16. Ranks on one
host read each other's memory; other pairs send point to point. Which pair is which changes no bit. On GPU
(NCCL) the native reduce-scatter is used, or the same exchange when asked, and the native all-gather.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zero_core.arena import Arena
from zero_core.config import DivergenceCheck, Transport
from zero_core.errors import ConfigError, PeerLostError
from zero_core.ledger import Ledger
from zero_core.links import (
    Agreement,
    Kind,
    LocalLink,
    Notice,
    Purpose,
    RemoteNotices,
    connect,
    wait_for,
)
from zero_core.sharing import SharedArena, SharedMemory
from zero_core.summation import RUN, GradientSum

# torch 2.13 renamed these; the old names are deprecated there, the new ones absent before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_Object = TypeVar("_Object")

Pending = list["dist.Work | None"]
"""A gathering under way, to be given to `finish_gather`."""

_FIRST_STEPS = 3
"""How many steps `divergence_check="first"` compares."""


@dataclass(slots=True)
class Exchange:
    """One reduction under way: begun, and not yet summed.

    full    [world_size * chunk] or longer, compute dtype: this rank's contribution; it must rest until the
            others have finished with it too: see `Collectives.read_by_all`
    announced  the number of this one's notice: how many were told up to and with it
    """

    full: torch.Tensor
    chunk: int
    numel: int
    total: GradientSum
    active: int
    tag: int
    announced: int = 0
    posted: Pending = field(default_factory=list)
    received: dict[int, torch.Tensor] = field(default_factory=dict)
    scattered: torch.Tensor | None = None


class Collectives:
    """Collectives over flat tensors that are cut into N equal chunks, one for each owner.

    `unit_names` names units, by index, in errors. At most one reduction is under way at a time, or as many as
    are wanted where `concurrent`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        staging_bytes: int,
        transport: Transport = "auto",
        ordered: bool = False,
        divergence_check: DivergenceCheck = "always",
        timeout_s: float = 600.0,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised: call init_process_group first, also for one process"
            )
        chosen = group if group is not None else dist.group.WORLD
        assert chosen is not None, "torch.distributed is initialised"
        self.group: dist.ProcessGroup = chosen
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.native = self.on_gpu and not ordered
        """Whether sums are NCCL's own, in its order."""
        self.ledger = Ledger()
        self.unit_names: Sequence[str] = ()
        self.steps = 0
        """Finished steps of this object's life; `divergence_check="first"` looks at it."""
        self._check: DivergenceCheck = "off" if self.on_gpu else divergence_check
        self._timeout_s = timeout_s
        self._told = self._finished = 0
        self._aborted = False
        self._arena: SharedArena | None = None
        self._block: Arena | None = None
        self._near: dict[int, LocalLink] = {}
        if transport == "auto" and not self.on_gpu and self.world_size > 1:
            arena = SharedArena()
            self._near = connect(self.group, arena, self._names, timeout_s=timeout_s)
            if self._near:
                self._arena = arena
            else:
                arena.close()
        self._far = {
            peer: RemoteNotices(Agreement(self.rank, peer, self._names), self.group, timeout_s=timeout_s)
            for peer in range(self.world_size)
            if peer != self.rank and peer not in self._near
        }
        self._gathers = self.group
        if self.on_gpu and self.world_size > 1:
            # A communicator, and so a stream, of its own: gathers do not queue behind reductions.
            ranks = dist.get_process_group_ranks(self.group)
            self._gathers = dist.new_group(ranks, use_local_synchronization=True)
        self.staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)

    @property
    def concurrent(self) -> bool:
        """Whether reductions need nothing that they would have to share: all ranks are on this host."""
        return not self._far and not self.on_gpu

    def reserve(self, size: int) -> None:
        """Let the next `size` bytes that are allocated lie in one block."""
        if self._arena is not None:
            self._arena.reserve(size)
        else:
            self._block = Arena(size, self.device)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] zeros that can be reduced and gathered: where ranks on this host can read them."""
        if self._arena is not None:
            return self._arena.allocate(numel, dtype)
        if self._block is not None and self._block.has_room(numel, dtype):
            return self._block.take(numel, dtype).zero_()
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def allocate_private(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel], uninitialised, that only this rank reads."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def allocate_host(self, size: int) -> torch.Tensor:
        """[size] uint8 zeros in host memory, where ranks on this host can read them."""
        if self._arena is not None:
            return self._arena.allocate(size, torch.uint8)
        return torch.zeros(size, dtype=torch.uint8)

    @property
    def shares_memory(self) -> bool:
        """Whether what is allocated lies where other ranks can read it."""
        return self._arena is not None

    def is_near(self, peer: int) -> bool:
        """Whether that rank's memory can be read."""
        return peer in self._near

    def memory_of(self, peer: int, tag: int, size: int) -> tuple[torch.Tensor, SharedMemory]:
        """[size] uint8: what a rank on this host has published under `tag`; it outlives that rank."""
        link = self._near[peer]
        where = link.published[tag]
        found = link.memory.tensor(where, size, torch.uint8)
        return found, link.memory.handle(where, found)

    def shared_memory(self) -> SharedMemory | None:
        """The memory of this rank's that others on this host can read, if there is such."""
        return None if self._arena is None else self._arena.handle()

    def publish(self, parts: Mapping[int, torch.Tensor]) -> None:
        """Tell the ranks on this host where what they read of this rank lies, by unit. Collective."""
        if self.world_size == 1 or self.on_gpu:
            return
        mine = {} if self._arena is None else {tag: self._arena.offset(part) for tag, part in parts.items()}
        table = self.gather_objects(mine)
        for peer, link in self._near.items():
            link.published = table[peer]

    def gather_objects(self, mine: _Object) -> list[_Object]:
        """Every rank's object, by rank; while the engine is built."""
        table = [mine] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(table, mine, group=self.group)
        return table

    # -- reductions -------------------------------------------------------------------------------

    def begin_reduce(
        self,
        full: torch.Tensor,
        chunk: int,
        numel: int,
        total: GradientSum,
        *,
        active: int,
        tag: int,
    ) -> Exchange:
        """Start to bring the first `active` ranks' `full` tensors to their owners.

        full: [world_size * chunk] or longer, compute dtype; elements from `numel` on are padding. A rank at
        or beyond `active` contributes nothing, whatever its `full` holds. `tag` is the unit's index.
        """
        assert total.owned.numel() == self._owned(chunk, numel, self.rank), "exactly the owned elements"
        exchange = Exchange(full, chunk, numel, total, active, tag)
        with self.ledger.timed("reduce", tag):
            if self.native:
                self._begin_native(exchange)
            else:
                where = self._arena.offset(full) if self._arena is not None and self.rank < active else 0
                self._announce(Notice(Kind.REDUCE, tag, numel, where), at_once=True)
                exchange.announced = self._told
                self._post(exchange, 0)
        return exchange

    def catch_up(self) -> None:
        """Take in what ranks on this host have announced by now; never waits."""
        with self.ledger.timed("reduce"):
            for link in self._near.values():
                link.catch_up(self._told)

    def is_ready(self, exchange: Exchange) -> bool:
        """Whether `finish_reduce` need not wait, as far as is known; False where data travel."""
        heard = all(link.heard >= exchange.announced for link in self._near.values())
        return heard and self.concurrent

    def read_by_all(self, exchange: Exchange) -> bool:
        """Of a reduction that this rank has finished: whether nobody reads this rank's `full` any more.

        Ranks on this host tell, with every notice, what they have finished. What is sent has left when the
        sender has finished.
        """
        return all(link.finished >= exchange.announced for link in self._near.values())

    def finish_reduce(self, exchange: Exchange) -> None:
        """Wait for the contributions and add this rank's part of each up in `total`, in rank order.

        Reductions are finished in the order in which they were begun.
        """
        with self.ledger.timed("reduce", exchange.tag):
            if self.native:
                self._finish_native(exchange)
            else:
                self._finish_exchange(exchange)
            exchange.total.end_exchange(exchange.active)
            self._finished = exchange.announced

    # -- gatherings -------------------------------------------------------------------------------

    def begin_gather(
        self, full: torch.Tensor, chunk: int, numel: int, *, kind: str, tag: int, active: int | None = None
    ) -> Pending:
        """Start to fill `full` ([world_size * chunk] or longer): each owner's own part is already there.

        Only the first `active` ranks (default: all) receive. Owners' published parts must not change until
        the next fence or exchange of numbers, and what they hold must have been fenced off before.
        Give the result to `finish_gather` before `full` is read.
        """
        works: Pending = []
        if self.world_size == 1:
            return works
        with self.ledger.timed("gather", tag):
            if self.on_gpu:
                own = full[self.rank * chunk : (self.rank + 1) * chunk]
                works.append(
                    _all_gather(full[: self.world_size * chunk], own, group=self._gathers, async_op=True)
                )
                self.ledger.count(kind, "network", (self.world_size - 1) * own.numel() * own.element_size())
                return works
            self._announce(Notice(Kind.GATHER, tag, numel), at_once=False)
            receivers = self.world_size if active is None else active
            own = self._part(full, chunk, numel, self.rank)
            for peer in self._peers():
                theirs = self._part(full, chunk, numel, peer)
                receives = self.rank < receivers and theirs.numel() > 0
                link = self._near.get(peer)
                if link is None:
                    if peer < receivers and own.numel():
                        works.append(self._send(own, peer, kind, tag))
                    if receives:
                        works.append(dist.irecv(theirs, group=self.group, group_src=peer, tag=tag))
                    continue
                if peer < receivers:
                    self.ledger.count(kind, "shared", own.numel() * own.element_size())
                if receives:
                    theirs.copy_(link.memory.tensor(link.published[tag], theirs.numel(), full.dtype))
        return works

    def finish_gather(self, works: Pending) -> None:
        """Wait until the gathered tensor is whole."""
        if works:
            with self.ledger.timed("gather"):
                self._wait(works)

    def gather_from_owners(
        self, full: torch.Tensor, chunk: int, numel: int, *, kind: str, tag: int, active: int | None = None
    ) -> None:
        """Fill `full`, wherever it lies, on the first `active` ranks (default: all); not meant for a step."""
        if self.on_gpu:
            self.finish_gather(self.begin_gather(full, chunk, numel, kind=kind, tag=tag))
            return
        with self.ledger.within("gather", tag):
            self._meet(Notice(Kind.ACCESS, tag, numel))
            receivers = self.world_size if active is None else active
            own = self._part(full, chunk, numel, self.rank)
            works: Pending = []
            for peer in self._peers():
                if peer < receivers and own.numel():
                    works.append(self._send(own, peer, kind, tag))
                theirs = self._part(full, chunk, numel, peer)
                if self.rank < receivers and theirs.numel():
                    works.append(dist.irecv(theirs, group=self.group, group_src=peer, tag=tag))
            self._wait(works)

    def fence(self) -> None:
        """Wait until every rank on this host has come here: what was written may be read, and the reverse."""
        if self._near:
            with self.ledger.timed("control"):
                self._tell_near(Notice(Kind.FENCE), at_once=True)
                self._hear_near()

    # -- small and rare ---------------------------------------------------------------------------

    def gather_numbers(
        self, values: Sequence[float], *, purpose: Purpose = Purpose.OUTCOME
    ) -> list[list[float]]:
        """Every rank's few fp64 numbers, a row for each rank; equally many, for the same purpose."""
        row = [float(value) for value in values]
        if self.world_size == 1:
            return [row]
        with self.ledger.timed("control"):
            if self.on_gpu:
                mine = torch.tensor(row, dtype=torch.float64, device=self.device)
                table = torch.empty(self.world_size * len(row), dtype=torch.float64, device=self.device)
                _all_gather(table, mine, group=self.group)
                self.ledger.count("control", "network", (self.world_size - 1) * 8 * len(row))
                rows: list[list[float]] = table.view(self.world_size, -1).tolist()
                return rows
            return self._exchange_rows(row, purpose)

    def sum_in_rank_order(
        self, values: Sequence[float], *, purpose: Purpose = Purpose.OUTCOME
    ) -> tuple[float, ...]:
        """Sum a few fp64 numbers over ranks, in rank order, so that all ranks get the same bits."""
        rows = self.gather_numbers(values, purpose=purpose)
        return tuple(sum(column) for column in zip(*rows, strict=True))

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Copy rank `source`'s tensor to all ranks, in place; used outside of steps."""
        if self.world_size > 1:
            with self.ledger.within("broadcast"):
                if not self.on_gpu:
                    self._meet(Notice(Kind.BROADCAST, numel=tensor.numel()))
                dist.broadcast(tensor, group_src=source, group=self.group)
            if self.rank == source:
                size = (self.world_size - 1) * tensor.numel() * tensor.element_size()
                self.ledger.count("broadcast", "network", size)

    def abort(self) -> None:
        """From any thread: a rank that waits for another on this host fails now, with PeerLostError."""
        self._aborted = True
        for link in list(self._near.values()):
            link.abort()

    def check(self) -> None:
        """Raises PeerLostError if the group was aborted: what is computed now would be of no use."""
        if self._aborted:
            raise PeerLostError(f"the group of rank {self.rank} was aborted")

    def close(self) -> None:
        """Leave the group: ranks on this host that wait for this one fail at once."""
        if self._gathers is not self.group:
            dist.destroy_process_group(self._gathers)
            self._gathers = self.group
        for link in self._near.values():
            link.abort()
            link.close()
        self._near.clear()
        self._far.clear()
        if self._arena is not None:
            self._arena.close()

    # -- within -----------------------------------------------------------------------------------

    def _announce(self, notice: Notice, *, at_once: bool) -> None:
        """Tell the others what comes; with ranks on other hosts compare before any of their data move."""
        self._tell_near(notice, at_once=at_once)
        if self._check == "always" or (self._check == "first" and self.steps < _FIRST_STEPS):
            for far in self._far.values():
                self.ledger.count("control", "network", far.tell(notice))
            for far in self._far.values():
                far.hear()

    def _tell_near(self, notice: Notice, *, at_once: bool) -> None:
        self._told += 1
        told = replace(notice, finished=self._finished)
        for link in self._near.values():
            link.tell(told, at_once=at_once)

    def _hear_near(self) -> None:
        for link in self._near.values():
            link.hear(self._told)

    def _meet(self, notice: Notice) -> None:
        """Wait until all ranks have announced the same."""
        self._announce(notice, at_once=True)
        self._hear_near()

    def _exchange_rows(self, row: list[float], purpose: Purpose) -> list[list[float]]:
        notice = Notice(Kind.NUMBERS, unit=purpose, numel=len(row), row=tuple(row))
        self._announce(notice, at_once=True)
        rows = {self.rank: row}
        mine = torch.tensor(row, dtype=torch.float64)
        incoming = {peer: torch.empty_like(mine) for peer in self._far}
        if row:
            works = [self._send(mine, peer, "control", 0) for peer in self._far]
            works += [dist.irecv(t, group=self.group, group_src=p, tag=0) for p, t in incoming.items()]
            self._wait(works)
        rows |= {peer: tensor.tolist() for peer, tensor in incoming.items()}
        for peer, link in self._near.items():
            link.hear(self._told)
            rows[peer] = list(link.row)
            self.ledger.count("control", "shared", 8 * len(row))
        return [rows[rank] for rank in range(self.world_size)]

    def _begin_native(self, exchange: Exchange) -> None:
        full = exchange.full[: self.world_size * exchange.chunk]
        if self.rank >= exchange.active:
            full.zero_()
        if self.world_size == 1:
            exchange.scattered = full
            return
        exchange.scattered = torch.empty(exchange.chunk, dtype=full.dtype, device=full.device)
        exchange.posted = [_reduce_scatter(exchange.scattered, full, group=self.group, async_op=True)]
        size = (self.world_size - 1) * exchange.chunk * full.element_size()
        self.ledger.count("reduce", "network", size)

    def _finish_native(self, exchange: Exchange) -> None:
        self._wait(exchange.posted)
        owned = exchange.total.owned.numel()
        if owned:
            assert exchange.scattered is not None
            exchange.total.absorb(0, [exchange.scattered[:owned]])

    def _post(self, exchange: Exchange, offset: int) -> None:
        """Start one piece from `offset` of the chunk on: send far owners their part, receive this rank's."""
        full, chunk, numel = exchange.full, exchange.chunk, exchange.numel
        piece = self._piece(full.element_size())
        own = self._part(full, chunk, numel, self.rank)[offset : offset + piece]
        room = self.staging[: self.staging.numel() // full.element_size() * full.element_size()]
        room = room.view(full.dtype)
        messages = []
        for index, peer in enumerate(self._far):
            if peer < exchange.active and own.numel():
                place = room[index * piece : index * piece + own.numel()]
                exchange.received[peer] = place
                messages.append(self._message(dist.irecv, place, peer, exchange.tag))
        for peer in self._peers() if self.rank < exchange.active else ():
            theirs = self._part(full, chunk, numel, peer)
            if peer in self._far:
                theirs = theirs[offset : offset + piece]
                if theirs.numel():
                    self.ledger.count("reduce", "network", theirs.numel() * theirs.element_size())
                    messages.append(self._message(dist.isend, theirs, peer, exchange.tag))
            elif offset == 0:
                self.ledger.count("reduce", "shared", theirs.numel() * theirs.element_size())
        if messages:
            # As one batch: NCCL knows no tags, and messages that are not grouped wait for each other.
            exchange.posted += dist.batch_isend_irecv(messages)

    def _message(
        self, operation: Callable[..., Any], tensor: torch.Tensor, peer: int, tag: int
    ) -> dist.P2POp:
        return dist.P2POp(operation, tensor, group=self.group, tag=tag, group_peer=peer)

    def _finish_exchange(self, exchange: Exchange) -> None:
        """Piece by piece where some come over the network; near ranks' parts are read where they lie."""
        mine = self._part(exchange.full, exchange.chunk, exchange.numel, self.rank)
        near: dict[int, torch.Tensor] = {}
        for peer, link in self._near.items():
            link.hear(exchange.announced)
            where = link.contributions.pop(exchange.announced)
            if peer < exchange.active and mine.numel():
                start = where + self.rank * exchange.chunk * mine.element_size()
                near[peer] = link.memory.tensor(start, mine.numel(), mine.dtype)
        piece = self._piece(mine.element_size()) if self._far else max(1, exchange.chunk)
        for offset in range(0, exchange.chunk, piece):
            if offset:
                self._post(exchange, offset)
            self._wait(exchange.posted)
            exchange.posted.clear()
            own = mine[offset : offset + piece]
            if own.numel():
                parts = {peer: part[offset : offset + piece] for peer, part in near.items()}
                parts |= exchange.received
                if self.rank < exchange.active:
                    parts[self.rank] = own
                exchange.total.absorb(offset, [parts[rank] for rank in sorted(parts)])
            exchange.received.clear()

    def _piece(self, item_bytes: int) -> int:
        """Elements that every far rank may send at a time: they lie side by side in the staging buffer."""
        room = max(1, self.staging.numel() // (max(1, len(self._far)) * item_bytes))
        return room // RUN * RUN or room

    def _wait(self, works: Pending) -> None:
        if not self.on_gpu:
            wait_for(works, timeout_s=self._timeout_s)
            return
        for work in works:
            assert work is not None, "this rank belongs to its own group"
            work.wait()  # the stream waits; with a timeout the host would

    def _send(self, tensor: torch.Tensor, peer: int, kind: str, tag: int) -> "dist.Work | None":
        self.ledger.count(kind, "network", tensor.numel() * tensor.element_size())
        return dist.isend(tensor, group=self.group, group_dst=peer, tag=tag)

    def _peers(self) -> Iterator[int]:
        """The other ranks, starting from the next one, so that not all talk to rank 0 first."""
        for step in range(1, self.world_size):
            yield (self.rank + step) % self.world_size

    def _names(self) -> Sequence[str]:
        return self.unit_names

    @staticmethod
    def _owned(chunk: int, numel: int, rank: int) -> int:
        return max(0, min(chunk, numel - rank * chunk))

    def _part(self, full: torch.Tensor, chunk: int, numel: int, rank: int) -> torch.Tensor:
        return full[rank * chunk : rank * chunk + self._owned(chunk, numel, rank)]
