"""The worker: takes part in one generation of its job after another, in one process.

Its training runs in a thread of its own; the methods below may be called meanwhile from other threads, so
that a rank stuck in a collective can still be aborted. What goes wrong in training is returned as data. Every
command about a group names its generation; others are refused. Knows no Ray: see `workers.actor`.

The process outlives its groups, and with it the model, the data and what it holds of the training state:
snapshots are taken when a generation ends, whatever ended it, and let go when the next one can do without. So
does the writer of its checkpoints: what it still writes when a generation ends is committed before the next
one is opened, or never.
"""

import gc
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from structlog.typing import FilteringBoundLogger

from workers.beginning import Beginner, Beginning
from workers.data import Batches, open_batches
from workers.errors import StaleGenerationError
from workers.failures import describe
from workers.loop import Place, TrainingLoop, Wishes
from workers.models import build_model, load_class, vocabulary
from workers.naming import JobFolder
from workers.outbox import Outbox
from workers.protocol import Activity, Assignment, Begun, Heartbeat, Outcome, Poll, Readiness, Wish
from workers.rendezvous import Rendezvous, choose_device
from workers.saves import Saves
from workers.spec import CustomModel, JobSpec
from workers.warm_up import warm_up
from zero_core import ZeroEngine
from zero_core.snapshot import Snapshot

_SETTLE_TIMEOUT_S = 30.0
"""How long the commit of a checkpoint waits for the controller to have taken the reports before it."""


@dataclass(slots=True)
class _Part:
    """This worker's part in one generation; written by the training thread, read by the others."""

    assignment: Assignment
    wishes: Wishes = field(default_factory=Wishes)
    activity: Activity = Activity.FORMING
    step: int = 0
    begun: Begun | None = None
    outcome: Outcome | None = None
    thread: threading.Thread | None = None
    engine: ZeroEngine | None = None
    """While it exists: another thread may abort it."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What every generation of this process uses."""

    device: torch.device
    rendezvous: Rendezvous
    batches: Batches
    beginner: Beginner
    saves: Saves


class Worker:
    """One worker. Thread-safe."""

    def __init__(
        self,
        *,
        name: str,
        spec: JobSpec,
        folder: JobFolder,
        node: str,
        address: str,
        log: FilteringBoundLogger,
    ) -> None:
        """node: the cluster's id of this node; address: as the other nodes reach it."""
        self._name = name
        self._spec = spec
        self._checkpoints = folder.checkpoint_root(spec.checkpoints.location)
        self._node = node
        self._address = address
        self._log = log
        self._outbox = Outbox(on_settling=self._ring)
        self._lock = threading.Condition()
        self._news = 0
        self._part: _Part | None = None
        self._ready: _Prepared | None = None
        self._held: list[Snapshot] = []

    def prepare(self) -> Readiness:
        """Do all that can be done before a group exists, so that nothing slow is left for a pause."""
        try:
            device = choose_device(gpus=self._spec.resources.gpus)
            rendezvous = Rendezvous(address=self._address, device=device)
            batches = open_batches(self._spec, vocabulary=vocabulary(self._spec))
            torch.set_num_threads(self._spec.resources.threads)
            if isinstance(self._spec.model, CustomModel):
                load_class(self._spec.model.factory)
            baseline_bytes = warm_up(self._spec, rendezvous, device)
            beginner = Beginner(
                self._spec,
                device,
                batches,
                build_model(self._spec),
                baseline_bytes=baseline_bytes,
                on_engine=self._adopt,
                checkpoints=self._checkpoints,
            )
            saves = Saves(
                sink=self._outbox.put,
                settle=lambda: self._outbox.settle(_SETTLE_TIMEOUT_S),
                broken_off=rendezvous.aborted,
            )
            self._ready = _Prepared(device, rendezvous, batches, beginner, saves)
            # What has been imported stays: collecting between generations need not look at it again.
            gc.collect()
            gc.freeze()
            return Readiness(
                pid=os.getpid(),
                node=self._node,
                store=rendezvous.host(),
                fingerprint=batches.fingerprint,
                samples=batches.samples,
            )
        except Exception as error:  # whatever it is, the controller decides what it means for the job
            failure = describe(error, aborted=False)
            self._log.error("preparing failed", error=failure.message)
            return Readiness(pid=os.getpid(), node=self._node, failure=failure)

    def begin(self, assignment: Assignment) -> None:
        """Start the training thread of a generation; it must be newer than the last, and that one over.

        Raises StaleGenerationError otherwise.
        """
        with self._lock:
            last = self._part
            if last is not None and (
                last.outcome is None or assignment.generation <= last.assignment.generation
            ):
                raise StaleGenerationError(
                    f"worker {self._name} is {last.activity} in generation {last.assignment.generation}; "
                    f"generation {assignment.generation} cannot begin"
                )
            part = self._part = _Part(assignment)
        self._outbox.reopen()
        part.thread = threading.Thread(
            target=self._take_part, args=(part,), name=f"generation-{assignment.generation}", daemon=True
        )
        part.thread.start()

    def ask(self, generation: int, wish: Wish) -> None:
        """Put a wish to the group's vote. Raises StaleGenerationError if in another generation."""
        self._current(generation).wishes.ask(wish)

    def abort(self, generation: int) -> None:
        """Break the generation's group under the training thread, which then ends. Idempotent.

        Raises StaleGenerationError if this worker is in another generation.
        """
        part = self._current(generation)
        rendezvous = self._prepared().rendezvous
        if not rendezvous.aborted(generation):
            self._log.warning("group aborted", generation=generation)
        self._outbox.close()
        rendezvous.abort(generation)
        engine = part.engine
        if engine is not None:
            engine.abort()

    def poll(self, after: int, *, news: int = -1, wait_s: float = 0.0) -> Poll:
        """The notices after number `after`, and how things stand.

        Waits up to `wait_s` for something that the controller must hear at once, unless that has happened
        since the poll that answered `news`; reports alone are no hurry.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._news != news, wait_s)
            # The outcome first: the notices before it are then all in the box.
            part, news = self._part, self._news
            outcome = part.outcome if part else None
        notices, upto, complete = self._outbox.take(after)
        return Poll(
            generation=part.assignment.generation if part else 0,
            activity=part.activity if part else Activity.IDLE,
            step=part.step if part else 0,
            news=news if complete else -1,
            notices=notices,
            upto=upto,
            begun=part.begun if part else None,
            outcome=outcome if complete else None,
            heartbeat=_heartbeat(part) if part else None,
        )

    def _ring(self) -> None:
        """There is something that a waiting poll should bring home at once."""
        with self._lock:
            self._news += 1
            self._lock.notify_all()

    def _current(self, generation: int) -> _Part:
        with self._lock:
            part = self._part
        if part is None or part.assignment.generation != generation:
            mine = part.assignment.generation if part else 0
            raise StaleGenerationError(f"worker {self._name} is in generation {mine}, not in {generation}")
        return part

    def _prepared(self) -> _Prepared:
        if self._ready is None:
            raise RuntimeError(f"worker {self._name} was not prepared, or preparing it failed")
        return self._ready

    def _adopt(self, engine: ZeroEngine) -> None:
        """From now on an abort reaches this engine; it may have come while it was being built."""
        with self._lock:
            part = self._part
        assert part is not None, "engines are built within generations"
        part.engine = engine
        if self._prepared().rendezvous.aborted(part.assignment.generation):
            engine.abort()

    def _take_part(self, part: _Part) -> None:
        """The training thread: join, take over, train, leave; the outcome is the last thing that is set."""
        rendezvous = self._prepared().rendezvous
        generation = part.assignment.generation
        try:
            outcome = self._train(part)
            self._log.info(
                "generation over",
                generation=generation,
                step=outcome.step,
                reason="left" if outcome.left else outcome.reason or "finished",
            )
        except BaseException as error:  # the thread's end must always be told
            failure = describe(error, aborted=rendezvous.aborted(generation))
            self._log.error("generation failed", generation=generation, fault=str(failure.fault))
            self._log.error(failure.traceback)
            outcome = Outcome(step=part.step, failure=failure)
        # The traceback's frames held the engine; but for the snapshots, nothing of it may outlive its group.
        gc.collect()
        try:
            rendezvous.leave()
        except Exception as error:  # a broken group may not let go in good order; another is formed beside it
            self._log.warning("leaving the group failed", generation=generation, error=str(error))
        part.activity = Activity.IDLE
        part.outcome = outcome
        self._ring()

    def _train(self, part: _Part) -> Outcome:
        ready = self._prepared()
        assignment, spec = part.assignment, self._spec
        torch.set_num_threads(spec.resources.threads)
        began = time.perf_counter()
        groups = ready.rendezvous.form(
            generation=assignment.generation,
            rank=assignment.rank,
            world_size=assignment.world_size,
            participants=assignment.participants,
            store=assignment.store,
            collective_timeout_s=spec.recovery.collective_timeout_s,
        )
        form_s = time.perf_counter() - began
        part.activity = Activity.STARTING
        try:
            # If this fails, what was held is held still.
            beginning = ready.beginner.begin(assignment, groups, self._held)
            engine = beginning.engine
            if engine is None:
                return Outcome(step=part.step, left=True)
            self._keep_source(beginning)
            self._let_go(engine)
            self._announce(part, engine, beginning, form_s)
            return self._loop(part, engine, ready).run()
        finally:
            self._hold(part)

    def _hold(self, part: _Part) -> None:
        """The engine's group is over: keep what it holds of the state, and nothing else of it.

        A step that did not come to its end here does not count even where its update was done, unless it has
        been told.
        """
        engine, part.engine = part.engine, None
        if engine is None:
            return
        done = [
            snapshot for snapshot in engine.snapshots() if snapshot.step <= max(engine.steps_done, part.step)
        ]
        # Beside what the last generation could not yet do without.
        self._held = [*done, *self._held]
        # Its hooks tie model and engine together where Python's collector cannot see it.
        engine.detach()

    def _announce(self, part: _Part, engine: ZeroEngine, beginning: Beginning, form_s: float) -> None:
        moved, step = beginning.moved, engine.steps_done
        part.step = step
        part.begun = Begun(
            step=step,
            time=time.time(),
            seconds={"form": form_s, **beginning.seconds},
            source=beginning.source,
            bytes_moved=moved.bytes_moved if moved else 0,
            bytes_needed=moved.bytes_needed if moved else 0,
            replica_ranks=moved.replica_ranks if moved else (),
            origin=beginning.origin,
        )
        if part.assignment.rank == 0:
            for notice in beginning.notices:
                self._outbox.put({**notice, "generation": part.assignment.generation, "step": step})
        part.activity = Activity.TRAINING
        self._ring()
        assignment = part.assignment
        self._log.info(
            "training",
            generation=assignment.generation,
            rank=assignment.rank,
            world_size=assignment.world_size,
            step=step,
            source=beginning.source.value,
        )

    def _keep_source(self, beginning: Beginning) -> None:
        """What the state was not taken from could not be put together, and never will be."""
        moved = beginning.moved
        self._held = [
            snapshot
            for snapshot in self._held
            if moved is not None and (snapshot.step, snapshot.generation) == (moved.step, moved.generation)
        ]

    def _let_go(self, engine: ZeroEngine) -> None:
        """Drop the snapshots of earlier generations as soon as nobody can need them any more.

        Without replicas that is when the state has been taken over, which all ranks did or none; with them,
        when this generation's own first replicas are committed: until then a rank that is lost has its part
        in those of the generation before only.
        """
        if self._held and (not engine.budget.replicas or engine.replicated_step is not None):
            self._held = []

    def _loop(self, part: _Part, engine: ZeroEngine, ready: _Prepared) -> TrainingLoop:
        assignment = part.assignment
        return TrainingLoop(
            spec=self._spec,
            place=Place(
                worker=self._name,
                generation=assignment.generation,
                rank=assignment.rank,
                world_size=assignment.world_size,
                checkpoints=self._checkpoints,
                device=ready.device,
            ),
            engine=engine,
            batches=ready.batches,
            wishes=part.wishes,
            sink=lambda notice: self._put(part, notice),
            saves=ready.saves,
            after_step=lambda: self._let_go(engine),
        )

    def _put(self, part: _Part, notice: dict[str, Any]) -> None:
        part.step = max(part.step, notice["step"])
        self._outbox.put(notice)


def _heartbeat(part: _Part) -> Heartbeat | None:
    """Where the training thread is, seen from another; without a lock, so its parts may be a moment apart."""
    engine = part.engine
    if engine is None or part.activity is not Activity.TRAINING:
        return None  # forming, building and loading take as long as they take, and have limits of their own
    now = engine.whereabouts
    moves, moved_at, phase, kind, unit = now.moves, now.moved_at, now.phase, now.collective, now.unit
    names = engine.collectives.unit_names
    about = f" of {names[unit] or 'the root unit'}" if 0 <= unit < len(names) else ""
    return Heartbeat(
        step=part.step,
        phase=phase or part.activity.value,
        collective=f"{kind}{about}",
        moves=moves,
        still_s=max(0.0, time.perf_counter() - moved_at),
    )
