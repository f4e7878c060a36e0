"""The workers of a job as its controller holds them: places on the cluster, processes, polls.

Owns placement groups, actor handles and the calls under way; nothing here waits, except for the release at
the end, and that is bounded. `round` moves everything on by what has become known since the last one; a
finished call wakes whoever waits for the next. A death is learnt from Ray: a call that never returns fails
when its process is gone. Reports that a killed worker had not handed over yet are lost with it.

Decides nothing: the conductor says who is sought, enrolled and retired.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from workers.actor import THREADS, WorkerActor
from workers.policies import Joiners, Member
from workers.protocol import Assignment, Begun, Failure, Fault, Outcome, Poll, Readiness, Wish
from workers.spec import JobSpec

WARM_UP_TIMEOUT_S = 180.0
"""Longest wait for a placed worker's process to start, import and open the data."""

POLL_WAIT_S = 0.2
"""How long a worker may keep a poll for news; its reports are collected as often."""

_RELEASE_POLL_S = 0.02


Call = ray.ObjectRef[Any]


@dataclass(slots=True, eq=False)
class Handle:
    """One worker, from the request for a place to the end of its process."""

    name: str
    place: PlacementGroup
    actor: ActorHandle[WorkerActor] | None = None
    placed_at: float = 0.0
    readiness: Readiness | None = None
    poll: Poll | None = None
    death: str | None = None
    node_died: bool = False
    """Whether `death` is that of its whole node."""
    # Calls under way, and the last notice collected.
    life: Call | None = None
    preparing: Call | None = None
    polling: Call | None = None
    commands: dict[Call, bool] = field(default_factory=dict)
    """Commands under way, and whether a refusal means that the worker is of no use."""
    aborting: Call | None = None
    told: int = 0
    """The last generation that this worker was told to begin."""
    collected: int = 0
    news: int = -1
    """What the next poll is to be compared with: see `workers.protocol.Poll`."""

    @property
    def fault(self) -> Failure | None:
        """Why the job cannot run on this worker, if it has said so."""
        return self.readiness.failure if self.readiness else None

    @property
    def ready(self) -> bool:
        return self.readiness is not None and self.fault is None and self.death is None

    def calls(self) -> list[Call]:
        single = (self.life, self.preparing, self.polling)
        return [*(call for call in single if call is not None), *self.commands]


class Group:
    """All workers of one job. One thread only.

    members  in rank order
    leavers  of a generation that is being formed: ranks behind the members', to hand over what they hold
    joiners  have no rank yet
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        job_id: str,
        storage: Path,
        first_number: int,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first_number`: workers are called w<number>, and no two of a job's life share a number.

        wake: called from another thread whenever a call to a worker has come to its end.
        """
        self._spec = spec
        self._job_id = job_id
        self._storage = storage
        self._number = first_number
        self._wake = wake
        self._clock = clock
        self._node = ray.get_runtime_context().get_node_id()
        self._fingerprint: dict[str, Any] | None = None
        self._generation = 0
        self.members: list[Handle] = []
        self.leavers: list[Handle] = []
        self.joiners: list[Handle] = []
        self._leaving: list[Handle] = []

    # Who is there

    def counts(self) -> Joiners:
        """The joiners by how far they are."""
        ready = sum(handle.ready for handle in self.joiners)
        placing = sum(handle.actor is None for handle in self.joiners)
        return Joiners(placing=placing, warming=len(self.joiners) - ready - placing, ready=ready)

    @property
    def participants(self) -> list[Handle]:
        """All that have a rank in the current generation, in their order."""
        return [*self.members, *self.leavers]

    def view(self) -> tuple[Member, ...]:
        """The participants as policies see them; outcomes of earlier generations do not show."""
        return tuple(
            Member(
                rank=rank,
                worker=handle.name,
                death=handle.death,
                outcome=self.outcome(handle),
                leaves=rank >= len(self.members),
            )
            for rank, handle in enumerate(self.participants)
        )

    def outcome(self, handle: Handle) -> Outcome | None:
        poll = handle.poll
        return poll.outcome if poll and poll.generation == self._generation else None

    def begun(self) -> tuple[Begun, ...] | None:
        """How each rank began to train in the current generation; None until all of them have."""
        found = [
            handle.poll.begun
            for handle in self.members
            if handle.poll and handle.poll.generation == self._generation and handle.poll.begun
        ]
        return tuple(found) if len(found) == len(self.members) else None

    # Coming and going

    def seek(self, count: int) -> None:
        """Ask the cluster for `count` more places; the workers appear among the joiners."""
        for _ in range(count):
            # A pending placement group is also what an autoscaler sees of the need.
            place = placement_group([self._bundle()])
            self.joiners.append(Handle(name=f"w{self._number}", place=place))
            self._number += 1

    def missing(self) -> dict[str, float]:
        """By how much the cluster's free resources fall short of what joiners still have no place for.

        Empty where the sums would do: then no single node has enough.
        """
        placing = sum(handle.actor is None for handle in self.joiners)
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        short = {name: placing * amount - free.get(name, 0.0) for name, amount in self._bundle().items()}
        return {name: amount for name, amount in short.items() if amount > 0}

    def enrol(self, count: int) -> None:
        """Make the first `count` of members, leavers and ready joiners the members of the next generation.

        Of the others, those that may hold state are to leave with it, and joiners go on joining.
        """
        inside = self.participants
        ready = [joiner for joiner in self.joiners if joiner.ready]
        assert len(inside) + len(ready) >= count, "only as many are enrolled as are ready"
        self.members = [*inside, *ready][:count]
        self.leavers = inside[count:]
        self.joiners = [joiner for joiner in self.joiners if joiner not in self.members]

    def dismiss_leavers(self) -> None:
        """The new members have all that they need."""
        self.retire(self.leavers)

    def _bundle(self) -> dict[str, float]:
        """What one worker takes."""
        resources = self._spec.resources
        bundle: dict[str, float] = {"CPU": resources.cpus}
        if resources.gpus:
            bundle["GPU"] = resources.gpus
        if resources.memory_bytes:
            bundle["memory"] = resources.memory_bytes
        return bundle

    def drop(self, count: int) -> None:
        """Let `count` joiners go, those that have come least far first."""
        by_progress = sorted(self.joiners, key=lambda h: (h.ready, h.actor is not None))
        self.retire(by_progress[:count])

    def retire(self, handles: Iterable[Handle]) -> None:
        """End workers' processes and give their places back. Does not wait: see `release`."""
        for handle in list(handles):
            if handle.actor is not None:
                ray.kill(handle.actor, no_restart=True)
            remove_placement_group(handle.place)
            for held in (self.members, self.leavers, self.joiners):
                if handle in held:
                    held.remove(handle)
            self._leaving.append(handle)

    def release(self, timeout_s: float) -> list[str]:
        """Retire everyone and wait until all processes and places are gone.

        Returns the names of workers that could not be seen to be gone in time.
        """
        self.retire([*self.participants, *self.joiners])
        deadline = self._clock() + timeout_s
        while self._clock() < deadline:
            self._forget_the_gone()
            if not self._leaving:
                return []
            time.sleep(_RELEASE_POLL_S)
        return [handle.name for handle in self._leaving]

    # One generation

    def meet(self, generation: int, *, checkpoint: str | None, floor_step: int) -> None:
        """Have the participants form a generation and its members train. They meet at rank 0's store.

        checkpoint: its folder, for when too little is held; floor_step: its step, 0 without one.
        """
        self._generation = generation
        host = self.members[0].readiness
        assert host is not None, "only the ready are enrolled"
        carries = any(handle.told for handle in self.participants)
        for rank, handle in enumerate(self.participants):
            assert handle.actor is not None
            assignment = Assignment(
                generation=generation,
                rank=rank,
                world_size=len(self.members),
                participants=len(self.participants),
                store=host.store,
                carries=carries,
                checkpoint=checkpoint,
                floor_step=floor_step,
            )
            self._command(handle, handle.actor.begin.remote(assignment), vital=True)
            handle.told = generation

    def ask(self, wish: Wish) -> None:
        """Put a wish to the group's vote; one voter is enough, so rank 0 is told."""
        rank_0 = self.members[0]
        assert rank_0.actor is not None
        self._command(rank_0, rank_0.actor.ask.remote(self._generation, wish), vital=False)

    def abort(self) -> bool:
        """Break the current generation's group at all participants; True once each of them is out of it.

        To be called again until then: a worker may hear of the end of a generation before its beginning.
        """
        inside = [handle for handle in self.participants if self._inside(handle)]
        for handle in inside:
            if handle.aborting is None and handle.actor is not None:
                handle.aborting = handle.actor.abort.remote(self._generation)
                self._command(handle, handle.aborting, vital=False)
        return not inside

    def give_up_on_the_stuck(self, cause: str) -> None:
        """Count participants that are still inside of the current generation as dead."""
        for handle in self.participants:
            if self._inside(handle):
                handle.death = cause

    def _inside(self, handle: Handle) -> bool:
        """Whether a live participant was told to begin the current generation and has not come out of it."""
        return handle.death is None and handle.told == self._generation and self.outcome(handle) is None

    # Progress

    def round(self) -> list[dict[str, Any]]:
        """Take in what has become known; returns the members' new notices of the current generation."""
        for joiner in self.joiners:
            if joiner.actor is None and _state(joiner.place) == "CREATED":
                self._start(joiner)
        everyone = [*self.participants, *self.joiners]
        calls = [call for handle in everyone for call in handle.calls()]
        done = set(ray.wait(calls, num_returns=len(calls), timeout=0)[0]) if calls else set()
        notices: list[dict[str, Any]] = []
        for handle in everyone:
            self._take_life(handle, done)
            self._take_readiness(handle, done)
            notices += self._take_poll(handle, done)
            self._take_commands(handle, done)
        for handle in self.participants:
            if handle.polling is None and handle.death is None and handle.actor is not None:
                handle.polling = self._watched(
                    handle.actor.poll.remote(handle.collected, handle.news, POLL_WAIT_S)
                )
        self._forget_the_gone()
        return notices

    def _start(self, handle: Handle) -> None:
        resources = self._spec.resources
        options: dict[str, Any] = {
            "num_cpus": resources.cpus,
            "num_gpus": resources.gpus,
            "max_concurrency": THREADS,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(handle.place),
        }
        if resources.memory_bytes:
            options["memory"] = resources.memory_bytes
        create: Any = ray.remote(WorkerActor).options(**options).remote
        actor: ActorHandle[WorkerActor] = create(
            handle.name, self._job_id, self._spec.model_dump(mode="json"), str(self._storage)
        )
        handle.actor, handle.placed_at = actor, self._clock()
        handle.life = self._watched(actor.wait_for_ever.remote())
        handle.preparing = self._watched(actor.prepare.remote())

    def _watched(self, call: Call) -> Call:
        """The call, whose end wakes whoever waits for the next round."""
        call.future().add_done_callback(lambda _: self._wake())
        return call

    def _command(self, handle: Handle, call: Call, *, vital: bool) -> None:
        handle.commands[self._watched(call)] = vital

    def _take_life(self, handle: Handle, done: set[Call]) -> None:
        if handle.life is None or handle.life not in done:
            return
        try:
            ray.get(handle.life)
            handle.death = "its process left"
        except ActorUnavailableError:
            # The connection broke, which is not yet a death; Ray tells the two apart at the next call.
            assert handle.actor is not None
            handle.life = self._watched(handle.actor.wait_for_ever.remote())
            return
        except RayActorError as error:
            handle.death = _cause_of_death(error)
            handle.node_died = "node has died" in str(error) or "node died" in str(error)
        except RayError as error:
            # Ray itself ended it: its memory monitor comes before the system's own killer.
            handle.death = f"ended by Ray: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
        handle.life = None

    def _take_readiness(self, handle: Handle, done: set[Call]) -> None:
        if handle.preparing is None:
            return
        if handle.preparing in done:
            try:
                handle.readiness = self._same_data(ray.get(handle.preparing))
            except RayError as error:
                handle.death = handle.death or _last_line(error)
            handle.preparing = None
        elif handle.death is None and self._clock() - handle.placed_at > WARM_UP_TIMEOUT_S:
            handle.death = f"it was not ready within {WARM_UP_TIMEOUT_S:g} s of being placed"

    def _same_data(self, readiness: Readiness) -> Readiness:
        """Refuse a worker that sees other data than the first one did."""
        if readiness.failure is not None or readiness.fingerprint == self._fingerprint:
            return readiness
        if self._fingerprint is None:
            self._fingerprint = readiness.fingerprint
            return readiness
        message = (
            f"DataError: node {readiness.node} sees other data than the first worker's node: "
            f"{readiness.fingerprint} instead of {self._fingerprint}"
        )
        failure = Failure(fault=Fault.USER, message=message, traceback=message)
        return Readiness(pid=readiness.pid, node=readiness.node, failure=failure)

    def _take_poll(self, handle: Handle, done: set[Call]) -> list[dict[str, Any]]:
        if handle.polling is None or handle.polling not in done:
            return []
        call, handle.polling = handle.polling, None
        try:
            poll: Poll = ray.get(call)
        except RayError:
            return []  # a death is told by the life call; else the same notices are asked for again
        handle.poll, handle.collected, handle.news = poll, poll.upto, poll.news
        return [notice for notice in poll.notices if notice["generation"] == self._generation]

    def _take_commands(self, handle: Handle, done: set[Call]) -> None:
        """Collect finished commands."""
        for call in [call for call in handle.commands if call in done]:
            vital = handle.commands.pop(call)
            if call == handle.aborting:
                handle.aborting = None
            try:
                ray.get(call)
            except RayActorError:
                continue  # told by the life call
            except RayError as error:
                # A wish or an abort that came after the generation's end was refused as stale, and may be.
                if vital:
                    handle.death = f"it refused to take part: {_last_line(error)}"

    def _forget_the_gone(self) -> None:
        self._leaving = [handle for handle in self._leaving if not self._gone(handle)]

    def _gone(self, handle: Handle) -> bool:
        """Whether nothing of a retired worker is left: call, process where it can be seen, place."""
        if handle.life is not None:
            if not ray.wait([handle.life], timeout=0)[0]:
                return False
            handle.life = None
        if handle.readiness and handle.readiness.node == self._node and _runs(handle.readiness.pid):
            return False
        return _state(handle.place) == "REMOVED"


def _state(place: PlacementGroup) -> str:
    state: str = placement_group_table(place).get("state", "REMOVED")
    return state


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _cause_of_death(error: RayActorError) -> str:
    """The part of Ray's account that says why, without the guesses that follow it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        if line.startswith("The actor is dead because"):
            return line.partition(" Some common causes include")[0]
    return f"{lines[0]} {lines[-1]}" if len(lines) > 1 else str(error)


def _last_line(error: BaseException) -> str:
    """The message of an exception that was raised in an actor: Ray puts its traceback first."""
    return str(error).strip().splitlines()[-1]
