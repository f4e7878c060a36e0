"""Whole parameters for a while, to be read, or to be edited and written back.

Owns the one rule for edits: **every rank makes the same one**. On leaving, all ranks compare fingerprints of
every parameter; where they differ, or where something was modified that was to be read only, all ranks
raise and nothing is kept. Knows units, masters and shards; nothing of steps.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

import torch
from torch import nn

from zero_core.agreement import gather_bits
from zero_core.collectives import Collectives
from zero_core.errors import UsageError
from zero_core.gathering import Gatherer
from zero_core.links import Purpose
from zero_core.optimizer import UnitStates
from zero_core.units import FlatUnit, UnitState

_RUN = 1 << 16
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HALF = 32


@dataclass(frozen=True, slots=True)
class _Opened:
    """A unit that is whole for a while.

    start, stop  the range whose former values are kept: what this rank owns, at stage 0 all
    kept    [stop - start] compute dtype: the values before anybody could edit them
    prints  a fingerprint of each parameter then
    """

    unit: FlatUnit
    start: int
    stop: int
    kept: torch.Tensor
    prints: tuple[int, ...]


class ParameterAccess:
    """Opens units of one engine, one context at a time."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[FlatUnit],
        states: Sequence[UnitStates],
        collectives: Collectives,
        gatherer: Gatherer,
        *,
        stage: int,
    ) -> None:
        self._units = units
        self._states = {state.unit.index: state for state in states}
        self._collectives = collectives
        self._gatherer = gatherer
        self._stage = stage
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self.is_open = False
        self.intact = True
        """False from the moment that parameters may be edited until all ranks have the same ones again."""

    @contextmanager
    def whole(self, *, write: bool, names: Sequence[str] | None, at_boundary: bool) -> Iterator[None]:
        """See `ZeroEngine.full_parameters`. `at_boundary`: no micro-batch of the step has begun."""
        if self.is_open:
            raise UsageError("full_parameters is open already: leave that context first")
        units = self._select(names)
        self._agree_on_entry(units, write=write, at_boundary=at_boundary)
        self.is_open, self.intact = True, not write
        try:
            with self._gatherer.whole(units) if self._stage == 3 else nullcontext():
                opened = [self._open(unit) for unit in units]
                try:
                    yield
                except Exception:
                    with suppress(Exception):  # the error in the body is the one to be seen
                        self._close(opened, write=write, failed=True)
                    raise
                self._close(opened, write=write, failed=False)
        finally:
            self.is_open = False

    def _select(self, names: Sequence[str] | None) -> list[FlatUnit]:
        if names is None:
            return list(self._units)
        chosen: set[int] = set()
        for pattern in names:
            found = {
                unit.index
                for unit in self._units
                for parameter in unit.parameters
                if any(_matches(name, pattern) for name in self._names[id(parameter)])
            }
            if not found:
                raise UsageError(
                    f"no parameter or module is called {pattern!r}: give names as in named_parameters() or "
                    "named_modules(), with * for any part"
                )
            chosen |= found
        return [unit for unit in self._units if unit.index in chosen]

    def _agree_on_entry(self, units: Sequence[FlatUnit], *, write: bool, at_boundary: bool) -> None:
        chosen = {unit.index for unit in units}
        mine = [write, at_boundary, *(unit.index in chosen for unit in self._units)]
        rows = gather_bits(self._collectives, mine)
        for rank, row in enumerate(rows):
            if row != rows[0] and (row[0] != rows[0][0] or row[2:] != rows[0][2:]):
                raise UsageError(
                    f"rank {rank} asked full_parameters for other parameters than rank 0, or to write where "
                    "the other reads: call it with the same arguments on every rank"
                )
        begun = [rank for rank, row in enumerate(rows) if not row[1]]
        if write and begun:
            raise UsageError(
                f"full_parameters(write=True) within a step, on rank(s) {begun[:8]}: what was computed of it "
                "would not fit the new values; write after step() and before the next forward"
            )

    def _open(self, unit: FlatUnit) -> _Opened:
        assert unit.full is not None
        if unit.shard is not None:
            start, stop, kept = unit.start, unit.stop, unit.shard
        else:
            start, stop = (0, unit.numel) if self._stage == 0 else (unit.start, unit.stop)
            kept = unit.full[start:stop].clone()
        return _Opened(unit, start, stop, kept, _prints(unit))

    @torch.no_grad()
    def _close(self, opened: Sequence[_Opened], *, write: bool, failed: bool) -> None:
        """Compare with all ranks, then keep what was written or put back what was there."""
        misshapen = [name for item in opened for name in _reclaim(item.unit)]
        prints = [_prints(item.unit) for item in opened]
        row = [float(failed), float(bool(misshapen))]
        for item, found in zip(opened, prints, strict=True):
            for before, after in zip(item.prints, found, strict=True):
                row += (float(before != after), float(after >> _HALF), float(after & (1 << _HALF) - 1))
        rows = self._collectives.gather_numbers(row, purpose=Purpose.WHOLE)
        names = [slot.name for item in opened for slot in item.unit.unit.slots]
        problem = verdict(names, rows, write=write)
        if problem is not None:
            self._restore(opened)
            self.intact = True
            detail = f" (another shape now: {misshapen[:5]})" if misshapen else ""
            raise UsageError(problem + detail)
        if write:
            for item, found in zip(opened, prints, strict=True):
                if found != item.prints:
                    self._write_back(item)
            self._collectives.fence()  # before another rank gathers what was written
            self.intact = True

    def _restore(self, opened: Sequence[_Opened]) -> None:
        """The former values again, on every rank; at stage 3 the whole copies are dropped anyway."""
        if self._stage == 3:
            return
        for item in opened:
            unit = item.unit
            assert unit.full is not None
            unit.full[item.start : item.stop].copy_(item.kept)
            if self._stage > 0:
                self._collectives.gather_from_owners(
                    unit.full, unit.chunk, unit.numel, kind="access", tag=unit.index
                )

    def _write_back(self, item: _Opened) -> None:
        unit, state = item.unit, self._states.get(item.unit.index)
        assert unit.full is not None
        written = unit.full[item.start : item.stop]
        if state is not None and state.master.dtype != state.compute.dtype:
            assert (state.start, state.stop) == (item.start, item.stop), "masters of exactly that range"
            # Elements that nobody touched keep their unrounded masters.
            changed = _words(written) != _words(item.kept)
            state.master.copy_(torch.where(changed, written.float(), state.master))
        if unit.shard is not None:
            unit.shard.copy_(written)


def verdict(names: Sequence[str], rows: Sequence[Sequence[float]], *, write: bool) -> str | None:
    """Why what happened in the context must not be kept; None if it may be.

    rows: of each rank whether its body failed, whether a shape changed, and then for every parameter
    whether it was modified and the two halves of its fingerprint.
    """
    failed = [rank for rank, row in enumerate(rows) if row[0]]
    if failed:
        return f"rank(s) {failed[:8]} failed within full_parameters: see their errors; nothing was written"
    misshapen = [rank for rank, row in enumerate(rows) if row[1]]
    if misshapen:
        return (
            f"rank(s) {misshapen[:8]} gave a parameter another shape or dtype within full_parameters: "
            "nothing was written; edit values in place"
        )
    for index, name in enumerate(names):
        at = 2 + 3 * index
        modified = [rank for rank, row in enumerate(rows) if row[at]]
        if modified and not write:
            return (
                f"parameter {name} was modified on rank(s) {modified[:8]} in a context that only reads: "
                "nothing was written; use full_parameters(write=True)"
            )
        differing = [
            rank for rank, row in enumerate(rows) if row[at + 1 : at + 3] != rows[0][at + 1 : at + 3]
        ]
        if differing:
            return (
                f"parameter {name} holds other values on rank(s) {differing[:8]} than on rank 0 after "
                "full_parameters(write=True): nothing was written; every rank must make the same edit"
            )
    return None


def fingerprint(tensor: torch.Tensor) -> int:
    """64 bits of a contiguous tensor's content; any change of one element changes them.

    A sum of the elements' bits times odd numbers, modulo 2**64: as quick as reading the memory.
    """
    words = _words(tensor.detach().reshape(-1))
    weights, total = _weights(tensor.device), words.numel()
    for start in range(0, words.numel(), _RUN):
        run = words[start : start + _RUN].to(torch.int64)
        total = (total * 0x9E3779B97F4A7C15 + int((run * weights[: run.numel()]).sum())) % 2**64
    return total


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """[_RUN] int64, odd."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (_RUN,), generator=generator) | 1).to(device)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern names the parameter or a module around it."""
    while name:
        if fnmatchcase(name, pattern):
            return True
        name = name.rpartition(".")[0]
    return False


def _prints(unit: FlatUnit) -> tuple[int, ...]:
    assert unit.full is not None
    return tuple(fingerprint(view) for view in unit.views(unit.full))


def _reclaim(unit: FlatUnit) -> list[str]:
    """Bring values of parameters whose `.data` was replaced into the unit; names of those that do not fit."""
    assert unit.full is not None
    misshapen = []
    for slot, view, parameter in zip(unit.unit.slots, unit.views(unit.full), unit.parameters, strict=True):
        if parameter.shape != view.shape or parameter.dtype != view.dtype:
            misshapen.append(slot.name)
        elif parameter.data_ptr() != view.data_ptr() or not parameter.is_contiguous():
            view.copy_(parameter)
    if unit.state is UnitState.WHOLE:
        unit.bind(unit.full, UnitState.WHOLE)
    return misshapen


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers of the same size, so that nan equals itself and -0 is not 0."""
    return tensor.view(_WORDS[tensor.element_size()])
