"""How a model's values come into the flat tensors of its units, before the first step.

Owns what is done once for each unit: the same initial values on every rank, the part that the stage keeps,
and fp32 masters taken from unrounded values. Knows nothing of steps, hooks or gradients.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zero_core.arena import Arena
from zero_core.collectives import Collectives
from zero_core.config import ZeroConfig
from zero_core.materialise import Initialise, initial_values
from zero_core.optimizer import UnitStates
from zero_core.units import FlatUnit, UnitState


def partition(
    model: nn.Module,
    units: Sequence[FlatUnit],
    collectives: Collectives,
    config: ZeroConfig,
    initialise: Initialise | None,
    arena: Arena,
    *,
    blank: bool = False,
) -> list[UnitStates]:
    """Move every unit into its flat tensors and keep what the stage keeps; states of the trainable ones.

    One unit at a time: a model that has values is copied unit by unit, one on the meta device never exists
    whole at stage 3, and once at the others. `arena` takes the states that are not the parameters
    themselves: `budget.optimizer_arena_bytes`. A `blank` model's states have their places and no values:
    whatever is to fill them writes to memory that nobody has touched.
    """
    states = {}
    given = _no_values if blank else initial_values
    for unit, flat in given(model, units, collectives.device, initialise):
        if config.broadcast_initial and flat is not None:
            collectives.broadcast(flat)
        if unit.unit.trainable:
            states[unit.index] = _states_of(unit, flat, collectives, config, arena)
        else:
            _place(unit, flat, collectives, stage=config.stage)
        del flat  # before the next unit is begun
    return [states[index] for index in sorted(states)]


def device_of(model: nn.Module) -> torch.device:
    """Where the model's values are; the CPU for one on the meta device."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def bytes_of(model: nn.Module, device: torch.device) -> int:
    """Bytes of the model's own parameters on `device`, each storage once."""
    storages = {}
    for parameter in model.parameters():
        if parameter.device == device:
            storage = parameter.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _no_values(
    model: nn.Module, units: Sequence[FlatUnit], device: torch.device, initialise: Initialise | None
) -> Iterator[tuple[FlatUnit, torch.Tensor | None]]:
    """Each unit without values. A model on the meta device is initialised first: its buffers need it."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        for _ in initial_values(model, units, device, initialise):
            pass
    for unit in units:
        yield unit, None


def _states_of(
    unit: FlatUnit, original: torch.Tensor | None, collectives: Collectives, config: ZeroConfig, arena: Arena
) -> UnitStates:
    """Place a trainable unit whose values are in `original`, [padded] fp32, if any; build its states."""
    start, stop = (0, unit.numel) if config.stage == 0 else (unit.start, unit.stop)
    # Masters come from the unrounded values: the model is cast after they have been taken.
    master = None
    if unit.dtype != torch.float32:
        master = arena.take(stop - start, torch.float32)
        if original is not None:
            master.copy_(original[start:stop])
    _place(unit, original, collectives, stage=config.stage)
    compute = unit.shard if unit.shard is not None else unit.full
    assert compute is not None
    if unit.shard is None:
        compute = compute[start:stop]
    master = compute if master is None else master
    moments = {kind: arena.take(stop - start, torch.float32) for kind in config.optimizer.moments}
    for moment in moments.values() if original is not None else ():
        moment.zero_()
    return UnitStates(unit, start, stop, master, compute, moments.get("momentum"), moments.get("variance"))


def _place(unit: FlatUnit, flat: torch.Tensor | None, collectives: Collectives, *, stage: int) -> None:
    """Let the unit live where others can gather it from: whole, or this rank's part of it at stage 3.

    flat: [padded] of any dtype, rounded here to the unit's; None: no values yet.
    """
    for parameter in unit.parameters:
        parameter.grad = None  # an engine before this one may have been interrupted in its backward
    if stage == 3:
        unit.shard = collectives.allocate(unit.owned, unit.dtype)
        if flat is not None:
            unit.shard.copy_(flat[unit.start : unit.stop])
        unit.unbind(collectives.device)
    else:
        full = collectives.allocate(unit.padded, unit.dtype)
        if flat is not None:
            full.copy_(flat)
        unit.bind(full, UnitState.WHOLE)
