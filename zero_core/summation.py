"""How the owner adds up what it receives, and sums that do not depend on who adds what.

A sum of floats depends on its order. In the ordinary mode the order is that of ranks, then of rounds, so it
changes with the number of ranks. In the reproducible mode the leaves of every sum are the step's
micro-batches in index order, whoever computed them, added in one fixed tree; and the few numbers that go
over all parameters (the gradient norm) or all micro-batches (the loss) are summed exactly.

Knows flat tensors and the order they come in; nothing of ranks, units or collectives.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Protocol

import torch

from zero_core.config import TILE_STEP

RUN = 1 << 16
"""Pieces are added in runs of this many elements, which stay in the cache."""

_MANTISSA_BITS = 53
_LOW_BITS = 27
_LOWEST_EXPONENT = 1100  # below any exponent of an fp64 number, negated
_EXPONENTS = 2 * _LOWEST_EXPONENT

EXPANSION = 48
"""Numbers that hold any exact sum of fp64 numbers: its range is 2,098 bits, and each holds 53 of them."""


class GradientSum(Protocol):
    """Adds up the gradients of one owned range, [owned], over the exchanges of one step."""

    owned: torch.Tensor
    """Where the sum is after `finish`; shorter-lived content before."""
    held_bytes: int
    """Bytes kept between exchanges beside buffers that others count."""

    @property
    def squares(self) -> "Squares | None":
        """`square_sum` of the step's sum, where it is known already."""

    def absorb(self, start: int, parts: Sequence[torch.Tensor]) -> None:
        """Take elements [start, start + len) of an exchange: a part for each micro-batch, in index order."""

    def end_exchange(self, leaves: int) -> None:
        """All pieces of an exchange of so many micro-batches have been absorbed."""

    def finish(self) -> None:
        """The step's sum is complete: bring it into `owned`."""

    def clear(self) -> None:
        """The next step starts from nothing."""


class RankOrderSum:
    """fp32 sums in the order of ranks, added to `owned` round by round.

    owned   [owned] fp32 where several rounds accumulate, else the compute dtype (rounded once)
    rounds  exchanges of a step; the squares of the sum are taken in the last one, while it is in the cache
    """

    def __init__(self, owned: torch.Tensor, *, counted_elsewhere: bool, rounds: int) -> None:
        self.owned = owned
        self.held_bytes = 0 if counted_elsewhere else owned.numel() * owned.element_size()
        self._rounds = rounds
        self._started = False
        self._exchanges = self._squared = 0
        self._squares: Squares = 0.0

    def absorb(self, start: int, parts: Sequence[torch.Tensor]) -> None:
        out = self.owned[start : start + parts[0].numel()]
        length = _run_length(out)
        scratch = torch.empty(min(length, out.numel() * (len(parts) > 1)), device=out.device)
        plain = not self._started and all(part.dtype == out.dtype == torch.float32 for part in parts)
        if start == 0:
            self._squares, self._squared = 0.0, 0
        for begin in range(0, out.numel(), length):
            run = slice(begin, begin + length)
            if plain and len(parts) == 2:
                torch.add(parts[0][run], parts[1][run], out=out[run])
            else:
                total = parts[0][run]
                if len(parts) > 1:
                    # Not summed in place: `out` may be one of the parts.
                    total = scratch[: out[run].numel()].copy_(total)
                    for part in parts[1:]:
                        total += part[run]
                out[run].add_(total) if self._started else out[run].copy_(total)
            if self._exchanges + 1 >= self._rounds and (start + begin) % length == 0:
                self._squares += _square(out[run])
                self._squared += out[run].numel()

    def end_exchange(self, leaves: int) -> None:
        self._started = self._started or leaves > 0
        self._exchanges += 1

    def finish(self) -> None:
        return None

    @property
    def squares(self) -> "Squares | None":
        """`square_sum` of the sum, if it was taken on the way: on the same runs, so the same bits."""
        return self._squares if self._squared == self.owned.numel() else None

    def clear(self) -> None:
        self._started = False
        self._exchanges = self._squared = 0
        self._squares = 0.0


class PairwiseTree:
    """The sum of M leaves as a balanced tree, kept as a binary counter: one accumulator for each bit of M.

    Leaf i goes up from level 0 as far as i has trailing ones, like a carry. The shape of the tree depends
    on M alone. Levels are fp32, [owned] each; `owned` is the highest.
    """

    def __init__(self, numel: int, *, leaves: int, device: torch.device) -> None:
        self._levels = torch.zeros((leaves.bit_length(), numel), dtype=torch.float32, device=device)
        self._count = 0
        self.owned = self._levels[-1]
        self.squares = None
        self.held_bytes = self._levels.numel() * 4

    def absorb(self, start: int, parts: Sequence[torch.Tensor]) -> None:
        for begin in range(0, parts[0].numel(), RUN):
            run = slice(begin, min(begin + RUN, parts[0].numel()))
            place = slice(start + run.start, start + run.stop)
            for leaf, part in enumerate(parts, start=self._count):
                carry, level = _widened(part[run]), 0
                while leaf >> level & 1:
                    carry = self._levels[level, place] + carry
                    level += 1
                self._levels[level, place] = carry

    def end_exchange(self, leaves: int) -> None:
        self._count += leaves

    def finish(self) -> None:
        """Add what is left on each level, from the lowest up."""
        full = [level for level in range(len(self._levels)) if self._count >> level & 1]
        for lower, upper in pairwise(full):
            self._levels[upper] += self._levels[lower]

    def clear(self) -> None:
        self._count = 0


Squares = float | torch.Tensor
"""A sum of squares; on a GPU a 0-d fp64 tensor there, so that nobody waits for it before the step's end."""


def square_sum(tensor: torch.Tensor) -> Squares:
    """Sum of the squares of all elements, run by run in order."""
    length = _run_length(tensor)
    return sum((_square(tensor[start : start + length]) for start in range(0, tensor.numel(), length)), 0.0)


def exact_square_sum(tensors: Sequence[torch.Tensor]) -> Fraction | None:
    """Sum of the squares, the same however the elements are cut into whole tiles; None if not finite.

    Squares are added in fp64 within fixed groups of 64 elements by a fixed tree; the groups' sums are added
    exactly, as integers for each exponent.
    """
    high = torch.zeros(_EXPONENTS, dtype=torch.int64)
    low = torch.zeros(_EXPONENTS, dtype=torch.int64)
    for tensor in tensors:
        for start in range(0, tensor.numel(), RUN):
            sums = _group_square_sums(tensor[start : start + RUN]).cpu()
            if not torch.isfinite(sums).all():
                return None
            mantissa, exponent = torch.frexp(sums)
            digits = (mantissa * 2.0**_MANTISSA_BITS).to(torch.int64)
            place = exponent.to(torch.int64) + _LOWEST_EXPONENT
            high.index_add_(0, place, digits >> _LOW_BITS)
            low.index_add_(0, place, digits & (2**_LOW_BITS - 1))
    total = 0
    for place in torch.nonzero(high + low).flatten().tolist():
        total += ((int(high[place]) << _LOW_BITS) + int(low[place])) << place
    return Fraction(total, 1 << (_MANTISSA_BITS + _LOWEST_EXPONENT))


def expand(value: Fraction | None) -> list[float]:
    """An exact sum as EXPANSION fp64 numbers that add up to it; nan for one that is not finite."""
    if value is None:
        return [math.nan] * EXPANSION
    found = []
    while value:
        found.append(float(value))
        value -= Fraction(found[-1])
    return found + [0.0] * (EXPANSION - len(found))


def collect(expansions: Sequence[Sequence[float]]) -> Fraction | None:
    """The exact sum of what several `expand` calls gave; None if any was not finite."""
    numbers = [number for expansion in expansions for number in expansion]
    if not all(map(math.isfinite, numbers)):
        return None
    return sum(map(Fraction, numbers), Fraction(0))


def _group_square_sums(run: torch.Tensor) -> torch.Tensor:
    """fp64 sums of squares of each 64 elements, the last group filled up with zeros."""
    squares = run.double().square_()
    missing = -squares.numel() % TILE_STEP
    if missing:
        squares = torch.nn.functional.pad(squares, (0, missing))
    width = TILE_STEP
    groups = squares.view(-1, width)
    while width > 1:
        width //= 2
        groups = groups[:, :width] + groups[:, width:]
    return groups[:, 0]


def _run_length(tensor: torch.Tensor) -> int:
    """Runs fit the cache of a CPU; a GPU takes everything at once."""
    return RUN if tensor.device.type == "cpu" else max(1, tensor.numel())


def _square(run: torch.Tensor) -> Squares:
    wide = run.float()
    square = torch.dot(wide, wide)
    return float(square) if run.device.type == "cpu" else square.double()


def _widened(part: torch.Tensor) -> torch.Tensor:
    """A new fp32 tensor with the part's values."""
    return part.float() if part.dtype != torch.float32 else part.clone()
