"""What all ranks find of a step in one small collective, before any of them updates: the same bits on all.

Knows gradients' owned parts and losses as numbers; nothing of what is made of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_core.collectives import Collectives
from zero_core.links import Purpose
from zero_core.reduction import UnitGradient
from zero_core.summation import EXPANSION, collect, exact_square_sum, expand


@dataclass(frozen=True, slots=True)
class Verdict:
    """grad_norm: of the whole gradient; loss: mean over micro-batches; ballot: sums over ranks. fp64."""

    grad_norm: float
    loss: float
    ballot: tuple[float, ...]


def reach(
    collectives: Collectives,
    gradients: Sequence[UnitGradient],
    losses: Sequence[torch.Tensor],
    ballot: Sequence[float],
    *,
    micro_batches: int,
    reproducible: bool,
) -> Verdict:
    """Collective. `losses`: this rank's, 0-d, of `micro_batches` over all ranks.

    Reproducible: sums are exact, so that they do not depend on how many ranks add them up. What is not finite
    comes out as nan.
    """
    own_losses = [float(loss) for loss in losses]
    if reproducible:
        exact = (
            *expand(exact_square_sum([gradient.owned for gradient in gradients])),
            *expand(collect([own_losses])),
        )
        rows = collectives.gather_numbers((*exact, *ballot), purpose=Purpose.STEP)
        squares = collect([row[:EXPANSION] for row in rows])
        total_loss = collect([row[EXPANSION : 2 * EXPANSION] for row in rows])
        norm = math.nan if squares is None else math.sqrt(squares)
        mean = math.nan if total_loss is None else float(total_loss / micro_batches)
        votes = [row[2 * EXPANSION :] for row in rows]
        return Verdict(norm, mean, tuple(sum(column) for column in zip(*votes, strict=True)))
    square_sum = float(sum(gradient.square_sum() for gradient in gradients))
    mine = (square_sum, math.fsum(own_losses) / micro_batches, *ballot)
    total, mean, *ballots = collectives.sum_in_rank_order(mine, purpose=Purpose.STEP)
    return Verdict(math.sqrt(total) if total >= 0 else math.nan, mean, tuple(ballots))
