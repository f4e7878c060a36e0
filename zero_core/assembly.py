"""Whole flat tensors out of the owners' parts: at the end of an update, and at stage 0 before it.

Owns what each stage gathers there and from where. Knows nothing of forward and backward, where stage 3
gathers for itself.
"""

from collections.abc import Sequence

import torch

from zero_core.collectives import Collectives, Pending
from zero_core.reduction import UnitGradient
from zero_core.units import FlatUnit


def readable_parts(
    units: Sequence[FlatUnit], gradients: Sequence[UnitGradient], *, stage: int
) -> dict[int, torch.Tensor]:
    """This rank's part of each unit as others gather it: of gradients at stage 0, else of parameters."""
    if stage == 3:
        return {unit.index: unit.shard for unit in units if unit.shard is not None}
    if stage == 0:
        whole = [(gradient.unit, gradient.kept) for gradient in gradients]
    else:
        whole = [(unit, unit.full) for unit in units]
    return {unit.index: full[unit.start : unit.stop] for unit, full in whole if full is not None}


def held_gradients(
    collectives: Collectives, gradients: Sequence[UnitGradient], *, stage: int
) -> list[torch.Tensor]:
    """One gradient for each unit over the range the optimizer holds; stage 0 gathers them first."""
    if stage > 0:
        return [gradient.owned for gradient in gradients]
    held = []
    for gradient in gradients:
        assert gradient.kept is not None
        gradient.kept[gradient.unit.start : gradient.unit.stop].copy_(gradient.owned)
        held.append((gradient.unit, gradient.kept))
    _gather(collectives, held)
    collectives.fence()  # the optimizer's kernel scales gradients in place
    return [full[: unit.numel] for unit, full in held]


def share_parameters(collectives: Collectives, units: Sequence[FlatUnit], *, stage: int) -> None:
    """The update is done: stages 1 and 2 gather it; at stages 0 and 3 ranks only wait for all."""
    if stage in (1, 2):
        _gather(collectives, [(u, u.full) for u in units if u.unit.trainable and u.full is not None])
    else:
        collectives.fence()


def _gather(collectives: Collectives, whole: Sequence[tuple[FlatUnit, torch.Tensor]]) -> None:
    """Bring the owners' parts of these flat tensors, [padded] each, to all ranks."""
    collectives.fence()
    works: Pending = []
    for unit, full in whole:
        works += collectives.begin_gather(full, unit.chunk, unit.numel, kind="gather", tag=unit.index)
    collectives.finish_gather(works)
