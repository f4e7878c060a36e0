"""Where one rank's state of training stands: whole or not, of which step, and in how many places.

Owns the answer to "what may be taken over from this rank": its live state while no update, load or edit is
under way, and the copies that replicas hold of it. The engine tells it what happens; it knows nothing of how
a step is computed, nor of who takes over what.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zero_core import budget
from zero_core.collectives import Collectives
from zero_core.config import ZeroConfig
from zero_core.errors import UsageError
from zero_core.layout import Layout
from zero_core.moving import Form, StateId
from zero_core.optimizer import FlatOptimizer
from zero_core.precision import StepGate
from zero_core.replica import REGION, Replicas
from zero_core.snapshot import Snapshot, Standing, form_of, persistent_buffers, take
from zero_core.units import FlatUnit


class LiveState:
    """The state of one engine, and its copies.

    form  what the states of this group look like
    """

    form: Form

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        config: ZeroConfig,
        collectives: Collectives,
        *,
        units: Sequence[FlatUnit],
        optimizer: FlatOptimizer,
        gate: StepGate,
        generation: int,
    ) -> None:
        self.form = form_of(module, layout, config)
        self._module = module
        self._rank = collectives.rank
        self._collectives = collectives
        self._units = units
        self._optimizer = optimizer
        self._gate = gate
        self._generation = generation
        self._owes_copy = False
        """Whether what was taken over has no replica yet: it has one after the first step."""
        self._standing: Standing | None = None
        """None while there is no whole state: blank, within an update, or being filled or edited."""
        self._replicas: Replicas | None = None
        self.buffer_bytes = sum(budget.aligned(size) for _, size in self.form.buffers)
        if budget.replicates(layout, config, buffer_bytes=self.buffer_bytes):
            self._replicas = Replicas(module, collectives, self.form, config, optimizer.states, units)

    # -- what becomes of it -----------------------------------------------------------------------

    def require(self) -> None:
        """Raises UsageError while there is no whole state."""
        if self._standing is None:
            raise UsageError(
                f"rank {self._rank} holds no whole state: its engine was built blank, or an update, a load "
                "or an edit was interrupted; fill it with reshard.take_over or checkpoint.load"
            )

    def begin(self) -> None:
        """Initial values are there."""
        self._standing = self._now(0, whole=True)
        self._replicate(edited=True)

    def before_vote(self) -> None:
        """This rank is about to vote on a step: what it copied before is complete."""
        if self._replicas is not None:
            self._replicas.settle()

    def after_vote(self) -> None:
        """All ranks have voted."""
        if self._replicas is not None:
            self._replicas.commit()

    def begin_update(self) -> None:
        self._standing = None

    def end_update(self, step: int, *, whole: bool) -> None:
        """Masters and moments are those of `step`; parameters of other ranks are too if `whole`."""
        self._standing = self._now(step, whole=whole)

    def end_step(self, step: int) -> None:
        """The step is over, skipped or not."""
        self._standing = self._now(step, whole=True)
        if self._replicas is not None and (self._owes_copy or self._replicas.due(step)):
            self._replicate(edited=self._owes_copy)

    def begin_filling(self) -> Snapshot:
        """States are about to be written from outside. Returns the places, as a snapshot of no state."""
        self._standing = None
        if self._replicas is not None:
            self._replicas.begin_edit()
        return self._snapshot(self._now(0, whole=True))

    @torch.no_grad()
    def filled(
        self, *, step: int, updates: int, gate: Mapping[str, Any] | None, name: StateId | None, whole: bool
    ) -> None:
        """See `ZeroEngine.filled`. What has a name lies elsewhere too: its copy can wait for a step."""
        self._optimizer.steps_done = updates
        self._gate.load_state_dict(gate)
        for held in self._optimizer.states:
            if held.master.dtype != held.compute.dtype:
                held.compute.copy_(held.master)
        found = self._now(step, whole=whole)
        self._standing = found if name is None else replace(found, state=name)
        if name is None:
            self._replicate(edited=True)
        else:
            self._owes_copy = True

    def gathered(self) -> None:
        """Other ranks' parts of the parameters are up to date too."""
        if self._standing is not None:
            self._standing = replace(self._standing, whole=True)

    @contextmanager
    def editing(
        self, opened: AbstractContextManager[None], *, intact: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Values are edited from outside, alike on every rank, within the context `opened`.

        intact  after an error: whether all ranks have the former values again
        """
        self.require()
        before = self._standing
        assert before is not None
        try:
            with opened:
                self.begin_filling()
                yield
        except BaseException:
            if intact():
                self._standing = before
                if self._replicas is not None:
                    self._replicas.undo_edit()
            raise
        # Copies of the state as it was may still lie about.
        self._standing = replace(before, state=replace(before.state, revision=before.state.revision + 1))
        self._replicate(edited=True)

    def end(self) -> None:
        """The engine takes no further part in its group."""
        self._standing = None
        if self._replicas is not None:
            self._replicas.close()

    # -- what there is of it ----------------------------------------------------------------------

    def snapshots(self) -> list[Snapshot]:
        """See `ZeroEngine.snapshots`."""
        copies = [] if self._replicas is None else self._replicas.snapshots()
        standing = self._standing
        if standing is None:
            return copies
        live = self._snapshot(standing)
        then = None if self._replicas is None else self._replicas.buffers_of(standing.state)
        if then is not None:
            live = replace(live, buffers=then)
        return [live, *(c for c in copies if c.meta.replica or c.meta.state != standing.state)]

    @property
    def replicated_step(self) -> int | None:
        return None if self._replicas is None else self._replicas.committed

    @property
    def published(self) -> dict[int, torch.Tensor]:
        """What ranks on this host read of the copies, by the number it is published under."""
        return {} if self._replicas is None else {REGION: self._replicas.memory}

    def connect(self) -> None:
        """All ranks have published where their copies lie."""
        if self._replicas is not None:
            self._replicas.connect()

    @property
    def replica_bytes(self) -> int:
        """Memory of this rank's own that copies take."""
        return 0 if self._replicas is None else self._replicas.held_bytes

    @property
    def keeps(self) -> list[int]:
        """Ranks of other hosts whose copies this rank keeps."""
        return [] if self._replicas is None else self._replicas.far_ranks

    # -- within -----------------------------------------------------------------------------------

    def _now(self, step: int, *, whole: bool) -> Standing:
        name = StateId(step, self._generation)
        return Standing(name, self._optimizer.steps_done, self._gate.state_dict(), whole)

    def _replicate(self, *, edited: bool) -> None:
        if self._replicas is not None and self._standing is not None:
            self._replicas.replicate(self._standing, edited=edited)
            self._owes_copy = False

    def _snapshot(self, standing: Standing) -> Snapshot:
        return take(
            self.form,
            self._rank,
            standing,
            states=self._optimizer.states,
            units=self._units,
            buffers=persistent_buffers(self._module),
            memory=self._collectives.shared_memory(),
        )
