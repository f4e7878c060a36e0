"""How a generation's engine comes by its state: from what its participants hold, from files, from the seed.

With the state comes the place from which the job counts its samples, the same on all ranks. From files means
the newest checkpoint that verifies; where there are some and none does, the job fails rather than begin anew.

All participants go the same way, as `reshard.take_over` fails on all or on none. Knows the engine and the
job; nothing of threads, of the controller or of how the groups were formed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workers.committed import committed
from workers.data import Batches, check_resume, go_on_from
from workers.errors import ResumeError
from workers.loop import make_engine
from workers.models import build_model
from workers.order import FROM_THE_START, Origin
from workers.protocol import Assignment, Source
from workers.rendezvous import Groups
from workers.spec import JobSpec
from zero_core import ZeroEngine, checkpoint, reshard
from zero_core.checkpoint import Loaded, interchange
from zero_core.errors import NothingHeldError
from zero_core.reshard import Resharded
from zero_core.snapshot import Snapshot


@dataclass(slots=True)
class Beginning:
    """An engine ready for its first step, and how it came to be. `engine`: None on a worker that leaves.

    notices: what is to be told of it, JSON values: a `type`, and its data.
    """

    engine: ZeroEngine | None
    source: Source
    seconds: dict[str, float] = field(default_factory=dict)
    moved: Resharded | None = None
    origin: Origin = FROM_THE_START
    notices: tuple[dict[str, Any], ...] = ()


class Beginner:
    """Begins generations in one process, with one module and one device."""

    def __init__(
        self,
        spec: JobSpec,
        device: torch.device,
        batches: Batches,
        module: nn.Module,
        *,
        baseline_bytes: int,
        on_engine: Callable[[ZeroEngine], None],
        checkpoints: str | Path,
    ) -> None:
        """module: as built from the seed; it is kept, and filled again, over the generations.

        baseline_bytes: what the process occupies without a model.
        on_engine: told of every engine before it takes part in anything, so that it can be aborted.
        checkpoints: folder or address of the job's checkpoints.
        """
        self._spec = spec
        self._device = device
        self._batches = batches
        self._module: nn.Module | None = module
        self._pristine = True
        self._on_engine = on_engine
        self._baseline_bytes = baseline_bytes
        self._checkpoints = checkpoints
        self._origin: Origin | None = None

    def begin(self, assignment: Assignment, groups: Groups, held: Sequence[Snapshot]) -> Beginning:
        """Bring up the engine of a generation. Collective over its participants.

        Raises what the engine, the checkpoint or the model raise; the last engine told of is then attached.
        """
        beginning = self._come_by(assignment, groups, held)
        if beginning.engine is not None:
            self._origin = self._batches.origin = beginning.origin
        return beginning

    def _come_by(self, assignment: Assignment, groups: Groups, held: Sequence[Snapshot]) -> Beginning:
        if not assignment.carries:
            return self._without(assignment, groups)
        began = time.perf_counter()
        engine = self._engine(assignment, groups, blank=True) if groups.training is not None else None
        started = time.perf_counter()
        try:
            moved = reshard.take_over(
                engine,
                held,
                group=groups.everyone,
                floor_step=assignment.floor_step,
            )
        except NothingHeldError:
            if engine is None:
                return Beginning(None, Source.CHECKPOINT if assignment.checkpoint else Source.START)
            if assignment.checkpoint is not None:
                beginning = self._loaded(engine, assignment.checkpoint)
            else:
                engine.detach()
                beginning = self._without(assignment, groups)
            beginning.seconds["start"] = beginning.seconds.get("start", 0.0) + started - began
            return beginning
        source = Source.REPLICA if moved.replica_ranks else Source.LIVE
        origin = self._agreed_origin(groups.everyone)
        seconds = {"start": started - began, "move": time.perf_counter() - started}
        return Beginning(engine, source, seconds, moved, origin)

    def _agreed_origin(self, everyone: dist.ProcessGroup) -> Origin:
        """Of those whose state it is: one that joins has none. Collective over all participants."""
        known = self._origin
        values = (-1, -1) if known is None else (known.step, known.samples)
        told = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=everyone)
        step, samples = told.tolist()
        assert step >= 0, "somebody held the state, and with it the origin"
        return Origin(step, samples)

    def _without(self, assignment: Assignment, groups: Groups) -> Beginning:
        """Nobody holds anything: from the job's checkpoints, from what it starts from, or from the seed."""
        assert groups.training is not None, "one that leaves has something to hand over"
        began = time.perf_counter()
        own = assignment.checkpoint
        if own is None and committed(self._checkpoints):
            own = ""  # there are some, and none that can be read: the load says why
        given = self._spec.start_from
        blank = own is not None or (given is not None and given.safetensors is None)
        engine = self._engine(assignment, groups, blank=blank)
        started = time.perf_counter() - began
        if own is not None:
            beginning = self._loaded(engine, own)
        elif given is None:
            beginning = Beginning(engine, Source.START)
        elif given.safetensors is not None:
            beginning = self._imported(engine, given.safetensors)
        else:
            assert given.checkpoint is not None, "the service puts a job's folder in the place of its id"
            beginning = self._started_from(engine, given.checkpoint, cast=given.cast)
        beginning.seconds["start"] = started
        return beginning

    def _loaded(self, engine: ZeroEngine, newest: str) -> Beginning:
        """From the job's newest checkpoint that verifies; `newest`: the one that is known to be listed."""
        began = time.perf_counter()
        root = _parent(newest) or self._checkpoints
        loaded = checkpoint.load_newest(engine, root)
        check_resume(loaded.extra["data"], self._batches.fingerprint)
        consumed = loaded.extra.get("consumed")
        origin = FROM_THE_START if consumed is None else Origin(loaded.step, consumed)
        if origin.place(0, global_batch=self._spec.global_batch) == 0:
            origin = FROM_THE_START
        seconds = {"load": time.perf_counter() - began}
        return Beginning(engine, Source.CHECKPOINT, seconds, origin=origin, notices=_damage(loaded))

    def _started_from(self, engine: ZeroEngine, location: str, *, cast: bool) -> Beginning:
        """The first steps of a job that goes on from another one's checkpoint."""
        began = time.perf_counter()
        notices: tuple[dict[str, Any], ...] = ()
        if committed(location):  # a folder of them
            loaded = checkpoint.load_newest(engine, location, cast=cast)
            extra, notices = loaded.extra, _damage(loaded)
        else:
            extra = checkpoint.load(engine, location, cast=cast)
        done, wanted = engine.steps_done, self._spec.steps
        if done >= wanted:
            raise ResumeError(
                f"start_from: {location} has done {done} steps already, and steps is {wanted} in all: "
                "ask for more steps, or begin from an older checkpoint"
            )
        origin, why = go_on_from(dict(extra), self._batches, step=done)
        if why is not None:
            notices += ({"type": "data_restarted", "reason": f"the data begin at their start: {why}"},)
        return Beginning(
            engine,
            Source.CHECKPOINT,
            {"load": time.perf_counter() - began},
            origin=origin,
            notices=notices,
        )

    def _imported(self, engine: ZeroEngine, folder: str) -> Beginning:
        """Parameters from safetensors, all else as new."""
        began = time.perf_counter()
        interchange.import_model(engine, folder)
        return Beginning(engine, Source.START, {"load": time.perf_counter() - began})

    def _engine(self, assignment: Assignment, groups: Groups, *, blank: bool) -> ZeroEngine:
        module = self._module if blank or self._pristine else None
        # Until there is an engine that can be detached, what is built on the module cannot be taken off it.
        self._module, self._pristine = None, False
        if module is None:
            module = build_model(self._spec)
        engine = make_engine(
            self._spec,
            module,
            self._device,
            group=groups.training,
            generation=assignment.generation,
            blank=blank,
            baseline_bytes=self._baseline_bytes,
        )
        self._module = module
        self._on_engine(engine)
        return engine


def _parent(location: str) -> str:
    """Folder or address of the checkpoints that this one is among; "" if it names none."""
    return location.rstrip("/").rpartition("/")[0]


def _damage(loaded: Loaded) -> tuple[dict[str, Any], ...]:
    """Notices of the newer checkpoints that were passed over."""
    return tuple(
        {"type": "checkpoint_damaged", "checkpoint": name, "reason": why, "loaded_step": loaded.step}
        for name, why in loaded.skipped
    )
