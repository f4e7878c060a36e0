"""One attempt of a job from its start to its end: the shell that carries out what the policies decide.

Owns the sequence (gather workers, form a generation, train, and again), the phase, the generation's number
and the losses so far. Cluster, log and orders are arguments. Everything waits by ticking: each tick polls the
workers, logs their reports and hears a cancel.
"""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers import policies
from workers.draining import Departure, Nodes, Relocation
from workers.group import Group
from workers.log import JobLog
from workers.mover import Mover
from workers.orders import Orders
from workers.policies import (
    Bounds,
    Broken,
    Drop,
    Ending,
    Finished,
    GivenUp,
    Lost,
    Proceed,
    Refuse,
    Seek,
    Stopped,
    Wait,
)
from workers.progress import Vigil
from workers.protocol import Wish
from workers.reports import Phase
from workers.spec import JobSpec
from zero_core import manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long is waited for what, in seconds."""

    start_patience_s: float = 30.0
    """For places of all wanted workers, before a job starts with fewer."""
    recovery_patience_s: float = 5.0
    """For a lost worker's replacement, before the rest goes on without it."""
    resize_patience_s: float = 30.0
    """For the joiners' places, before a resize is refused; the group trains meanwhile."""
    abort_s: float = 10.0
    """For a survivor to come out of its broken group, before it is given up."""
    grace_s: float = 5.0
    """For the cause of a broken collective to come to light."""
    release_s: float = 15.0
    """For all processes and places to be gone at the end."""
    tick_s: float = 0.2
    """Between two polls while the group trains."""
    quick_tick_s: float = 0.02
    """Between two polls while something is being waited for."""


@dataclass(slots=True)
class _Change:
    """What the next generation is for: it becomes the event that tells of the change."""

    event: str | None = None
    """"resize", "recovery", or None for the start of an attempt."""
    details: dict[str, Any] = field(default_factory=dict)
    old_workers: int = 0
    target: int | None = None
    """World size that was decided on; None: whatever is wanted at the time."""
    without: frozenset[str] = frozenset()
    """Members that are to leave, by name, whatever the number."""
    patience_s: float = 0.0
    trained_until: float = 0.0
    """Unix seconds at which the last step before the change ended."""
    last_step: int = 0
    stop_s: float = 0.0


class _Cancelled(Exception):  # noqa: N818 - a turn of events, no error
    """The owner wants the job to end now."""


class Conductor:
    """Runs one attempt, in one thread; others may read `phase`, `generation`, `step` and `world_size`."""

    def __init__(
        self,
        *,
        spec: JobSpec,
        attempt: int,
        log: JobLog,
        orders: Orders,
        group: Group,
        checkpoints: Path,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        nodes: Callable[[], Nodes] = Nodes,
        leave_node: Callable[[], None] | None = None,
    ) -> None:
        """nodes: the cluster's nodes as they are now, quickly.

        leave_node: ends this process so that it is started again on a node that takes work. It is called, as
        the last thing, when the own node is drained, the job is saved and its workers are gone. None: never.
        """
        history = log.history
        self._spec = spec
        self._attempt = attempt
        self._log = log
        self._orders = orders
        self._group = group
        self._checkpoints = checkpoints
        self._limits = limits or Limits()
        self._clock = clock
        self._bounds = Bounds(least=spec.workers.min, most=spec.max_workers)
        self._restarted = history.attempt == attempt
        self._losses = history.losses if self._restarted else 0
        self.phase = Phase.RECOVERING if self._restarted else Phase.STARTING
        # A generation that was being formed when the last controller died may have left no entry: skip one.
        self.generation = history.generation + (1 if self._restarted else 0)
        self.step = history.step
        self._trained_until = history.time
        self._workers_before = history.workers
        self._failing_since: float | None = None
        self._forming = False
        self._stopping: Wish | None = None
        self._asked_at = 0.0
        self._seeking_since: float | None = None
        self._resizing = _Change()
        self._held: list[dict[str, Any]] = []
        self._leave_node = leave_node
        self._relocating = False
        self._mover = Mover(
            group=group,
            least=spec.workers.min,
            nodes=nodes,
            tell=lambda data: self._event("drain", data),
            clock=clock,
            wall=wall,
            patience_s=self._limits.resize_patience_s,
            relocates=leave_node is not None,
        )
        elastic = spec.elastic
        self._vigil = Vigil(
            stuck_after_s=elastic.stuck_after_s, slow_share=elastic.slow_share, slow_steps=elastic.slow_steps
        )

    @property
    def world_size(self) -> int:
        return len(self._group.members)

    @property
    def node(self) -> str:
        """The cluster's id of the node that this process is on."""
        return self._group.node

    @property
    def places(self) -> list[tuple[str, str | None]]:
        """Each member's name and node, by rank."""
        return self._group.places()

    def run(self) -> None:
        """Conduct the attempt to its final phase, or until this process is to go on elsewhere.

        All its workers are gone before that phase is logged.
        """
        crash: dict[str, Any] | None = None
        try:
            phase, reason = self._conduct()
        except _Cancelled:
            phase, reason = Phase.CANCELLED, f"cancelled by {self._orders.cancel}"
        except Exception as error:  # a fault of ours must not leave workers behind, nor the job's phase open
            phase, reason = Phase.FAILED, f"the controller failed: {type(error).__name__}: {error}"
            crash = {"rank": None, "message": reason, "traceback": traceback.format_exc()}
        left = self._group.release(self._limits.release_s)
        if left:
            reason = f"{reason or phase}; not seen to be gone: workers {', '.join(left)}"
        if crash:
            self._event("error", crash)
        self._enter(phase, reason)
        if not phase.final and self._leave_node:
            self._leave_node()

    # The sequence

    def _conduct(self) -> tuple[Phase, str | None]:
        change = self._first_change()
        self._enter(self.phase, change.details.get("cause"))
        while True:
            ending = self._gather(change) or self._form(change) or self._train()
            match ending:
                case Finished():
                    return Phase.SUCCEEDED, None
                case Stopped(reason=Wish.PAUSE) if self._relocating and not self._orders.pause:
                    return Phase.RECOVERING, "the controller starts again on another node"
                case Stopped(reason=Wish.PAUSE):
                    return Phase.PAUSED, f"paused by {self._orders.pause}"
                case GivenUp(reason=reason):
                    return Phase.FAILED, reason
                case Broken(rank=rank, failure=failure):
                    self._event(
                        "error", {"rank": rank, "message": failure.message, "traceback": failure.traceback}
                    )
                    return Phase.FAILED, failure.message
                case Stopped():
                    change = self._resizing
                    change.stop_s = self._clock() - self._asked_at
                    change.trained_until, change.last_step = self._trained_until, self.step
                case Lost():
                    change = self._recovery(ending.cause)
                    self._clear_up(ending)

    def _first_change(self) -> _Change:
        if self._restarted:
            return self._recovery("the controller was restarted")
        return _Change(patience_s=self._limits.start_patience_s)

    def _recovery(self, cause: str) -> _Change:
        return _Change(
            event="recovery",
            details={"cause": cause},
            old_workers=self.world_size or self._workers_before,
            patience_s=self._limits.recovery_patience_s
            if self._group.members
            else self._limits.start_patience_s,
            trained_until=self._trained_until,
            last_step=self.step,
        )

    def _gather(self, change: _Change) -> Ending | None:
        """Get the next generation's members together; None when they are."""
        group, since, told = self._group, self._clock(), None
        while True:
            if self._orders.pause:
                # Nothing trains: the last checkpoint, if any, is all there is to keep.
                return Stopped(Wish.PAUSE, self.step)
            hopeless = self._bury()
            if hopeless:
                return hopeless
            decision = policies.assemble(
                wanted=change.target or self._orders.wanted,
                bounds=self._bounds,
                survivors=sum(name not in change.without for name, _ in group.places()),
                joiners=group.counts(),
                waited_s=self._clock() - since,
                patience_s=change.patience_s,
            )
            match decision:
                case Seek(count=count):
                    group.seek(count)
                    since = self._clock()
                case Drop(count=count):
                    group.drop(count)
                case Proceed(workers=workers, reason=reason):
                    group.enrol(workers, without=change.without)
                    if reason:
                        self._enter(self.phase, f"going on with {workers} workers: {reason}")
                    return None
                case Wait(reason=reason):
                    if reason and reason != told:
                        told = reason
                        self._enter(self.phase, reason)
            self._tick(self._limits.quick_tick_s)

    def _form(self, change: _Change) -> Ending | None:
        """Have the members form the next generation; None once all of them train."""
        group = self._group
        self.generation += 1
        self._failing_since = None
        latest = manifest.latest(self._checkpoints)
        self._forming = True
        group.meet(self.generation, str(latest.path) if latest else None)
        try:
            while (begun := group.begun()) is None:
                ending = self._judge()
                if ending:
                    return ending
                self._tick(self._limits.quick_tick_s)
            self.step = begun[0].step
            self._tell(change)
            self._enter(Phase.RUNNING, None)
            return None
        finally:
            self._forming = False
            self._flush()

    def _train(self) -> Ending:
        """Watch over a training group until it ends, and put the owner's orders to it."""
        self._stopping = self._seeking_since = None
        while True:
            pending = self._stopping or self._group.joiners
            self._tick(self._limits.quick_tick_s if pending else self._limits.tick_s)
            ending = self._judge()
            if ending:
                order = self._orders.resize
                if isinstance(ending, Finished) and order:
                    self._refuse("the job's last step was done first")
                return ending
            if self._stopping is None:
                self._obey()

    def _obey(self) -> None:
        """Put open orders to the training group."""
        if self._orders.pause:
            self._stop(Wish.PAUSE, Phase.PAUSING, f"asked by {self._orders.pause}")
            return
        if self._orders.take_checkpoint():
            self._group.ask(Wish.CHECKPOINT)
        if self._move_off():
            return
        order = self._orders.resize
        if order is None and not self._group.joiners:
            return
        since = self._seeking_since or self._clock()
        wanted = order.workers if order else self.world_size
        decision = policies.resize(
            current=self.world_size,
            wanted=wanted,
            joiners=self._group.counts(),
            joiner_fault=self._joiner_fault(),
            waited_s=self._clock() - since,
            patience_s=self._limits.resize_patience_s,
        )
        match decision:
            case None:
                if order:
                    self._orders.close_resize(order, workers=wanted)
            case Seek(count=count):
                self._seeking_since = self._clock()
                self._group.seek(count)
            case Drop(count=count):
                self._group.drop(count)
            case Refuse(reason=reason):
                self._refuse(reason)
            case Proceed(workers=workers):
                assert order is not None
                self._resizing = _Change(
                    event="resize",
                    details={"who": order.who},
                    old_workers=self.world_size,
                    target=workers,
                    patience_s=self._limits.recovery_patience_s,
                )
                self._stop(Wish.RESIZE, Phase.RESIZING, f"to {workers} workers, asked by {order.who}")

    def _move_off(self) -> bool:
        """Leave nodes that are drained; whether that is under way, so that nothing else is."""
        order = self._orders.resize
        target = order.workers if order else self.world_size
        match self._mover.look(target=target, joiner_fault=self._joiner_fault()):
            case None:
                return False
            case Departure(workers=workers, without=without, nodes=nodes):
                self._resizing = _Change(
                    event="resize",
                    details={"who": order.who if order else "controller", "cause": "drain", "nodes": nodes},
                    old_workers=self.world_size,
                    target=workers,
                    without=without,
                    patience_s=self._limits.recovery_patience_s,
                )
                self._stop(Wish.RESIZE, Phase.RESIZING, f"off drained nodes {', '.join(nodes)}")
            case Relocation(reason=reason):
                self._relocating = True
                self._stop(Wish.PAUSE, Phase.RECOVERING, reason)
        return True

    # Steps of the sequence

    def _stop(self, wish: Wish, phase: Phase, reason: str) -> None:
        self._stopping, self._asked_at = wish, self._clock()
        self._enter(phase, reason)
        self._group.ask(wish)

    def _refuse(self, reason: str) -> None:
        """The open resize is not done; its joiners leave and the group is as it was."""
        order = self._orders.resize
        assert order is not None
        self._group.drop(len(self._group.joiners))
        self._seeking_since = None
        self._event(
            "resize_refused",
            {"who": order.who, "wanted": order.workers, "workers": self.world_size, "reason": reason},
        )
        self._orders.close_resize(order, workers=self.world_size)

    def _clear_up(self, lost: Lost) -> None:
        """After a loss: note it, bury the dead, bring the survivors out of their group."""
        if not lost.ranks:
            self._lose(rank=None, worker=None, cause=lost.cause)
        self._bury()
        self._enter(Phase.RECOVERING, lost.cause)
        deadline = self._clock() + self._limits.abort_s
        while not self._group.abort():
            if self._clock() > deadline:
                self._group.give_up_on_the_stuck(
                    f"it did not come out of its broken group within {self._limits.abort_s:g} s"
                )
            self._tick(self._limits.quick_tick_s)

    def _bury(self) -> Broken | GivenUp | None:
        """Retire dead members and joiners, noting each. Says so if the job cannot go on because of them."""
        group = self._group
        ranks = {handle.name: rank for rank, handle in enumerate(group.members)}
        for handle in [*group.members, *group.joiners]:
            if handle.death is not None:
                self._lose(rank=ranks.get(handle.name), worker=handle.name, cause=handle.death)
                group.retire([handle])
        broken = next((handle.fault for handle in group.joiners if handle.fault is not None), None)
        if broken:
            return Broken(None, broken)
        return policies.losses_spent(losses=self._losses, most=self._spec.recovery.max_worker_losses)

    def _lose(self, *, rank: int | None, worker: str | None, cause: str) -> None:
        self._losses += 1
        self._event("worker_lost", {"rank": rank, "worker": worker, "step": self.step, "cause": cause})

    def _joiner_fault(self) -> str | None:
        for handle in self._group.joiners:
            if handle.fault is not None:
                return f"new worker {handle.name} cannot run the job: {handle.fault.message}"
            if handle.death is not None:
                return f"new worker {handle.name} was lost before it joined: {handle.death}"
        return None

    def _judge(self) -> Ending | None:
        members = self._group.view()
        if self._failing_since is None and any(m.outcome and m.outcome.failure for m in members):
            self._failing_since = self._clock()
        failing_s = self._clock() - self._failing_since if self._failing_since is not None else 0.0
        return policies.judge(members, failing_s=failing_s, grace_s=self._limits.grace_s)

    # What is told

    def _tell(self, change: _Change) -> None:
        """Log the change that this generation was formed for, and close the order behind it."""
        order = self._orders.resize
        if order and order.workers == self.world_size:
            self._orders.close_resize(order, workers=order.workers)
        if change.event is None:
            return
        begun = self._group.begun()
        assert begun is not None
        data = {
            **change.details,
            "old_workers": change.old_workers,
            "new_workers": self.world_size,
            "generation": self.generation,
            "pause_s": max(0.0, begun[0].time - change.trained_until),
            "seconds": {key: max(b.seconds[key] for b in begun) for key in ("form", "start", "load")},
            "steps_lost": max(0, change.last_step - begun[0].step),
            "at_step": begun[0].step,
        }
        if change.event == "resize":
            data["seconds"]["stop"] = change.stop_s
        self._event(change.event, data)

    def _tick(self, wait_s: float) -> None:
        """Wait a moment, take in the workers' news and log it. Raises _Cancelled if the job is to end."""
        self._orders.wait(wait_s)
        if self._orders.cancel:
            raise _Cancelled
        notices = self._group.round()
        self._held += notices
        if not self._forming:
            self._flush()
        self._watch(notices)

    def _watch(self, notices: list[dict[str, Any]]) -> None:
        """Tell who holds the others up; one that does so for too long is treated as dead."""
        for found in self._vigil.look(now=self._clock(), pulses=self._group.pulses(), reports=notices):
            self._event(found.kind, found.data)
            if found.dead:
                self._group.give_up(found.dead, found.cause)

    def _flush(self) -> None:
        """Log the notices collected: reports in one piece, checkpoints as events."""
        held, self._held = self._held, []
        reports = []
        for notice in held:
            if notice["type"] == "report":
                reports.append(notice)
                self.step = notice["step"]
                self._trained_until = max(self._trained_until, notice["time"])
            else:
                self._log.reports(reports)
                reports = []
                data = {key: notice[key] for key in ("step", "bytes", "seconds", "generation", "reason")}
                self._event("checkpoint", data)
        self._log.reports(reports)

    def _enter(self, phase: Phase, reason: str | None) -> None:
        self.phase = phase
        self._event(
            "phase",
            {
                "phase": phase,
                "reason": reason,
                "attempt": self._attempt,
                "wanted": self._orders.wanted,
                "workers": self.world_size,
            },
        )

    def _event(self, kind: str, data: dict[str, Any]) -> None:
        self._log.event(kind, self.generation, data)
