"""How a model's values come into the flat tensors of its units, before the first step.

Owns what is done once for each unit: the same initial values on every rank, the part that the stage keeps,
and fp32 masters taken from unrounded values. Knows nothing of steps, hooks or gradients.
"""

from collections.abc import Sequence

import torch
from torch import nn

from zero_core.arena import Arena
from zero_core.collectives import Collectives
from zero_core.config import ZeroConfig
from zero_core.optimizer import UnitStates
from zero_core.units import FlatUnit, UnitState


def partition(
    units: Sequence[FlatUnit], collectives: Collectives, config: ZeroConfig, arena: Arena
) -> list[UnitStates]:
    """Move every unit into its flat tensors and keep what the stage keeps; states of the trainable ones.

    arena  takes the states that are not the parameters themselves: `budget.optimizer_arena_bytes`
    """
    states = []
    for unit in units:
        if unit.unit.trainable:
            states.append(_states_of(unit, collectives, config, arena))
        else:
            flat = _initial(unit, unit.dtype, collectives, config)
            _place(unit, flat, collectives, stage=config.stage)
    return states


def bytes_of(model: nn.Module, device: torch.device) -> int:
    """Bytes of the model's own parameters on `device`, each storage once."""
    storages = {}
    for parameter in model.parameters():
        if parameter.device == device:
            storage = parameter.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _states_of(unit: FlatUnit, collectives: Collectives, config: ZeroConfig, arena: Arena) -> UnitStates:
    start, stop = (0, unit.numel) if config.stage == 0 else (unit.start, unit.stop)
    # Masters come from the unrounded values: the model is cast after they have been taken.
    original = _initial(unit, torch.float32, collectives, config)
    master = None
    if unit.dtype != torch.float32:
        master = arena.take(stop - start, torch.float32).copy_(original[start:stop])
    _place(unit, original, collectives, stage=config.stage)
    compute = unit.shard if unit.shard is not None else unit.full
    assert compute is not None
    if unit.shard is None:
        compute = compute[start:stop]
    return UnitStates(
        unit=unit,
        start=start,
        stop=stop,
        master=compute if master is None else master,
        compute=compute,
        momentum=arena.take(stop - start, torch.float32).zero_(),
        variance=arena.take(stop - start, torch.float32).zero_(),
    )


def _initial(
    unit: FlatUnit, dtype: torch.dtype, collectives: Collectives, config: ZeroConfig
) -> torch.Tensor:
    """[padded] of `dtype`: the unit's values before the first step, the same on every rank."""
    flat = unit.flatten(collectives.device, dtype)
    if config.broadcast_initial:
        collectives.broadcast(flat)
    return flat


def _place(unit: FlatUnit, flat: torch.Tensor, collectives: Collectives, *, stage: int) -> None:
    """Let the unit live where others can gather it from: whole, or this rank's part of it at stage 3.

    flat: [padded] of any dtype, rounded here to the unit's.
    """
    if stage == 3:
        unit.shard = collectives.allocate(unit.owned, unit.dtype)
        unit.shard.copy_(flat[unit.start : unit.stop])
        unit.unbind(collectives.device)
    else:
        full = collectives.allocate(unit.padded, unit.dtype)
        full.copy_(flat)
        unit.bind(full, UnitState.WHOLE)
