"""How a generation's engine comes by its state: from what its participants hold, from files, from the seed.

All participants go the same way, as `reshard.take_over` fails on all or on none. Knows the engine and the
job; nothing of threads, of the controller or of how the groups were formed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from workers.data import Batches
from workers.loop import make_engine, resume
from workers.models import build_model
from workers.protocol import Assignment, Source
from workers.rendezvous import Groups
from workers.spec import JobSpec
from zero_core import ZeroEngine, reshard
from zero_core.errors import NothingHeldError
from zero_core.reshard import Resharded
from zero_core.snapshot import Snapshot


@dataclass(slots=True)
class Beginning:
    """An engine ready for its first step, and how it came to be. `engine`: None on a worker that leaves."""

    engine: ZeroEngine | None
    source: Source
    seconds: dict[str, float] = field(default_factory=dict)
    moved: Resharded | None = None


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
    ) -> None:
        """module: as built from the seed; it is kept, and filled again, over the generations.

        baseline_bytes: what the process occupies without a model.
        on_engine: told of every engine before it takes part in anything, so that it can be aborted.
        """
        self._spec = spec
        self._device = device
        self._batches = batches
        self._module: nn.Module | None = module
        self._pristine = True
        self._on_engine = on_engine
        self._baseline_bytes = baseline_bytes

    def begin(self, assignment: Assignment, groups: Groups, held: Sequence[Snapshot]) -> Beginning:
        """Bring up the engine of a generation. Collective over its participants.

        Raises what the engine, the checkpoint or the model raise; the last engine told of is then attached.
        """
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
        seconds = {"start": started - began, "move": time.perf_counter() - started}
        return Beginning(engine, source, seconds, moved)

    def _without(self, assignment: Assignment, groups: Groups) -> Beginning:
        """Nobody holds anything: from the checkpoint, or from the seed."""
        assert groups.training is not None, "one that leaves has something to hand over"
        began = time.perf_counter()
        engine = self._engine(assignment, groups, blank=assignment.checkpoint is not None)
        started = time.perf_counter() - began
        if assignment.checkpoint is None:
            return Beginning(engine, Source.START, {"start": started})
        beginning = self._loaded(engine, assignment.checkpoint)
        beginning.seconds["start"] = started
        return beginning

    def _loaded(self, engine: ZeroEngine, checkpoint: str) -> Beginning:
        began = time.perf_counter()
        resume(engine, self._batches, Path(checkpoint))
        return Beginning(engine, Source.CHECKPOINT, {"load": time.perf_counter() - began})

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
