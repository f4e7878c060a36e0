"""Which parameters are trained in a step: `requires_grad` as every rank has it at the step's first forward.

Owns the comparison between ranks and what follows from a change: a parameter frozen after the engine was
built keeps its place, its values and its optimizer state, and is not stepped. Knows neither how gradients
are reduced nor how parameters are stepped.
"""

from collections.abc import Callable, Sequence

from zero_core.agreement import pack, unpack
from zero_core.collectives import Collectives
from zero_core.errors import ModelError, UsageError
from zero_core.links import Purpose
from zero_core.units import FlatUnit


class Freezing:
    """Watches `requires_grad` of all parameters; `apply` is told which names are trained from now on."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        collectives: Collectives,
        apply: Callable[[frozenset[str]], None],
    ) -> None:
        self._collectives = collectives
        self._apply = apply
        self._parameters = [p for unit in units for p in unit.parameters]
        self._names = [slot.name for unit in units for slot in unit.unit.slots]
        self._steppable = [unit.unit.trainable for unit in units for _ in unit.parameters]
        self._trained = list(self._steppable)
        self._packed = pack(self._trained)
        self._checked = False

    def check(self) -> None:
        """Before a training forward; the first one of a step compares all ranks, the others only look.

        Raises ModelError on every rank where ranks differ, or where a parameter is to be trained that was
        frozen when the engine was built; UsageError where the set changed within a step.
        """
        now = [parameter.requires_grad for parameter in self._parameters]
        if self._checked:
            if now != self._trained:
                changed = [n for n, a, b in zip(self._names, now, self._trained, strict=True) if a != b]
                raise UsageError(
                    f"requires_grad of {changed[:5]} changed within a step: freeze and unfreeze after step() "
                    "and before the next forward"
                )
            return
        packed = self._packed if now == self._trained else pack(now)
        rows = self._collectives.gather_numbers(packed, purpose=Purpose.TRAINED)
        if packed is not self._packed or any(row != packed for row in rows):
            problem = objection(self._names, self._steppable, [unpack(row, len(now)) for row in rows])
            if problem is not None:
                raise ModelError(problem)
        self._checked = True
        if now != self._trained:
            self._trained, self._packed = now, packed
            self._apply(frozenset(n for n, trained in zip(self._names, now, strict=True) if trained))

    def end_step(self) -> None:
        """Parameters may be frozen and unfrozen again."""
        self._checked = False


def objection(names: Sequence[str], steppable: Sequence[bool], rows: Sequence[Sequence[bool]]) -> str | None:
    """What is wrong with every rank's row of `requires_grad`, the first parameter named; None if nothing."""
    for position, name in enumerate(names):
        column = [row[position] for row in rows]
        trained = [rank for rank, bit in enumerate(column) if bit]
        if trained and not steppable[position]:
            return (
                f"parameter {name} was frozen when the engine was built and requires a gradient now, on "
                f"rank(s) {trained[:8]}: there is no optimizer state for it; build the engine with it "
                "trainable and freeze it right after with requires_grad_(False)"
            )
        if len(set(column)) > 1:
            frozen = [rank for rank, bit in enumerate(column) if not bit]
            return (
                f"parameter {name} is frozen on rank(s) {frozen[:8]} and trained on rank(s) {trained[:8]}: "
                "freeze the same parameters on every rank"
            )
    return None
