"""The training loop of one rank in one generation.

Owns the order of things within a step: seeding, forward, backward, the agreement on wishes, the report, and
when a checkpoint is due. Engine, data, clock, saves and the way out for reports are arguments; Ray and
the forming of groups are unknown here.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workers.data import Batches
from workers.engine_config import engine_config, saves_behind
from workers.errors import DivergedError, ModelError
from workers.model_shapes import gpt_activation_bytes
from workers.order import mix
from workers.protocol import STOPS, Outcome, Wish
from workers.reports import MemoryUse
from workers.saves import Order, Saves
from workers.spec import GPTModel, JobSpec
from zero_core.config import DEFAULT_GROUP
from zero_core.engine import StepReport, ZeroEngine
from zero_core.errors import NonFiniteError, PeerLostError

Sink = Callable[[dict[str, Any]], None]
"""Takes a notice: a rank report without its number, or a checkpoint. Blocks while nobody collects them."""

_BEHIND = frozenset({"interval", "owed"})
"""Reasons for a checkpoint that training does not wait for."""
_MUST = frozenset({"final", "pause"})
"""Reasons for one without which the job must not go on as if it were there."""

_MEMORY_EVERY_S = 1.0
"""Measuring the process costs milliseconds; reports of steps in between repeat the last figures."""


class Wishes:
    """What this rank has been asked for, from any thread; the loop puts it to the vote at each step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Wish] = set()

    def ask(self, wish: Wish) -> None:
        with self._lock:
            self._open.add(wish)

    def ballot(self) -> tuple[float, ...]:
        """One number for each Wish, in its order; what is in it is then the group's and no longer open."""
        with self._lock:
            taken, self._open = self._open, set()
        return tuple(float(wish in taken) for wish in Wish)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in the job this loop runs."""

    worker: str
    generation: int
    rank: int
    world_size: int
    checkpoints: str | Path
    """Folder or address of the job's checkpoints."""
    device: torch.device
    fenced: bool = True
    """Whether checkpoints are refused unless this is the generation that the controller opened last."""


def make_engine(
    spec: JobSpec,
    model: nn.Module,
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    generation: int = 0,
    blank: bool = False,
    baseline_bytes: int | None = None,
) -> ZeroEngine:
    """The ZeRO engine as the job wants it. group: default torch.distributed's; blank: to be filled at once.

    baseline_bytes: what the process occupies without a model; None: measured now.
    """
    return ZeroEngine(
        model,
        engine_config(spec),
        device=device,
        group=group,
        generation=generation,
        blank=blank,
        baseline_bytes=baseline_bytes,
    )


class TrainingLoop:
    """Trains from `engine.steps_done` to the last step, or to the boundary at which all agree to stop."""

    def __init__(
        self,
        *,
        spec: JobSpec,
        place: Place,
        engine: ZeroEngine,
        batches: Batches,
        wishes: Wishes,
        sink: Sink,
        saves: Saves,
        after_step: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._spec = spec
        self._place = place
        self._engine = engine
        self._batches = batches
        self._wishes = wishes
        self._sink = sink
        self._saves = saves
        self._after_step = after_step
        self._clock = clock
        self._wall = wall
        self._memory: tuple[MemoryUse, int] | None = None
        self._memory_at = -math.inf
        self._behind = saves_behind(spec)
        if self._behind:
            saves.serve(engine)
        self._predicted = _predicted(engine, spec)

    def run(self) -> Outcome:
        """Train. Collective: every rank of the group returns the same outcome.

        Raises UserError for the job's own faults, among them a loss that is not finite, and whatever the
        model raises. A step that fp16 skips is reported, counts as one of the job's steps and has used up its
        data: which samples a step reads must not depend on how many were skipped before it.
        """
        engine, last = self._engine, self._spec.steps
        engine.train()
        while engine.steps_done < last:
            self._saves.check(self._place.generation)
            agreed = self._step()
            done = engine.steps_done
            stop = next((wish for wish in STOPS if wish in agreed), None)
            reason = self._reason_to_save(agreed, done)
            if reason:
                self._save(reason, owed=Wish.OWED in agreed)
            if stop and done < last:
                return Outcome(step=done, reason=stop)
        return Outcome(step=last)

    def _reason_to_save(self, agreed: frozenset[Wish], done: int) -> str | None:
        """Why a checkpoint is due after step `done`. A resize is no reason: the state stays in memory."""
        every = self._spec.checkpoints.every_steps
        if done == self._spec.steps:
            return "final"
        if Wish.PAUSE in agreed:
            return "pause"
        if Wish.CHECKPOINT in agreed:
            return "demand"
        if every and done % every == 0:
            return "interval"
        return "owed" if Wish.OWED in agreed else None

    def _step(self) -> frozenset[Wish]:
        """One step and its report; returns the wishes that some rank has put to the vote."""
        began = self._clock()
        step, engine = self._engine.steps_done, self._engine
        samples: list[int] = []
        for micro_batch in engine.micro_batches:
            samples += self._micro_batch(step, micro_batch)
        try:
            report = engine.step(ballot=self._ballot())
        except NonFiniteError as error:
            raise DivergedError(
                f"step {step + 1}, learning rate {engine.learning_rates[DEFAULT_GROUP]:g}: {error}. "
                "In the job: optimizer.lr, schedule.warmup_steps, optimizer.clip_norm, precision"
            ) from error
        except PeerLostError:
            interrupted = engine.interrupted_report
            if interrupted is not None and engine.config.stage == 0:
                # Each rank holds all of the state that this step led to, and nobody that of the step before.
                self._tell(interrupted, samples, self._clock() - began)
            raise
        self._tell(report, samples, self._clock() - began)
        self._after_step()
        return frozenset(wish for wish, votes in zip(Wish, report.ballot, strict=True) if votes)

    def _ballot(self) -> tuple[float, ...]:
        """What this rank has been asked for, and whether it knows of a checkpoint that is owed."""
        if self._saves.owed(self._place.generation) is not None:
            self._wishes.ask(Wish.OWED)
        return self._wishes.ballot()

    def _micro_batch(self, step: int, micro_batch: int) -> list[int]:
        """Forward and backward of one micro-batch; returns the ids of its samples."""
        ids = self._batches.ids(step, micro_batch)
        with self._engine.doing("data"):
            parts = self._batches.read(ids)
            inputs, targets = (torch.from_numpy(part).to(self._place.device) for part in parts)
        # Dropout must not depend on which rank computes the micro-batch, nor on what was drawn before.
        torch.manual_seed(mix(self._spec.seed, step, micro_batch))
        loss = self._engine(inputs, targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ModelError(f"the model's forward must return the scalar mean loss; it returned {shape}")
        self._engine.backward(loss)
        return [int(sample) for sample in ids]

    def _save(self, reason: str, *, owed: bool) -> None:
        checkpoints, place, done = self._spec.checkpoints, self._place, self._engine.steps_done
        with self._engine.doing("checkpoint"):
            self._saves.save(
                self._engine,
                Order(
                    root=place.checkpoints,
                    fenced=place.fenced,
                    generation=place.generation,
                    rank=place.rank,
                    step=done,
                    reason=reason,
                    extra={
                        "data": self._batches.fingerprint,
                        "consumed": self._batches.consumed(done),
                        "steps": self._spec.steps,
                        "spec": self._spec.model_dump(mode="json"),
                    },
                    seed=self._spec.seed,
                    keep=checkpoints.keep,
                    keep_every=checkpoints.keep_every,
                    behind=self._behind and reason in _BEHIND,
                    must=reason in _MUST,
                    owed=owed,
                ),
            )

    def _tell(self, report: StepReport, samples: list[int], step_s: float) -> None:
        ended = self._wall()  # before the process is measured, which takes milliseconds
        memory, resident = self._measure()
        self._sink(
            {
                "type": "report",
                "time": ended,
                "generation": self._place.generation,
                "rank": self._place.rank,
                "world_size": self._place.world_size,
                "worker": self._place.worker,
                "step": report.step,
                "loss": _finite(report.loss),
                "lr": report.lr[DEFAULT_GROUP],
                "group_lrs": {name: lr for name, lr in report.lr.items() if name != DEFAULT_GROUP},
                "grad_norm": _finite(report.grad_norm),
                "skipped": report.skipped,
                "skipped_steps": report.skipped_steps,
                "loss_scale": report.loss_scale,
                "tokens": len(samples) * self._spec.sequence_length,
                "step_s": step_s,
                "seconds": dict(report.seconds),
                "bytes_sent": dict(report.bytes_sent),
                "bytes_by_transport": dict(report.bytes_by_transport),
                "memory": memory,
                "predicted": self._predicted,
                "resident_bytes": resident,
                "samples": samples if self._spec.sample_ledger else None,
            }
        )

    def _measure(self) -> tuple[MemoryUse, int]:
        now = self._clock()
        if self._memory is None or now - self._memory_at >= _MEMORY_EVERY_S:
            measured = self._engine.memory()
            use = MemoryUse(
                parameters=measured.parameters,
                gradients=measured.gradients,
                optimizer_states=measured.optimizer_states,
                communication_buffers=measured.communication_buffers,
                activations=measured.activations,
                padding=measured.padding,
                replicas=measured.replicas,
                save_copy=measured.save_copy,
                unattributed=measured.unattributed,
                checkpoints=measured.checkpoints,
                recomputed=measured.recomputed,
                fragmentation=measured.fragmentation,
            )
            self._memory, self._memory_at = (use, measured.resident), now
        return self._memory


def _finite(value: float) -> float | None:
    """None for what JSON cannot say; only a step that fp16 skipped has it."""
    return value if math.isfinite(value) else None


def _predicted(engine: ZeroEngine, spec: JobSpec) -> MemoryUse:
    """The engine's own budget; what forward saves is only known beforehand for the built-in model."""
    budget = engine.budget
    activations = budget.activations
    if isinstance(spec.model, GPTModel):
        activations = gpt_activation_bytes(
            spec.model,
            sequence_length=spec.sequence_length,
            micro_batch=spec.micro_batch,
            precision=spec.precision,
            checkpointing=spec.zero.activation_checkpointing,
        )
    return MemoryUse(
        parameters=budget.parameters,
        gradients=budget.gradients,
        optimizer_states=budget.optimizer_states,
        communication_buffers=budget.communication_buffers,
        activations=activations,
        padding=budget.padding,
        replicas=budget.replicas,
        save_copy=budget.save_copy,
    )
