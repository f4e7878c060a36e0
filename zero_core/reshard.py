"""A new group of ranks takes the state of training over from what its members hold of an old one.

Owns the handover itself: participants tell each other what they hold, all compute the same plan, and the
ranges that a rank lacks go straight from the old place to the final one: read where they lie by a process of
the same host, sent point to point to one of another. A wanted resize and
the recovery from a loss are the same thing here; what differs is who still holds what. Which state is taken,
and what moves, is decided in `moving`; this module knows nothing of why the group changed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zero_core import usage
from zero_core.engine import ZeroEngine
from zero_core.errors import PeerLostError, ReshardError, UsageError
from zero_core.handing import DescriptorServer, fetch
from zero_core.links import host_identity, wait_for
from zero_core.moving import Form, Key, Meta, Plan, Transfer, holds, plan
from zero_core.sharing import PeerMemory, SharedMemory
from zero_core.snapshot import Snapshot, form_of

__all__ = ["Resharded", "plan", "take_over"]

_TAG = 1 << 29
"""Message n of a handover carries the tag _TAG + n; no other message of the engine has one of these."""

_Object = TypeVar("_Object")


@dataclass(frozen=True, slots=True)
class Resharded:
    """What a handover did.

    step, generation  of the state that was taken over: finished steps, and the group that computed the last
    bytes_received  by this rank
    bytes_moved     between participants, in all; what a rank copied within its own memory is not counted
    bytes_needed    what the new ranks did not hold of what they need: the least that could be moved
    replica_ranks   old ranks whose part came from a replica
    seconds         of this participant, by phase: agree, move, end
    """

    step: int
    generation: int
    bytes_received: int
    bytes_moved: int
    bytes_needed: int
    replica_ranks: tuple[int, ...]
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Told:
    """What a participant says of itself.

    form    what its new engine's states look like; None if it leaves
    step    its new engine's `step_under_way`
    host    the same for participants that can read each other's memory
    server  name and token of who gives the descriptors of its memory away
    places  of each snapshot, for what lies in shared memory: the number of the descriptor, and the byte at
            which the held range begins
    """

    form: Form | None
    step: tuple[bool, bool]
    timeout_s: float
    metas: tuple[Meta, ...]
    host: str
    server: tuple[str, bytes] | None
    places: tuple[dict[Key, tuple[int, int]], ...]


def take_over(
    engine: ZeroEngine | None, held: Sequence[Snapshot], *, group: dist.ProcessGroup, floor_step: int = 0
) -> Resharded:
    """Fill the new group's engines with the newest state that all participants together hold.

    engine  this rank's, built `blank`; None on a rank that leaves and only gives. The first ranks of `group`
            are those of the new engines, in order; those that leave come after them
    held    what this process holds: earlier engines' `snapshots()`. They are only read

    Collective over `group`. When it returns, every new rank has all it needs and `held` may be dropped; with
    replicas, only after `engine.replicated_step` is set: they are made with the first step. After
    an error but NothingHeldError add `engine.snapshots()` to `held`, and try again in another group.

    Raises, on every rank and with nothing written: UsageError where a new engine is within a step (one that
    failed is forgotten: see `ZeroEngine.begin_filling`), NothingHeldError where no state of `floor_step` or
    a later step is covered, ReshardError where snapshots are of another model, precision or optimizer.
    ReshardError where a rank failed, PeerLostError where one was lost.
    """
    began = time.perf_counter()
    me = dist.get_rank(group)
    if engine is not None and engine.rank != me:
        raise UsageError(
            f"rank {engine.rank} of the new group is number {me} of those who take part: they differ"
        )
    held = [snapshot.current() for snapshot in held]
    descriptors, places = _places_of(held)
    with ExitStack() as stack:
        server = DescriptorServer(descriptors) if descriptors else None
        if server is not None:
            stack.callback(server.close)
        address = None if server is None else (server.name, server.token)
        metas = tuple(snapshot.meta for snapshot in held)
        table = _tell(_Told(*_about(engine), metas, host_identity(), address, places), group)
        new = _new_form(table)
        usage.abandons(_steps(table))  # refuses, before anything is written
        chosen = plan([told.metas for told in table], new, floor_step=floor_step)
        agreed = time.perf_counter()
        move = _Move(engine, held, new, chosen, group, table)
        stack.callback(move.close)
        failure = move.carry_out()
        moved = time.perf_counter()
        _finish(failure, group)
    if engine is not None:
        move.take_buffers()
        if new.stage in (1, 2) and not chosen.whole:
            engine.refresh_parameters()
    ended = time.perf_counter()
    return Resharded(
        step=chosen.state.step,
        generation=chosen.state.generation,
        bytes_received=move.bytes_received,
        bytes_moved=chosen.bytes_moved,
        bytes_needed=chosen.bytes_needed,
        replica_ranks=chosen.replica_ranks,
        seconds={"agree": agreed - began, "move": moved - agreed, "end": ended - moved},
    )


class _Move:
    """One participant's part in carrying out a plan."""

    def __init__(
        self,
        engine: ZeroEngine | None,
        held: Sequence[Snapshot],
        form: Form,
        chosen: Plan,
        group: dist.ProcessGroup,
        table: Sequence[_Told],
    ) -> None:
        self._table = table
        self._engine = engine
        self._held = held
        self._form = form
        self._plan = chosen
        self._group = group
        self._timeout_s = table[0].timeout_s
        self._me = dist.get_rank(group)
        self._places: Snapshot | None = None
        self._memory = None if engine is None else engine.collectives.shared_memory()
        self._buffers: dict[str, torch.Tensor] = {}
        self._mapped: dict[int, list[PeerMemory]] = {}
        self.bytes_received = 0

    def carry_out(self) -> Exception | None:
        """Send, receive and copy; a failure is returned, so that all can be told of it."""
        try:
            if self._engine is not None:
                self._places = self._engine.begin_filling(_steps(self._table))
            messages = [*self._ranges(), *self._buffer_messages()]
            works: list[dist.Work | None] = list(dist.batch_isend_irecv(messages)) if messages else []
            for transfer in self._plan.transfers:
                if transfer.target != self._me:
                    continue
                if transfer.source == self._me:
                    self._copy(transfer, self._source(transfer))
                elif self._is_near(transfer):
                    source = self._read(transfer)
                    self.bytes_received += source.numel() * source.element_size()
                    self._copy(transfer, source)
            wait_for(works, timeout_s=self._timeout_s)
            if self._engine is not None:
                self._engine.filled(
                    step=self._plan.state.step,
                    updates=self._plan.updates,
                    gate=self._plan.gate,
                    state=self._plan.state,
                    whole=self._plan.whole,
                )
        except Exception as error:
            return error
        return None

    @torch.no_grad()
    def take_buffers(self) -> None:
        """Last of all: a module that goes on still has the old ones, which may be needed again until then."""
        assert self._places is not None
        for name, buffer in self._buffers.items():
            self._places.buffers[name].copy_(buffer)

    def _ranges(self) -> Iterator[dist.P2POp]:
        """All messages of this rank; the number of a transfer in the plan tells one from the other."""
        for number, transfer in enumerate(self._plan.transfers):
            if self._me not in (transfer.source, transfer.target) or self._is_near(transfer):
                continue
            if transfer.target == self._me:
                yield self._receive(self._target(transfer), transfer.source, number)
            else:
                yield self._message(dist.isend, self._source(transfer), transfer.target, number)

    def _buffer_messages(self) -> Iterator[dist.P2POp]:
        """One rank's buffers for all of the new group; each is received aside."""
        source, number = self._plan.buffers_from
        names = [name for name, _ in self._form.buffers]
        first = len(self._plan.transfers)
        if source == self._me:
            mine = self._held[number].buffers
            if self._places is not None:
                self._buffers = {name: mine[name] for name in names}
            for target in range(self._form.layout.world_size):
                if target != source:
                    for index, name in enumerate(names):
                        yield self._message(dist.isend, _bytes_of(mine[name]), target, first + index)
        elif self._places is not None:
            self._buffers = {
                name: torch.empty_like(self._places.buffers[name]).contiguous() for name in names
            }
            for index, name in enumerate(names):
                yield self._receive(_bytes_of(self._buffers[name]), source, first + index)

    def close(self) -> None:
        """Let go of other processes' memory."""
        for memories in self._mapped.values():
            for memory in memories:
                memory.close()
        self._mapped.clear()

    def _is_near(self, transfer: Transfer) -> bool:
        """Whether the target reads the range where it lies: its own, or another process's of its host."""
        if transfer.source == transfer.target:
            return True
        source, target = self._table[transfer.source], self._table[transfer.target]
        return source.host == target.host and (transfer.unit, transfer.kind) in source.places[transfer.held]

    def _read(self, transfer: Transfer) -> torch.Tensor:
        """The range in the memory of a source on this host."""
        told = self._table[transfer.source]
        if transfer.source not in self._mapped:
            assert told.server is not None
            descriptors = fetch(*told.server)
            self._mapped[transfer.source] = [PeerMemory(descriptor) for descriptor in descriptors]
        number, offset = told.places[transfer.held][transfer.unit, transfer.kind]
        first, _ = holds(told.metas[transfer.held])[transfer.unit, transfer.kind]
        dtype = self._target(transfer).dtype
        memory = self._mapped[transfer.source][number]
        return memory.tensor(
            offset + (transfer.start - first) * dtype.itemsize, transfer.stop - transfer.start, dtype
        )

    def _copy(self, transfer: Transfer, source: torch.Tensor) -> None:
        """Bring a range to its place: memory that nobody has touched yet."""
        if self._memory is None:
            self._target(transfer).copy_(source)
        else:
            self._memory.fill(self._target(transfer), source)

    def _source(self, transfer: Transfer) -> torch.Tensor:
        snapshot = self._held[transfer.held]
        return snapshot.place(transfer.unit, transfer.kind, transfer.start, transfer.stop)

    def _target(self, transfer: Transfer) -> torch.Tensor:
        assert self._places is not None
        return self._places.place(transfer.unit, transfer.kind, transfer.start, transfer.stop)

    def _receive(self, place: torch.Tensor, source: int, number: int) -> dist.P2POp:
        self.bytes_received += place.numel() * place.element_size()
        return self._message(dist.irecv, place, source, number)

    def _message(
        self, operation: Callable[..., Any], tensor: torch.Tensor, peer: int, number: int
    ) -> dist.P2POp:
        return dist.P2POp(operation, tensor, group=self._group, tag=_TAG + number, group_peer=peer)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes] uint8: a buffer of any shape and dtype as it travels; a view where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _places_of(held: Sequence[Snapshot]) -> tuple[list[int], tuple[dict[Key, tuple[int, int]], ...]]:
    """The descriptors of the memory that snapshots lie in, and where in it what they hold begins."""
    memories: list[SharedMemory] = []
    places: list[dict[Key, tuple[int, int]]] = []
    for snapshot in held:
        found: dict[Key, tuple[int, int]] = {}
        if snapshot.memory is not None and snapshot.step >= 0:
            if snapshot.memory not in memories:
                memories.append(snapshot.memory)
            number = memories.index(snapshot.memory)
            for (unit, kind), (start, stop) in holds(snapshot.meta).items():
                offset = snapshot.memory.offset(snapshot.place(unit, kind, start, stop))
                if offset is not None:
                    found[unit, kind] = number, offset
        places.append(found)
    return [memory.descriptor for memory in memories], tuple(places)


def _about(engine: ZeroEngine | None) -> tuple[Form | None, tuple[bool, bool], float]:
    if engine is None:
        return None, (False, False), 0.0
    form = form_of(engine.module, engine.layout, engine.config)
    return form, engine.step_under_way, engine.config.collective_timeout_s


def _steps(table: Sequence[_Told]) -> list[tuple[bool, bool]]:
    return [told.step for told in table if told.form is not None]


def _new_form(table: Sequence[_Told]) -> Form:
    """What the new engines look like, which are the first so many participants."""
    first = table[0].form
    if first is None:
        raise ReshardError("participant 0 has no new engine: the ranks of the new group come first")
    engines = [number for number, told in enumerate(table) if told.form is not None]
    if engines != list(range(first.layout.world_size)):
        raise ReshardError(
            f"participants {engines} have an engine, of a group of {first.layout.world_size}: its ranks come "
            "first, in order, and all others leave"
        )
    return first


def _finish(failure: Exception | None, group: dist.ProcessGroup) -> None:
    """Learn that every participant has what it needs, and has given what it was asked for."""
    if isinstance(failure, PeerLostError):
        raise failure  # nobody can be told over a broken group
    outcomes = _tell(None if failure is None else repr(failure), group)
    if failure is not None:
        raise ReshardError(
            f"taking over failed on participant {dist.get_rank(group)}: {failure!r}"
        ) from failure
    failed = {number: outcome for number, outcome in enumerate(outcomes) if outcome is not None}
    if failed:
        raise ReshardError(f"taking over failed on participants {failed}: see their errors")


def _tell(mine: _Object, group: dist.ProcessGroup) -> list[_Object]:
    """Every participant's object. Raises PeerLostError where one is gone."""
    table = [mine] * dist.get_world_size(group)
    try:
        dist.all_gather_object(table, mine, group=group)
    except RuntimeError as error:
        raise PeerLostError(
            f"a participant was lost, or the group was aborted, during a handover ({error}): try again among "
            "those that are left"
        ) from error
    return table
