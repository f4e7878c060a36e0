"""The worker: takes part in one generation of its job after another, in one process.

Its training runs in a thread of its own; the methods below may be called meanwhile from other threads, so
that a rank stuck in a collective can still be aborted. What goes wrong in training is returned as data. Every
command about a group names its generation; others are refused. Knows no Ray: see `workers.actor`.
"""

import gc
import os
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from structlog.typing import FilteringBoundLogger

from workers.data import Batches, open_batches
from workers.errors import StaleGenerationError
from workers.failures import describe
from workers.loop import Place, TrainingLoop, Wishes, make_engine, resume
from workers.models import build_model, load_class, vocabulary
from workers.naming import JobFolder
from workers.outbox import Outbox
from workers.protocol import Activity, Assignment, Begun, Heartbeat, Outcome, Poll, Readiness, Wish
from workers.rendezvous import Rendezvous, choose_device
from workers.spec import CustomModel, JobSpec
from zero_core import ZeroEngine

_SETTLE_TIMEOUT_S = 5.0
"""How long a checkpoint waits for the controller to have taken the reports before it."""


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
        self._folder = folder
        self._node = node
        self._address = address
        self._log = log
        self._outbox = Outbox()
        self._lock = threading.Lock()
        self._part: _Part | None = None
        self._batches: Batches | None = None
        self._rendezvous: Rendezvous | None = None
        self._device = torch.device("cpu")

    def prepare(self) -> Readiness:
        """Do all that can be done before a group exists: find the device, the data and the model's class."""
        try:
            self._device = choose_device(gpus=self._spec.resources.gpus)
            self._rendezvous = Rendezvous(address=self._address, device=self._device)
            self._batches = open_batches(self._spec, vocabulary=vocabulary(self._spec))
            if isinstance(self._spec.model, CustomModel):
                load_class(self._spec.model.factory)
            return Readiness(pid=os.getpid(), node=self._node, fingerprint=self._batches.fingerprint)
        except Exception as error:  # whatever it is, the controller decides what it means for the job
            failure = describe(error, aborted=False)
            self._log.error("preparing failed", error=failure.message)
            return Readiness(pid=os.getpid(), node=self._node, failure=failure)

    def host(self) -> str:
        """Open the store at which the next generation meets, and return its host:port."""
        return self._prepared()[0].host()

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
        rendezvous, _ = self._prepared()
        if not rendezvous.aborted(generation):
            self._log.warning("group aborted", generation=generation)
        self._outbox.close()
        rendezvous.abort(generation)
        engine = part.engine
        if engine is not None:
            engine.abort()

    def poll(self, after: int) -> Poll:
        """The notices after number `after`, and how things stand."""
        with self._lock:
            part = self._part
        # The outcome first: the notices before it are then all in the box.
        outcome = part.outcome if part else None
        notices, upto, complete = self._outbox.take(after)
        return Poll(
            generation=part.assignment.generation if part else 0,
            activity=part.activity if part else Activity.IDLE,
            step=part.step if part else 0,
            notices=notices,
            upto=upto,
            begun=part.begun if part else None,
            outcome=outcome if complete else None,
            heartbeat=_heartbeat(part) if part else None,
        )

    def _current(self, generation: int) -> _Part:
        with self._lock:
            part = self._part
        if part is None or part.assignment.generation != generation:
            mine = part.assignment.generation if part else 0
            raise StaleGenerationError(f"worker {self._name} is in generation {mine}, not in {generation}")
        return part

    def _prepared(self) -> tuple[Rendezvous, Batches]:
        if self._rendezvous is None or self._batches is None:
            raise RuntimeError(f"worker {self._name} was not prepared, or preparing it failed")
        return self._rendezvous, self._batches

    def _take_part(self, part: _Part) -> None:
        """The training thread: join, train, leave; the outcome is the last thing that is set."""
        rendezvous, _ = self._prepared()
        generation = part.assignment.generation
        try:
            outcome = self._train(part)
            self._log.info(
                "generation over",
                generation=generation,
                step=outcome.step,
                reason=outcome.reason or "finished",
            )
        except BaseException as error:  # the thread's end must always be told
            failure = describe(error, aborted=rendezvous.aborted(generation))
            self._log.error("generation failed", generation=generation, fault=str(failure.fault))
            self._log.error(failure.traceback)
            outcome = Outcome(step=part.step, failure=failure)
        # The traceback's frames held the engine; nothing may keep its memory over a change of generation.
        gc.collect()
        try:
            rendezvous.leave()
        except Exception as error:  # a broken group may not let go in good order; another is formed beside it
            self._log.warning("leaving the group failed", generation=generation, error=str(error))
        part.activity = Activity.IDLE
        part.outcome = outcome

    def _train(self, part: _Part) -> Outcome:
        rendezvous, batches = self._prepared()
        assignment, spec = part.assignment, self._spec
        torch.set_num_threads(spec.resources.threads)
        marks = [time.perf_counter()]
        rendezvous.form(
            generation=assignment.generation,
            rank=assignment.rank,
            world_size=assignment.world_size,
            store=assignment.store,
            collective_timeout_s=spec.recovery.collective_timeout_s,
        )
        marks.append(time.perf_counter())
        engine = make_engine(spec, build_model(spec), self._device)
        marks.append(time.perf_counter())
        part.engine = engine
        try:
            if rendezvous.aborted(assignment.generation):
                engine.abort()  # it came while the engine was being built
            part.activity = Activity.LOADING
            if assignment.checkpoint is not None:
                resume(engine, batches, Path(assignment.checkpoint))
            marks.append(time.perf_counter())
            form_s, start_s, load_s = (after - before for before, after in pairwise(marks))
            part.step = engine.steps_done
            part.begun = Begun(
                step=engine.steps_done,
                time=time.time(),
                seconds={"form": form_s, "start": start_s, "load": load_s},
            )
            part.activity = Activity.TRAINING
            self._log.info(
                "training",
                generation=assignment.generation,
                rank=assignment.rank,
                world_size=assignment.world_size,
                step=part.step,
            )
            return self._loop(part, engine, batches).run()
        finally:
            # Its hooks tie model and engine together where Python's collector cannot see it.
            engine.detach()
            part.engine = None

    def _loop(self, part: _Part, engine: ZeroEngine, batches: Batches) -> TrainingLoop:
        assignment = part.assignment
        return TrainingLoop(
            spec=self._spec,
            place=Place(
                worker=self._name,
                generation=assignment.generation,
                rank=assignment.rank,
                world_size=assignment.world_size,
                checkpoints=self._folder.checkpoints,
                device=self._device,
            ),
            engine=engine,
            batches=batches,
            wishes=part.wishes,
            sink=lambda notice: self._put(part, notice),
            settle=lambda: self._outbox.settle(_SETTLE_TIMEOUT_S),
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
