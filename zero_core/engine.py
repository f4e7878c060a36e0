"""`ZeroEngine`: a model whose states are partitioned over the ranks of a process group.

The engine is the shell that wires the rooms together and keeps the order of a step:

    forward        engine(*inputs)      stage 3 gathers units as their modules run        gathering
    backward       engine.backward()    gradients go to their owners as they are filled   reduction
    step           engine.step()        norm, clip, update of the owned part,             optimizer
                                        stages 1-2 gather the new parameters              collectives

It knows nothing of data, checkpoints' files or where ranks run.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_core import assembly, budget, usage
from zero_core import verdict as verdicts
from zero_core.access import ParameterAccess
from zero_core.accounting import Accounts
from zero_core.activations import Recomputation, store_for
from zero_core.agreement import check_alike
from zero_core.arena import Arena
from zero_core.buffers import BufferPool
from zero_core.collectives import Collectives
from zero_core.config import ZeroConfig, check_rates
from zero_core.errors import UsageError
from zero_core.freezing import Freezing
from zero_core.gathering import Gatherer
from zero_core.ledger import Whereabouts
from zero_core.materialise import Initialise
from zero_core.memory import MemoryReport, PeakSampler, SavedTensors, occupied_bytes
from zero_core.moving import StateId
from zero_core.optimizer import FlatOptimizer
from zero_core.partition import bytes_of, device_of, partition
from zero_core.precision import StepGate
from zero_core.reduction import Reducer
from zero_core.report import StepReport
from zero_core.residency import gathered_buffers, gradient_buffers, kept_gathered
from zero_core.saving import SavingHooks
from zero_core.schedule import rates
from zero_core.snapshot import Snapshot
from zero_core.standing import LiveState
from zero_core.trees import map_tensors
from zero_core.units import FlatUnit, bind_units, held_dtype
from zero_core.widening import widened_products

__all__ = ["StepReport", "ZeroEngine"]


class ZeroEngine:
    """Trains `model` with its states partitioned as `config.stage` says.

    model   any nn.Module; its parameters become views of flat tensors, fp64 ones too in the precision set,
            and must not be replaced. Children of nn.ModuleList and nn.Sequential are units, all else is one.
    group   a torch.distributed group, default the world; every rank builds the same model in it
    device  default: where the model's parameters are; the CPU for those on the meta device
    initialise  fills the own parameters and buffers of a module on the meta device, given the module and its
            name; default: the module's `reset_parameters`. Units are filled one at a time.
    generation  number of this group among those that train the model one after the other
    blank   lay parameters and states out without values: `reshard.take_over` or `checkpoint.load` fills them.
            The module may have served a detached engine before, at any stage.
    baseline_bytes  what the process occupies without a model, for the memory report: an earlier engine's
            `baseline_bytes`, where its memory is still held. Default: measured now

    Parameters that do not require gradients now are frozen for good: gathered at stage 3, never stepped.
    Others may be frozen, and unfrozen again, between steps, on every rank alike: while frozen they keep their
    values and their optimizer state as they are.
    A parameter that no micro-batch of a step used has a gradient of zeros, as every other.
    At stage 3 a unit's parameters have values while its module runs; used from elsewhere they read as nan.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZeroConfig,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        initialise: Initialise | None = None,
        generation: int = 0,
        blank: bool = False,
        baseline_bytes: int | None = None,
    ) -> None:
        self.module = model
        self.config = config
        self.generation = generation
        self.device = torch.device(device) if device is not None else device_of(model)
        if baseline_bytes is None:
            baseline_bytes = occupied_bytes(self.device) - bytes_of(model, self.device)
        self.baseline_bytes = baseline_bytes
        self._products = widened_products(
            held_dtype("compute", config.precision), self.device, setting=config.low_precision_products
        )
        self._checkpoints = store_for(model, config, self.device)
        self.collectives = Collectives(
            group,
            self.device,
            staging_bytes=config.staging_bytes,
            transport=config.transport,
            ordered=config.reduction == "ordered",
            divergence_check=config.divergence_check,
            timeout_s=config.collective_timeout_s,
        )
        self.rank, self.world_size = self.collectives.rank, self.collectives.world_size
        self._total = usage.check_group(config, self.collectives)
        self._lay_out()
        self._hold(initialise, blank=blank)
        self._measure(baseline_bytes)
        self._round = self._computed = 0
        self._losses: list[torch.Tensor] = []
        self._trace: list[tuple[FlatUnit, str]] = []
        self._trace_ended = True
        self._failed = False
        """Whether the last call of the step under way failed."""
        self._evaluating = self._detached = False
        self.interrupted_report: StepReport | None = None
        """Of a step whose update this rank has carried out, where `step` failed after that: it counts if a
        snapshot of it is taken over."""
        if not blank:
            self._live.begin()
        self.collectives.ledger.take()  # what building cost is no step's

    def _lay_out(self) -> None:
        """Find the units, the same on every rank, and allocate the buffers they take turns in."""
        config = self.config
        self.layout, self.units = bind_units(
            self.module,
            precision=config.precision,
            tile=config.tile,
            rank=self.rank,
            world_size=self.world_size,
        )
        check_alike(self.collectives, config, self.layout)
        size = budget.exchange_bytes(self.layout, config, self.rank)
        if self.collectives.shares_memory:  # optimizer states lie there as well
            size += budget.aligned(budget.optimizer_arena_bytes(self.layout, config, self.rank))
        self.collectives.reserve(size)
        self.collectives.unit_names = [unit.unit.name for unit in self.units]
        # Gradients are read by other ranks, gathered parameters are not.
        self._pools = BufferPool(self.collectives.allocate), BufferPool(self.collectives.allocate_private)
        for pool, buffers in zip(self._pools, (gradient_buffers, gathered_buffers), strict=True):
            for (numel, dtype), count in buffers(self.layout, config).items():
                pool.reserve(numel, held_dtype(dtype, config.precision), count=count)

    def _hold(self, initialise: Initialise | None, *, blank: bool) -> None:
        """Partition the model, and wire what gathers, reduces and steps it."""
        config = self.config
        self._gatherer = Gatherer(
            self.units,
            self.collectives,
            self._pools[1],
            self._record,
            self._active,
            keep=kept_gathered(self.layout, config),
            prefetch=config.prefetch_units > 0,
        )
        size = budget.optimizer_arena_bytes(self.layout, config, self.rank)
        # Where a later group can read it, if it is on this host.
        block = self.collectives.allocate_host(size) if self.collectives.shares_memory else None
        self._states_arena = Arena(size, self.device, block=block)
        states = partition(
            self.module, self.units, self.collectives, config, initialise, self._states_arena, blank=blank
        )
        self.optimizer = FlatOptimizer(config, states)
        self.gate = StepGate(config)
        self.steps_done = 0
        """Finished steps of data, the skipped ones included; updates are `optimizer.steps_done`."""
        self._reducer = Reducer(
            self.units,
            self.collectives,
            self._pools[0],
            keep_full=config.stage <= 1,
            leaves=self._total,
            reproducible=config.reproducible,
            overlap=config.overlap,
            active=self._active,
            after_reduce=self._after_reduce,
        )
        self._live = LiveState(
            self.module,
            self.layout,
            config,
            self.collectives,
            units=self.units,
            optimizer=self.optimizer,
            gate=self.gate,
            generation=self.generation,
        )
        parts = assembly.readable_parts(self.units, self._reducer.gradients, stage=config.stage)
        self.collectives.publish({**parts, **self._live.published})
        self._live.connect()
        if config.stage == 3:
            self._gatherer.install_hooks()
        else:
            self._gatherer.watch_for_abort()
        self._freezing = Freezing(self.units, self.collectives, self._train_only)
        self._access = ParameterAccess(
            self.module, self.units, states, self.collectives, self._gatherer, stage=config.stage
        )

    def _measure(self, baseline: int) -> None:
        """Count what autograd saves and sample the process; recompute units where that is asked for."""
        recomputes = self.config.activation_checkpointing == "unit"
        exclude = {u.full.untyped_storage().data_ptr() for u in self.units if u.full is not None}
        self._saved = SavedTensors(exclude, recomputes=recomputes)
        self.peak = PeakSampler(self.device, baseline)
        self._hooks = SavingHooks(
            self._saved,
            self._gatherer,
            always=recomputes or self.config.stage == 3,
            due=lambda: self.peak.due(self.steps_done),
        )
        self._recomputation = Recomputation(
            self._checkpoints,
            self._saved,
            gather=self._gatherer.gather,
            pack=self._hooks.pack,
            unpack=self._hooks.unpack,
            in_unit=lambda tensor: self._gatherer.reference(tensor) is not None,
            sample=lambda: self.peak.sample(self.steps_done),
        )
        if recomputes:
            self._recomputation.install(self.module, self.units)
        self._accounts = Accounts(
            units=self.units,
            collectives=self.collectives,
            pools=self._pools,
            states_arena=self._states_arena,
            optimizer=self.optimizer,
            reducer=self._reducer,
            live=self._live,
            checkpoints=self._checkpoints,
            offloaded=self.config.checkpoint_offload,
            saved=self._saved,
            peak=self.peak,
        )

    # -- what a training loop calls ---------------------------------------------------------------

    @property
    def micro_batches(self) -> range:
        """The indices, of the step's 0..M-1, that this rank computes: rank, rank + N, rank + 2N, ..."""
        return range(self.rank, self._total, self.world_size)

    @property
    def whereabouts(self) -> Whereabouts:
        """What this rank is doing now, for other threads to read."""
        return self.collectives.ledger.whereabouts

    def doing(self, phase: str) -> AbstractContextManager[None]:
        """Say in `whereabouts` what the caller does between the engine's own phases."""
        return self.collectives.ledger.within(phase)

    @property
    def learning_rates(self) -> dict[str, float]:
        """The rate of each group in the step under way, by name."""
        return rates(self.config, self.optimizer.steps_done)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. In bf16 and fp16 floating tensors among the arguments are cast to that."""
        self.require_state()
        training = torch.is_grad_enabled()
        if training and self._computed >= len(self.micro_batches):
            raise UsageError(
                f"rank {self.rank} has computed its {len(self.micro_batches)} micro-batches of this step: "
                "call step() next (evaluate under torch.no_grad())"
            )
        if training:
            self._freezing.check()
            self._failed = False
        if training and self._trace_ended:
            self._trace.clear()
            self._saved.begin()
            self._recomputation.begin()
            self._trace_ended = False
        self._evaluating = not training
        self._gatherer.begin("forward" if training else "evaluation")
        try:
            with self.collectives.ledger.net("forward"), self._hooks.watching((args, kwargs)), self._products:
                return self.module(*self._cast(args), **self._cast(kwargs))
        except BaseException:
            self._gatherer.release_all()
            if training:
                self._trace_ended = self._failed = True
            raise
        finally:
            self._evaluating = False

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate this micro-batch's mean loss, a scalar; its share of the step's mean is 1/M.

        After this rank's last one of the step it also takes part in the rounds that only others compute.
        """
        usage.check_loss(loss)
        usage.check_turn(self._computed, self.micro_batches)
        if self._saved.end():
            self.peak.sample(self.steps_done)
        self._failed = True  # until the end
        self._reducer.begin_micro_batch()
        self._gatherer.begin("backward")
        try:
            with self.collectives.ledger.net("backward"):
                with self._products:
                    self._scaled(loss).backward()  # type: ignore[no-untyped-call]
                self._reducer.end_micro_batch()
        finally:
            self._gatherer.release_all()
        self._losses.append(loss.detach().clone())  # not read before the step's end: a GPU need not wait
        self._trace_ended = True
        self._end_round()
        self._computed += 1
        if self._computed == len(self.micro_batches):
            self._serve_idle_rounds()
        self._failed = False

    def step(self, *, lr: float | None = None, ballot: Sequence[float] = ()) -> StepReport:
        """Finish the step: clip, update, gather.

        lr      in place of the optimizer's configured rate, finite and not negative (or ConfigError, and
                the step is still to be done); the schedule's factor applies to it too
        ballot  a few numbers that are summed over ranks in the step's own small collective

        Where the gradient norm or the loss is not finite, nothing is updated on any rank: in fp32 and bf16
        NonFiniteError is raised; in fp16 the step is skipped, which the report says, until the loss scale has
        backed off to its floor: then LossScaleError.
        """
        usage.check_complete(self._computed, self.micro_batches)
        if lr is not None:
            check_rates(lr)
        if self._access.is_open:
            raise UsageError("step() within full_parameters: leave that context first")
        self._failed = True  # until all have voted
        self._reducer.finish()
        self._live.before_vote()
        verdict = verdicts.reach(
            self.collectives,
            self._reducer.gradients,
            self._losses,
            ballot,
            micro_batches=self._total,
            reproducible=self.config.reproducible,
        )
        self._live.after_vote()
        self._reset_round()
        scale, loss = self.gate.scale, verdict.loss
        grad_norm = verdict.grad_norm / scale
        clip = self.config.clip_norm
        coefficient = 1.0 if clip is None else min(1.0, clip / (grad_norm + 1e-6))
        by_group = rates(self.config, self.optimizer.steps_done, lr=lr)
        passes = self.gate.passes(grad_norm=grad_norm, loss=loss, step=self.steps_done)
        if passes:
            gradients = assembly.held_gradients(
                self.collectives, self._reducer.gradients, stage=self.config.stage
            )
            self._live.begin_update()
            with self.collectives.ledger.net("optimizer"):
                self.optimizer.step(gradients, rates=by_group, divisor=scale / coefficient)
            self._live.end_update(self.steps_done + 1, whole=self.config.stage == 0)
        report = StepReport(
            step=self.steps_done + 1,
            loss=loss,
            grad_norm=grad_norm,
            clip_coefficient=coefficient if passes else 0.0,
            lr=by_group,
            skipped=not passes,
            skipped_steps=self.gate.skipped,
            loss_scale=scale,
            ballot=verdict.ballot,
        )
        self.interrupted_report = report
        if passes:
            assembly.share_parameters(self.collectives, self.units, stage=self.config.stage)
        self.steps_done += 1
        self._live.end_step(self.steps_done)
        self.interrupted_report = None
        self.collectives.steps += 1
        sent, transport, seconds = self.collectives.ledger.take()
        return replace(report, bytes_sent=sent, bytes_by_transport=transport, seconds=seconds)

    def full_parameters(
        self, *, write: bool = False, names: Sequence[str] | None = None
    ) -> AbstractContextManager[None]:
        """Within the context every parameter is whole on every rank; collective at every stage.

        write  what was modified goes to masters, parameters and shards of every rank on leaving; every rank
               must make the same edit, at a step boundary. Else parameters are to be read.
        names  patterns (with *) of parameters or modules: only the units that hold such are opened

        On leaving all ranks compare. UsageError on every rank, and nothing is kept, where a parameter was
        modified on some ranks only or otherwise than on others, was modified without `write`, or where the
        body failed on another rank.
        """
        self.require_state()
        boundary = self._computed == 0 and self._trace_ended
        opened = self._access.whole(write=write, names=names, at_boundary=boundary)
        return self._live.editing(opened, intact=lambda: self._access.intact) if write else opened

    def train(self, mode: bool = True) -> "ZeroEngine":
        self.module.train(mode)
        return self

    def eval(self) -> "ZeroEngine":
        return self.train(False)

    def detach(self) -> None:
        """Leave the group and take the hooks off the model, which is an ordinary module again.

        At stage 3 its parameters hold no values then: take a state dict before. The engine is of no use any
        more, and its memory goes with it. One that is dropped without this is never freed: its hooks hold it.
        """
        if self._detached:
            return
        self._detached = True
        self._gatherer.remove_hooks()
        self._reducer.remove_hooks()
        self._recomputation.remove()
        self._live.end()
        self.collectives.close()
        # They and the engine hold each other: without them nobody has to wait for the garbage collector.
        del self._gatherer, self._reducer, self._recomputation, self._hooks
        del self._freezing, self._access, self._accounts, self._pools

    def abort(self) -> None:
        """From any thread: a rank that waits for another on this host fails now, with PeerLostError."""
        self.collectives.abort()

    # -- what checkpoints and reports ask for -----------------------------------------------------

    @property
    def budget(self) -> budget.Budget:
        """The bytes predicted for this rank, with the activations that were measured."""
        return budget.predict(
            self.layout,
            self.config,
            self.rank,
            activation_bytes=self._saved.peak,
            buffer_bytes=self._live.buffer_bytes,
            keeps=self._live.keeps,
            save_copy=self.peak.save_copy.predicted,
        )

    def memory(self) -> MemoryReport:
        """The bytes of this rank by category, as allocated, and the process as the system sees it."""
        return self._accounts.report()

    # -- the state as a whole ---------------------------------------------------------------------

    def snapshots(self) -> list[Snapshot]:
        """What this rank holds that is whole and consistent, for `reshard.take_over`. Nothing is copied.

        To be called at the end of a group's life, after its last step or after any failure, before `detach`.
        The live state, unless an update was interrupted, and the copies that replicas hold. Their memory is
        kept until they are dropped.
        """
        return self._live.snapshots()

    @property
    def replicated_step(self) -> int | None:
        """The last step whose states all ranks and the keepers of their replicas hold; None without any."""
        return self._live.replicated_step

    def require_state(self) -> None:
        """Raises UsageError while the engine holds no whole state: blank, or interrupted in an update."""
        self._live.require()

    @property
    def step_under_way(self) -> tuple[bool, bool]:
        """Whether this rank has begun a step and not ended it, and whether its last call for it failed."""
        begun = self._computed > 0 or self._round > 0 or not self._trace_ended
        return begun or self._failed, self._failed

    def begin_filling(self, steps: Sequence[Sequence[float]] | None = None) -> Snapshot:
        """States are about to be written from outside; until `filled` the engine is of no use. Collective.

        steps  every rank's `step_under_way`, where that is known already

        Returns all places to be filled, as a snapshot whose meta says nothing. A step that failed on some
        rank is forgotten; where one is under way otherwise, UsageError on every rank, and nothing is changed.
        """
        self._leave_step(steps)
        return self._live.begin_filling()

    def filled(
        self,
        *,
        step: int,
        updates: int,
        gate: Mapping[str, Any] | None,
        state: StateId | None = None,
        whole: bool = False,
    ) -> None:
        """Masters, moments and frozen units hold another state now.

        step, updates, gate  where training stands: steps of data, the optimizer's count, the loss scale
        state  the name of the state, where other ranks may hold parts of it under that name
        whole  whether other ranks' parts of the parameters are up to date as well, at stages 1 and 2; else
               `refresh_parameters` has to follow
        """
        self.steps_done = step
        self._live.filled(step=step, updates=updates, gate=gate, name=state, whole=whole)

    def settle_replicas(self) -> None:
        """Wait until the last copy is complete at its keeper; at the next `step` it is at the latest."""
        self._live.before_vote()

    def editing(self) -> AbstractContextManager[None]:
        """Within the context masters or parameters are written, alike on every rank, and between steps."""
        self._leave_step()
        return self._live.editing(nullcontext())

    def refresh_parameters(self) -> None:
        """After `filled`: gather parameters from the owners of their masters. Collective."""
        assembly.share_parameters(self.collectives, self.units, stage=self.config.stage)
        self._live.gathered()
        self.collectives.ledger.take()

    # -- within a step ----------------------------------------------------------------------------

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """This micro-batch's share of the step's mean, times the loss scale in fp16."""
        if self.config.precision != "fp16":
            return loss / self._total
        # In fp32: a loss in fp16 times its scale would leave the range.
        return loss.float() * (self.gate.scale / self._total)

    def _active(self) -> int:
        """How many ranks, the first ones, have a micro-batch of their own in the current round."""
        if self._evaluating:
            return self.world_size  # everybody takes part
        return min(self.world_size, self._total - self._round * self.world_size)

    def _record(self, unit: FlatUnit, kind: str) -> None:
        if not self._evaluating:
            self._trace.append((unit, kind))

    def _after_reduce(self, unit: FlatUnit) -> None:
        self._record(unit, "reduce")
        if self.config.stage == 3:
            self._gatherer.release(unit)

    def _serve_idle_rounds(self) -> None:
        """After its last micro-batch a rank joins the rounds it has no share in, before anything else."""
        while self._round < budget.rounds(self._total, self.world_size):
            self._serve_round()
            self._end_round()

    def _end_round(self) -> None:
        """Before gradients are written over: every rank has read them. The last round ends with the step."""
        self._round += 1
        if self._round < budget.rounds(self._total, self.world_size):
            self.collectives.fence()
            self._reducer.free_buffers()

    def _serve_round(self) -> None:
        """Take part in a round's collectives without a micro-batch; all of its time counts as idle."""
        seconds = self.collectives.ledger.seconds
        working = dict(seconds)
        began = time.perf_counter()
        for unit, kind in self._trace:
            if kind == "reduce":
                self._reducer.serve(unit)
            else:
                self._gatherer.serve(unit, kind, self._active())
        for phase in ("reduce", "gather"):
            seconds[phase] = working.get(phase, 0.0)
        seconds["idle"] += time.perf_counter() - began

    def _train_only(self, names: frozenset[str]) -> None:
        self._reducer.expect(names)
        self.optimizer.select(names)

    def _leave_step(self, steps: Sequence[Sequence[float]] | None = None) -> None:
        """Be between two steps before states are written: see `begin_filling`."""
        if usage.abandons(self.collectives.gather_numbers(self.step_under_way) if steps is None else steps):
            self._reducer.begin_micro_batch()
            self.collectives.fence()  # every rank has read the gradients of what is forgotten
            self._reset_round()
            self._gatherer.forget()
            self._trace_ended = True

    def _reset_round(self) -> None:
        self._freezing.end_step()
        self._round = self._computed = 0
        self._failed = False
        self._losses.clear()
        self._reducer.clear()
        self._gatherer.end_step()

    def _cast(self, value: Any) -> Any:
        if self.config.precision == "fp32":
            return value
        dtype = held_dtype("compute", self.config.precision)
        return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)
