"""Copies of the owned states in the memory of another rank, so that a lost rank costs at most one step.

After an update a rank copies its masters and moments into one of two slots. Where the rank that keeps its
replica runs on the same host, the slots lie in memory that both have mapped: one copy serves both, and it is
still there when its owner has been killed. Elsewhere the slot is sent while the next step goes on. A copy is
complete everywhere once the next step's numbers have been exchanged; until then the other slot holds the one
before.

Owns who keeps whose replica, what is copied and its way to the keeper; how it lies there is the business of
`slots`. Knows nothing of steps, nor of what becomes of a snapshot. Where all ranks hold all (stage 0) only
buffers are copied.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from zero_core import budget
from zero_core.collectives import Collectives
from zero_core.config import ZeroConfig
from zero_core.links import host_identity, wait_for
from zero_core.moving import MODEL, Form, StateId
from zero_core.optimizer import UnitStates
from zero_core.slots import FROZEN, Region, Slot, arrange
from zero_core.snapshot import Snapshot, Standing, held_states, persistent_buffers
from zero_core.units import FlatUnit

REGION = -1
"""Under this number, beside those of units, a rank publishes where its slots lie."""

_TAG = 1 << 28
_CLOSING_S = 1.0
"""Longest wait for copies under way when an engine is given up."""


def keepers(hosts: Sequence[str]) -> list[int]:
    """Which rank keeps each rank's replica; `hosts` has each rank's host.

    The next rank on one host. With several, a rank on another host, so that no host takes an owner and its
    replica along: each keeps one where no host has more than half of the ranks, else as few as there can be.
    """
    world, names = len(hosts), sorted(set(hosts), key=hosts.index)
    order = [rank for name in names for rank in range(world) if hosts[rank] == name]
    most = max(hosts.count(name) for name in names)
    found = [0] * world
    if len(names) == 1 or 2 * most <= world:
        shift = 1 if len(names) == 1 else most
        for place, rank in enumerate(order):
            found[rank] = order[(place + shift) % world]
        return found
    crowded = next(name for name in names if hosts.count(name) == most)
    inside = [rank for rank in order if hosts[rank] == crowded]
    outside = [rank for rank in order if hosts[rank] != crowded]
    for here, there in ((inside, outside), (outside, inside)):
        for place, rank in enumerate(here):
            found[rank] = there[place % len(there)]
    return found


class Replicas:
    """One rank's slots, and the replicas it keeps of others. Collective where ranks of other hosts take part.

    Built when all else is allocated; `connect` follows once places have been published.
    """

    def __init__(
        self,
        module: nn.Module,
        collectives: Collectives,
        form: Form,
        config: ZeroConfig,
        states: Sequence[UnitStates],
        units: Sequence[FlatUnit],
    ) -> None:
        self._collectives = collectives
        self._config = config
        self._states = states
        self._form = form
        names = [name for name, _ in self._form.buffers]
        self._owners = [(name, module.get_submodule(name.rpartition(".")[0])) for name in names]
        self._alike = persistent_buffers(module)
        hosts = collectives.gather_objects(host_identity())
        by_keeper = keepers(hosts)
        self._keeper = by_keeper[collectives.rank]
        self._kept_ranks = [rank for rank, keeper in enumerate(by_keeper) if keeper == collectives.rank]
        self._group = collectives.group
        if collectives.on_gpu:  # slots are in host memory, which NCCL cannot send
            ranks = dist.get_process_group_ranks(self._group)
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._frozen = {
            (held.unit, held.kind): (held.start, held.tensor.detach())
            for held in held_states(states, units, whole_replicas=True)
            if held.kind == MODEL
        }
        arrangement = arrange(form, config, collectives.rank, self._alike)
        self.memory = collectives.allocate_host(arrangement.bytes)
        self._shared = collectives.shared_memory()
        self._own = Region(
            form,
            collectives.rank,
            arrangement,
            self.memory,
            replica=False,
            buffers=self._alike,
            own=self._frozen,
            shared=self._shared,
        )
        self._copies = self._runs()
        self._kept: dict[int, Region] = {}
        self._kept_bytes = 0
        self._turn = 0
        self._edits = 0
        self._under_way: list[dist.Work | None] = []
        self._newest: int | None = None
        self.committed: int | None = None
        """The last step that all ranks and their keepers hold."""

    @property
    def held_bytes(self) -> int:
        """This rank's slots, and those of others that are not mapped but kept here."""
        return self.memory.numel() + self._kept_bytes

    @property
    def far_ranks(self) -> list[int]:
        """Whose replicas take memory of this rank's own."""
        return [rank for rank in self._kept_ranks if not self._collectives.is_near(rank)]

    def connect(self) -> None:
        """Map the slots of ranks on this host, and make room for those of others."""
        for rank in self._kept_ranks if self._form.stage else ():
            arrangement = arrange(self._form, self._config, rank, self._alike)
            if self._collectives.is_near(rank):
                memory, shared = self._collectives.memory_of(rank, REGION, arrangement.bytes)
            else:
                memory, shared = torch.zeros(arrangement.bytes, dtype=torch.uint8), None
                self._kept_bytes += arrangement.bytes
            self._kept[rank] = Region(
                self._form,
                rank,
                arrangement,
                memory,
                replica=True,
                buffers=self._alike,
                own={},
                shared=shared,
            )

    def due(self, step: int) -> bool:
        return step % self._config.replica_every_steps == 0

    @torch.no_grad()
    def replicate(self, standing: Standing, *, edited: bool) -> None:
        """Copy the state into a slot and begin to send it; `edited`: what is frozen may be other, too."""
        self.settle()
        with self._collectives.ledger.timed("replica"):
            turn, self._turn = self._turn, 1 - self._turn
            self._edits += edited
            slot = self._own.slots[turn]
            slot.open()
            for number in range(len(self._copies)):
                self._copy(number, slot)
            for name, owner in self._owners:
                buffer = owner._buffers[name.rpartition(".")[2]]
                assert buffer is not None
                self._own.arrangement.buffers[name].within(slot.memory).copy_(buffer.reshape(-1))
            slot.close(standing, self._edits)
            if edited and self._own.frozen is not None:
                self._own.frozen.open()
                for key, (_, tensor) in self._frozen.items():
                    self._own.arrangement.frozen[key].within(self._own.frozen.memory).copy_(tensor)
                self._own.frozen.close(standing, self._edits)
            self._own.edits = self._edits
            self._newest = standing.state.step
            if self._form.stage:
                self._post(turn, frozen=edited)

    def settle(self) -> None:
        """Before this rank votes on the next step: what it sends and receives is complete.

        Raises PeerLostError where the other rank is gone.
        """
        if self._under_way:
            with self._collectives.ledger.timed("replica"):
                works, self._under_way = self._under_way, []
                wait_for(works, timeout_s=self._config.collective_timeout_s)
                for region in self._kept.values():
                    region.arrived = [True, True, True]

    def begin_edit(self) -> None:
        """Values are written from outside, frozen units among them: own slots do not fit these any more."""
        if self._frozen:
            self._own.edits = None

    def undo_edit(self) -> None:
        """The former values are back."""
        self._own.edits = self._edits

    def commit(self) -> None:
        """All ranks have voted on the next step, so all have settled."""
        self.committed = self._newest

    def close(self) -> None:
        """Nothing is sent or received any more."""
        with suppress(RuntimeError):
            for work in self._under_way:
                if work is not None:
                    work.wait(timedelta(seconds=_CLOSING_S))
        self._under_way.clear()

    def snapshots(self) -> list[Snapshot]:
        """What own slots hold, and what is kept of others; by reference."""
        if not self._form.stage:
            return []  # of the states there is no copy
        own = [self._own.snapshot(number) for number in range(FROZEN) if self._own.holding(number)]
        kept = [region.snapshot(number) for region in self._kept.values() for number in range(FROZEN)]
        return own + kept

    def buffers_of(self, state: StateId) -> Mapping[str, torch.Tensor] | None:
        """The buffers as they were in that state; the module's own may be further on."""
        for number in range(FROZEN):
            held = self._own.holding(number)
            if held is not None and held.state == state:
                return self._own.buffers(number)
        return None

    # -- within -----------------------------------------------------------------------------------

    def _runs(self) -> list[tuple[torch.Tensor, int]]:
        """What is copied at a time, and where to: pieces that lie in a row, here as there, as one [bytes]."""
        runs: list[tuple[torch.Tensor, int]] = []
        by_unit = {state.unit.index: state for state in self._states}
        for (unit, kind), place in self._own.arrangement.slot.items():
            piece = getattr(by_unit[unit], kind).detach()
            if not piece.numel():
                continue
            if runs:
                before, at = runs[-1]
                gap = piece.data_ptr() - before.data_ptr()
                same = piece.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
                if same and gap == place.offset - at and 0 <= gap - before.numel() < budget.ALIGNMENT_BYTES:
                    length = gap + piece.numel() * piece.element_size()
                    whole = torch.empty(0, dtype=torch.uint8, device=piece.device)
                    whole.set_(before.untyped_storage(), before.storage_offset(), (length,), (1,))
                    runs[-1] = whole, at
                    continue
            runs.append((piece.view(torch.uint8), place.offset))
        return runs

    def _copy(self, number: int, slot: Slot) -> None:
        run, at = self._copies[number]
        target = slot.memory[at : at + run.numel()]
        if self._shared is not None:
            self._shared.fill(target, run)
        else:
            target.copy_(run)

    def _post(self, turn: int, *, frozen: bool) -> None:
        """Send to the keeper and receive from those this rank keeps, where they are on other hosts."""
        near = self._collectives.is_near(self._keeper)
        for part, memory in self._own.parts(turn, frozen=frozen):
            self._collectives.ledger.count("replica", "shared" if near else "network", memory.numel())
            if not near:
                work = dist.isend(memory, group=self._group, group_dst=self._keeper, tag=_TAG + part)
                self._under_way.append(work)
        for rank in self.far_ranks:
            region = self._kept[rank]
            for part, memory in region.parts(turn, frozen=frozen):
                region.arrived[part] = False
                work = dist.irecv(memory, group=self._group, group_src=rank, tag=_TAG + part)
                self._under_way.append(work)
