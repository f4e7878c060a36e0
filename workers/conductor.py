"""One attempt of a job from its start to its end: the shell that carries out what the policies decide.

Owns the sequence (gather workers, form a generation, train, and again), the phase and the generation's
number. Cluster, log and orders are arguments. Everything waits by ticking: each tick polls the
workers, logs their reports and hears a cancel; it comes early when a call to a worker ends.
"""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers import policies
from workers.casualties import Casualties
from workers.changes import Change
from workers.commands import Resize
from workers.draining import Departure, Nodes, Relocation
from workers.goodput import Goodput
from workers.group import Group
from workers.latest import Latest
from workers.ledger import Ledger
from workers.log import JobLog
from workers.losses import Losses
from workers.mover import Mover
from workers.opening import Opening
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
from workers.protocol import Begun, Wish
from workers.reports import Phase
from workers.spec import JobSpec
from zero_core.checkpoint import manifest
from zero_core.errors import CheckpointError

GROWN_BACK = "grown back"
ASKED_FOR = "asked for"
CONTROLLER = "controller"
"""Who wants what nobody has asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long is waited for what, in seconds."""

    start_patience_s: float = 30.0
    """For places of all wanted workers, before a job starts with fewer."""
    abort_s: float = 10.0
    """For a survivor to come out of its broken group, before it is given up."""
    grace_s: float = 5.0
    """For the cause of a broken collective to come to light."""
    release_s: float = 15.0
    """For all processes and places to be gone at the end."""
    tick_s: float = 0.2
    """Between two looks at everything, where nothing calls for one before."""
    placing_tick_s: float = 0.05
    """The same while the cluster is asked for places: it does not call."""


_TIMED = frozenset({"phase", "resize", "recovery", "checkpoint"})
"""Kinds of events that carry the productive time so far."""


class _Cancelled(Exception):  # noqa: N818 - a turn of events, no error
    """The owner wants the job to end now."""


class Conductor:
    """Runs one attempt, in one thread; others may read the attributes without underscore."""

    def __init__(
        self,
        *,
        spec: JobSpec,
        attempt: int,
        log: JobLog,
        orders: Orders,
        group: Group,
        checkpoints: str | Path,
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
        self._wall = wall
        self._bounds = Bounds(least=spec.workers.min, most=spec.max_workers)
        self._restarted = history.attempt == attempt
        self._casualties = Casualties(
            group,
            Losses(
                spec.recovery,
                workers=history.losses if self._restarted else 0,
                nodes=history.nodes_lost if self._restarted else frozenset(),
            ),
            least=spec.workers.min,
            clock=clock,
            lost=lambda data: self._event("worker_lost", {**data, "step": self.step}),
            say=lambda remark: self._enter(self.phase, remark),
        )
        self._goodput = Goodput()
        if self._restarted:
            self._goodput = Goodput(step=history.saved_step, productive_s=history.saved_productive_s)
        self.began_at = history.began_at if self._restarted else wall()
        self.ended_at: float | None = None
        """Unix seconds of the attempt's beginning and end."""
        self.phase = Phase.RECOVERING if self._restarted else Phase.STARTING
        # A generation that was being formed when a controller died may have left no entry, but it was opened.
        self.generation = max(history.generation, manifest.opened(checkpoints))
        self.step = history.step
        self._trained_until = history.time
        self._workers_before = history.workers
        self._latest = Latest(checkpoints)
        self._opening = Opening(
            checkpoints,
            again=self._restarted and history.workers > 0,
            clock=clock,
            say=lambda remark: self._enter(self.phase, remark),
        )
        self._begun_at = self.step
        """Step from which the generation under way, or the last one, began."""
        self._ledger = Ledger(spec)
        self._failing_since: float | None = None
        self._forming = False
        self._stopping: Wish | None = None
        self._seeking_since: float | None = None
        self._resizing = Change()
        self._recovering: Change | None = None
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
            patience_s=spec.elastic.capacity_wait_s,
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
    def productive_s(self) -> float:
        """Seconds of this attempt in steps that count."""
        return self._goodput.productive_s

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
        elif phase.final:  # nobody writes any more
            try:
                manifest.clear_unfinished(self._checkpoints)
            except (OSError, CheckpointError) as error:
                reason = f"{reason or phase}; what an unfinished save left stays: {error}"
        if crash:
            self._event("error", crash)
        if phase.final:
            self.ended_at = self._wall()
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
                    change.trained_until, change.last_step = self._trained_until, self.step
                case Lost():
                    change = self._recovering = self._recovery(ending.cause)
                    self._clear_up(ending)

    def _first_change(self) -> Change:
        if self._restarted:
            return self._recovery("the controller was restarted")
        return Change(patience_s=self._limits.start_patience_s)

    def _recovery(self, cause: str) -> Change:
        return Change(
            event="recovery",
            details={"who": CONTROLLER, "cause": cause},
            old_workers=self.world_size or self._workers_before,
            patience_s=self._limits.start_patience_s,
            trained_until=self._trained_until,
            last_step=self.step,
        )

    def _gather(self, change: Change) -> Ending | None:
        """Get the next generation's members together and open it; None when that is done."""
        group, since, told = self._group, self._clock(), None
        while True:
            hopeless = self._casualties.bury(self._recovering)
            if hopeless:
                return hopeless
            decision = policies.assemble(
                wanted=change.target or self._orders.wanted,
                bounds=self._bounds,
                survivors=sum(handle.name not in change.without for handle in group.participants),
                joiners=group.counts(),
                hold_off_s=self._casualties.hold_off_s,
                waited_s=self._clock() - since,
                patience_s=change.patience_s,
            )
            if self._orders.pause and not isinstance(decision, Proceed):
                # Nothing trains, nor can it: the last checkpoint, if any, is all there is to keep.
                return Stopped(Wish.PAUSE, self.step)
            match decision:
                case Seek(count=count):
                    group.seek(count)
                    since = self._clock()
                case Proceed(workers=workers, reason=reason):
                    opened = self._opening.open(self.generation + 1)
                    if isinstance(opened, GivenUp):
                        return opened
                    if opened is None:
                        group.enrol(workers, without=change.without)
                        if reason:
                            self._enter(self.phase, f"going on with {workers} workers: {reason}")
                        return None
                case Wait(reason=reason):
                    if reason and reason != told:
                        told = reason
                        self._enter(self.phase, reason)
            self._tick()

    def _form(self, change: Change) -> Ending | None:
        """Have the participants form the next generation; None once all members train."""
        group = self._group
        self.generation += 1
        self._failing_since = None
        if change.event != "resize":
            self._latest.look()
        self._forming = True
        change.met_at = self._wall()
        latest = self._latest
        group.meet(self.generation, checkpoint=latest.location, floor_step=latest.floor_step)
        try:
            while (begun := group.begun()) is None:
                ending = self._judge()
                if ending:
                    return ending
                self._tick()
            self._tell(change, begun)
            self._enter(Phase.RUNNING, None)
            if not self._spec.elastic.replicas:
                group.dismiss_leavers()
            return None
        finally:
            self._forming = False
            self._flush()

    def _train(self) -> Ending:
        """Watch over a training group until it ends, and put the owner's orders to it."""
        self._stopping = self._seeking_since = None
        while True:
            self._tick()
            ending = self._judge()
            if ending:
                order = self._orders.resize
                if isinstance(ending, Finished) and order:
                    self._refuse(order, "the job's last step was done first")
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
        if order is not None:
            self._resize(order)
        else:
            self._grow_back()

    def _resize(self, order: Resize) -> None:
        """Do the next thing towards the number of workers that was asked for."""
        decision = policies.resize(
            current=self.world_size,
            wanted=order.workers,
            joiners=self._group.counts(),
            joiner_fault=self._casualties.joiner_fault(),
            waited_s=self._sought_for_s(),
            patience_s=self._spec.elastic.capacity_wait_s,
        )
        match decision:
            case None:
                self._orders.resized(order)
            case Seek(count=count):
                self._seek(count)
            case Drop(count=count):
                self._group.drop(count)
            case Refuse(reason=reason):
                self._refuse(order, reason)
            case Proceed(workers=workers):
                self._change_to(workers, who=order.who, cause=ASKED_FOR)

    def _grow_back(self) -> None:
        """Do the next thing towards the number of workers that was lost, if any was."""
        self._casualties.drop_the_unfit()
        if self.step == self._begun_at:
            return  # what a new worker's start takes would be taken from the step that makes up for the loss
        decision = policies.grow_back(
            current=self.world_size,
            wanted=self._orders.wanted if self._spec.elastic.grow_back else self.world_size,
            joiners=self._group.counts(),
            hold_off_s=self._casualties.hold_off_s,
            waited_s=self._sought_for_s(),
            patience_s=self._spec.elastic.capacity_wait_s,
        )
        match decision:
            case Seek(count=count):
                self._seek(count)
            case Drop(count=count):
                self._group.drop(count)
            case Proceed(workers=workers):
                self._change_to(workers, who=CONTROLLER, cause=GROWN_BACK)

    def _move_off(self) -> bool:
        """Leave nodes that are drained; whether that is under way, so that nothing else is."""
        order = self._orders.resize
        target = order.workers if order else self.world_size
        match self._mover.look(target=target, joiner_fault=self._casualties.joiner_fault()):
            case None:
                return False
            case Departure(workers=workers, without=without, nodes=nodes):
                self._resizing = Change(
                    event="resize",
                    details={"who": order.who if order else CONTROLLER, "cause": "drain", "nodes": nodes},
                    old_workers=self.world_size,
                    target=workers,
                    without=without,
                    asked_at=self._wall(),
                )
                self._stop(Wish.RESIZE, Phase.RESIZING, f"off drained nodes {', '.join(nodes)}")
            case Relocation(reason=reason):
                self._relocating = True
                self._stop(Wish.PAUSE, Phase.RECOVERING, reason)
        return True

    # Steps of the sequence

    def _change_to(self, workers: int, *, who: str, cause: str) -> None:
        self._resizing = Change(
            event="resize",
            details={"who": who, "cause": cause},
            old_workers=self.world_size,
            target=workers,
            asked_at=self._wall(),
        )
        reason = f"to {workers} workers, {cause}" + (f" by {who}" if cause == ASKED_FOR else "")
        self._stop(Wish.RESIZE, Phase.RESIZING, reason)

    def _stop(self, wish: Wish, phase: Phase, reason: str) -> None:
        self._stopping = wish
        self._enter(phase, reason)
        self._group.ask(wish)

    def _seek(self, count: int) -> None:
        self._seeking_since = self._clock()
        self._group.seek(count)

    def _sought_for_s(self) -> float:
        if self._seeking_since is None:
            self._seeking_since = self._clock()  # joiners may be left from before the group trained
        return self._clock() - self._seeking_since

    def _refuse(self, order: Resize, reason: str) -> None:
        """The open resize is not done; its joiners leave and the group is as it was."""
        missing: dict[str, float] = {}
        if self._group.counts().placing:
            missing = self._group.missing()
            short = ", ".join(f"{amount:g} {name}" for name, amount in missing.items())
            reason += f"; missing: {short}" if short else "; no single node has what a worker takes"
        self._group.drop(len(self._group.joiners))
        self._seeking_since = None
        wanted = self._orders.refused(order)
        self._event(
            "resize_refused",
            {
                "who": order.who,
                "wanted": order.workers,
                "workers": wanted,
                "reason": reason,
                "missing": missing,
            },
        )

    def _clear_up(self, lost: Lost) -> None:
        """After a loss: bring the survivors out of their group, note it, bury the dead."""
        self._group.abort()
        if not lost.ranks:
            self._casualties.note(None, rank=None, cause=lost.cause)
        self._casualties.bury(self._recovering)
        self._enter(Phase.RECOVERING, lost.cause)
        deadline = self._clock() + self._limits.abort_s
        while not self._group.abort():
            if self._clock() > deadline:
                self._group.give_up_on_the_stuck(
                    f"it did not come out of its broken group within {self._limits.abort_s:g} s"
                )
            self._tick()
        # A group that breaks again and again without a death is not formed anew at once, either.
        while not lost.ranks and self._casualties.hold_off_s > 0:
            self._tick()

    def _judge(self) -> Ending | None:
        members = self._group.view()
        if self._failing_since is None and any(m.outcome and m.outcome.failure for m in members):
            self._failing_since = self._clock()
        failing_s = self._clock() - self._failing_since if self._failing_since is not None else 0.0
        return policies.judge(members, failing_s=failing_s, grace_s=self._limits.grace_s)

    # What is told

    def _tell(self, change: Change, begun: tuple[Begun, ...]) -> None:
        """Log the change that this generation was formed for, and close the order behind it."""
        step = begun[0].step
        rank_0 = self._group.members[0].readiness
        # What a lost rank had done and not told, and nobody will do again.
        samples = rank_0.samples if rank_0 else 0
        self._write(self._ledger.rebuild(step, samples=samples, origin=begun[0].origin))
        self._ledger.begin([handle.name for handle in self._group.members])
        self._goodput.resume(step)
        self._latest.began(step)
        self.step, self._begun_at, self._recovering = step, step, None
        order = self._orders.resize
        if order and order.workers == self.world_size:
            self._orders.resized(order)
        if change.event is not None:
            self._event(change.event, {**change.data(begun), "generation": self.generation})

    def _tick(self) -> None:
        """Wait a moment, take in the workers' news and log it. Raises _Cancelled if the job is to end."""
        placing = self._group.counts().placing
        self._orders.wait(self._limits.placing_tick_s if placing else self._limits.tick_s)
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
        """Log the notices collected: reports in one piece, all else as events."""
        held, self._held = self._held, []
        reports = []
        for notice in held:
            if notice["type"] == "report":
                reports.append(notice)
            else:
                self._write(reports)
                reports = []
                data = {key: value for key, value in notice.items() if key != "type"}
                if notice["type"] == "checkpoint":
                    self._latest.saved(notice["step"], notice["location"])
                    data["saved_productive_s"] = self._goodput.at(notice["step"])
                self._event(notice["type"], data)
        self._write(reports)

    def _write(self, reports: list[dict[str, Any]]) -> None:
        last = reports[-1] if reports else None
        if last and last["generation"] == self.generation and last["step"] > self._begun_at + 1:
            # All have voted on a second step: what the new members took over has replicas of its own.
            self._group.dismiss_leavers()
        for report in reports:
            self.step = report["step"]
            self._trained_until = max(self._trained_until, report["time"])
            self._ledger.told(report)
            if report["rank"] == 0 and not report.get("rebuilt"):
                self._goodput.told(report["step"], report["step_s"])
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
        if kind in _TIMED:
            data = {**data, "productive_s": self._goodput.productive_s}
        self._log.event(kind, self.generation, data)
