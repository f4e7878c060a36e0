"""Gradients on their way from autograd to their owners.

Owns the hooks that take a parameter's gradient as soon as backward has finished it, the flat gradients,
and the owned sums. A unit is reduced when all its gradients are there and all units after it have been:
last unit first, a fixed order, so that ranks whose autograd runs differ slightly still meet in the same
collectives. Knows nothing of optimizers, nor of how parameters are held.

Reductions go on while backward fills further units (`overlap`). One is finished at the first exchange at
which all ranks are known to have announced it; a rank waits only where too many are under way, or where it
needs a buffer and all are in use.

When a buffer may be filled again, and why there is always one. Every notice says which reductions its rank
is through with, and a buffer rests until all ranks on the host have said so of its reduction. That alone
makes it safe, at any depth, whether reductions are finished early or late, with data of one's own or
without. Where whole gradients are lent, at most D reductions are under way when backward goes on
(`residency.LENT_DEPTH`; less between hosts), so who announces reduction k has finished k - D. A rank that
finds no buffer finishes its own up to its newest, k. For that it needs no more than that all others
announce k, and the one furthest behind never has to wait. Then all have said that they are through with k -
D: at most D buffers rest, and D + 1 are enough. Without overlap the newest one rests until the next notice,
so there are 2. A fence, and the end of a step, free all: every rank has finished all its reductions before
it comes there.

One mechanism for all stages: every micro-batch is reduced to the owners. The stages differ in what they
keep: whole flat gradients (0 and 1), or only the owned part (2 and 3), a whole one being borrowed
while backward fills it.

The root unit comes last whatever its index: its module spans the model, so its gradients do too.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from zero_core import budget
from zero_core.buffers import BufferPool
from zero_core.collectives import Collectives, Exchange
from zero_core.errors import ModelError
from zero_core.residency import LENT_DEPTH
from zero_core.summation import GradientSum, PairwiseTree, RankOrderSum, Squares, square_sum
from zero_core.units import FlatUnit
from zero_core.widening import unseen

_KEPT_DEPTH = 8
"""Reductions that may be under way where whole gradients are kept: there each has a place of its own."""


class UnitGradient:
    """The gradient of one trainable unit.

    kept      [padded] compute dtype: what backward fills in stages 0 and 1; None in 2 and 3
    borrowed  [capacity] compute dtype: what backward fills in stages 2 and 3, and in every stage what comes
              after the unit's turn (a nested backward); lent by the pool until it is reduced
    total     what this rank's part adds up to over ranks and micro-batches; in stages 0 and 1 without
              accumulation it lies in `kept`
    """

    __slots__ = ("borrowed", "expected", "filled", "kept", "reduced", "total", "unit")

    total: GradientSum

    def __init__(self, unit: FlatUnit) -> None:
        self.unit = unit
        self.kept: torch.Tensor | None = None
        self.borrowed: torch.Tensor | None = None
        self.filled = [False] * len(unit.parameters)
        self.expected = [True] * len(unit.parameters)
        """Whether backward is to fill it: not where a parameter is frozen for now."""
        self.reduced = False
        """Whether the unit's turn in the current micro-batch is over."""

    @property
    def complete(self) -> bool:
        return all(filled or not due for filled, due in zip(self.filled, self.expected, strict=True))

    @property
    def owned(self) -> torch.Tensor:
        """[owned] the step's gradient of this rank's part, once it is complete."""
        return self.total.owned

    def square_sum(self) -> Squares:
        """Of the owned part, as rounded to the compute dtype."""
        known = self.total.squares if self.owned.dtype == self.unit.dtype else None
        return square_sum(self.owned) if known is None else known


class Reducer:
    """Collects and reduces the gradients of all trainable units."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        collectives: Collectives,
        pool: BufferPool,
        *,
        keep_full: bool,
        leaves: int,
        reproducible: bool,
        overlap: bool,
        active: Callable[[], int],
        after_reduce: Callable[[FlatUnit], None],
    ) -> None:
        self._collectives = collectives
        self._pool = pool
        self._keep_full = keep_full
        self._leaves = leaves
        self._reproducible = reproducible
        self._under_way: deque[tuple[Exchange, torch.Tensor | None]] = deque()
        """Reductions that go on while backward fills further units, and the buffers they are read from."""
        self._cooling: deque[tuple[Exchange, torch.Tensor]] = deque()
        """Those that this rank has finished, while other ranks may still read its buffers."""
        self._depth = _depth(collectives, keep_full=keep_full, overlap=overlap)
        self._accumulates = leaves > collectives.world_size
        self._active = active
        self._after_reduce = after_reduce
        self.gradients = [UnitGradient(unit) for unit in units if unit.unit.trainable]
        self._order = sorted(self.gradients, key=lambda g: (g.unit.unit.root, -g.unit.index))
        self._by_unit = {gradient.unit.index: gradient for gradient in self.gradients}
        self._next = 0
        self._handles: list[RemovableHandle] = []
        for gradient in self.gradients:
            self._allocate(gradient)
            for position, parameter in enumerate(gradient.unit.parameters):
                hook = self._collector(gradient, position)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def expect(self, trained: frozenset[str]) -> None:
        """From now on wait for the gradients of these parameters only; those of others are zeros."""
        for gradient in self.gradients:
            gradient.expected = [slot.name in trained for slot in gradient.unit.unit.slots]

    def begin_micro_batch(self) -> None:
        """Forget what an interrupted backward may have left."""
        self._finish_exchanges()
        self._next = 0
        for gradient in self.gradients:
            gradient.filled = [False] * len(gradient.filled)
            gradient.reduced = False
            self._give_back(gradient)
            for parameter in gradient.unit.parameters:
                parameter.grad = None

    def end_micro_batch(self) -> None:
        """Reduce the units that backward left incomplete; an absent gradient counts as zeros."""
        while self._next < len(self._order):
            self._reduce(self._order[self._next])
            self._next += 1
        for gradient in self._order:
            if any(gradient.filled):  # a gradient that came after its unit's turn
                self._refuse_late(gradient)
                self._reduce(gradient)
        self._finish_exchanges()

    def serve(self, unit: FlatUnit) -> None:
        """Take part in one reduction of a micro-batch this rank has no share in: sum, but add nothing."""
        gradient = self._by_unit[unit.index]
        gradient.reduced = False
        self._exchange(gradient)
        self._finish_exchanges()

    def free_buffers(self) -> None:
        """All ranks have read what they needed: every buffer is free again."""
        while self._cooling:
            self._pool.take_back(self._cooling.popleft()[1])

    def finish(self) -> None:
        """The step's gradient is complete: its fp32 sum, rounded once to the compute dtype at every stage."""
        for gradient in self.gradients:
            gradient.total.finish()
            if gradient.owned.dtype != gradient.unit.dtype:
                gradient.owned.copy_(gradient.owned.to(gradient.unit.dtype))

    def clear(self) -> None:
        """After a step: the next micro-batch starts new sums."""
        self.free_buffers()
        for gradient in self.gradients:
            gradient.total.clear()

    @property
    def held_bytes(self) -> int:
        """Bytes of the gradients that are kept between micro-batches."""
        total = 0
        for gradient in self.gradients:
            unit = gradient.unit
            if self._keep_full:
                total += unit.numel * unit.dtype.itemsize
            total += gradient.total.held_bytes
        return total

    @property
    def padding_bytes(self) -> int:
        """Bytes of the tails of the whole gradients that are kept."""
        if not self._keep_full:
            return 0
        return sum((g.unit.padded - g.unit.numel) * g.unit.dtype.itemsize for g in self.gradients)

    def _allocate(self, gradient: UnitGradient) -> None:
        unit, device = gradient.unit, self._collectives.device
        if self._keep_full:
            gradient.kept = self._collectives.allocate(unit.padded, unit.dtype)
        if self._reproducible:
            gradient.total = PairwiseTree(unit.owned, leaves=self._leaves, device=device)
            return
        rounds = budget.rounds(self._leaves, self._collectives.world_size)
        if gradient.kept is not None and not self._accumulates:
            kept = gradient.kept[unit.start : unit.stop]
            gradient.total = RankOrderSum(kept, counted_elsewhere=True, rounds=rounds)
        else:
            dtype = torch.float32 if self._accumulates else unit.dtype
            owned = torch.zeros(unit.owned, dtype=dtype, device=device)
            gradient.total = RankOrderSum(owned, counted_elsewhere=False, rounds=rounds)

    def _refuse_late(self, gradient: UnitGradient) -> None:
        if self._reproducible:
            slots = gradient.unit.unit.slots
            late = [slot.name for slot, filled in zip(slots, gradient.filled, strict=True) if filled]
            raise ModelError(
                f"gradients of {late[:5]} came after their unit had been reduced (a backward in backward): "
                "a sum in fixed order needs each once; use activation checkpointing with use_reentrant=False"
            )

    def _collector(self, gradient: UnitGradient, position: int) -> Callable[[torch.Tensor], None]:
        slot = gradient.unit.unit.slots[position]

        @unseen
        def collect(parameter: torch.Tensor) -> None:
            grad = parameter.grad
            assert grad is not None
            if grad.is_sparse:
                raise ModelError(
                    f"parameter {slot.name} has a sparse gradient: use a dense one (sparse=False)"
                )
            place = self._filling(gradient)[slot.offset : slot.stop].view(slot.shape)
            if gradient.filled[position]:
                place.add_(grad)
            else:
                place.copy_(grad)
            gradient.filled[position] = True
            parameter.grad = None
            self._advance()

        return collect

    def _advance(self) -> None:
        while self._next < len(self._order) and self._order[self._next].complete:
            self._reduce(self._order[self._next])
            self._next += 1

    def _reduce(self, gradient: UnitGradient) -> None:
        full = self._filling(gradient)
        for slot, filled in zip(gradient.unit.unit.slots, gradient.filled, strict=True):
            if not filled:
                full[slot.offset : slot.stop].zero_()
        self._exchange(gradient)
        gradient.filled = [False] * len(gradient.filled)
        gradient.reduced = True
        self._after_reduce(gradient.unit)

    def _exchange(self, gradient: UnitGradient) -> None:
        """Start the unit's reduction; finish what needs no waiting, and the oldest if too many are left."""
        self._finish_exchanges(down_to=max(0, self._depth - 1))
        unit, full = gradient.unit, self._filling(gradient)
        exchange = self._collectives.begin_reduce(
            full, unit.chunk, unit.numel, gradient.total, active=self._active(), tag=unit.index
        )
        self._under_way.append((exchange, gradient.borrowed))
        gradient.borrowed = None
        self._finish_ready()
        self._finish_exchanges(down_to=self._depth)

    def _finish_ready(self) -> None:
        self._collectives.catch_up()
        while self._under_way and self._collectives.is_ready(self._under_way[0][0]):
            self._finish_oldest()
        self._reclaim()

    def _finish_exchanges(self, *, down_to: int = 0) -> None:
        while len(self._under_way) > down_to:
            self._finish_oldest()
        self._reclaim()

    def _finish_oldest(self) -> None:
        exchange, buffer = self._under_way.popleft()
        self._collectives.finish_reduce(exchange)
        if buffer is not None:
            self._cooling.append((exchange, buffer))

    def _reclaim(self) -> None:
        """Give back the buffers that no rank reads any more, as far as is known."""
        while self._cooling and self._collectives.read_by_all(self._cooling[0][0]):
            self._pool.take_back(self._cooling.popleft()[1])

    def _filling(self, gradient: UnitGradient) -> torch.Tensor:
        """Where the unit's gradients of this micro-batch go: [padded], arbitrary where not filled."""
        if gradient.kept is not None and not gradient.reduced:
            return gradient.kept
        if gradient.borrowed is None:
            gradient.borrowed = self._borrow(gradient.unit.capacity, gradient.unit.dtype)
        return gradient.borrowed

    def _borrow(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer that nobody reads; waits for other ranks rather than for new memory."""
        if not self._pool.has_free(numel, dtype):
            self._finish_ready()
        while self._under_way and not self._pool.has_free(numel, dtype):
            self._finish_exchanges(down_to=len(self._under_way) - 1)
        return self._pool.lend(numel, dtype)

    def _give_back(self, gradient: UnitGradient) -> None:
        if gradient.borrowed is not None:
            self._pool.take_back(gradient.borrowed)
            gradient.borrowed = None


def _depth(collectives: Collectives, *, keep_full: bool, overlap: bool) -> int:
    """How many reductions may be under way when backward goes on."""
    if collectives.world_size == 1 or not overlap:
        return 0
    if not collectives.concurrent:
        return 1
    return _KEPT_DEPTH if keep_full else LENT_DEPTH
