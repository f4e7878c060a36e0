"""State dicts of a partitioned model, in memory: whole ones by name, and this rank's part of everything.

A full dict has the names and shapes of the model itself, as `module.state_dict()` would give them if nothing
were partitioned. A sharded one holds the flat ranges of one rank, optimizer states among them, and goes
back into an engine of the same N and stage; other ones are the business of `checkpoint`. All functions
here are collective, and an error on one rank is an error on all. Knows nothing of files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from zero_core.agreement import together
from zero_core.engine import ZeroEngine
from zero_core.errors import StateDictError, UsageError
from zero_core.snapshot import HeldState, held_states, persistent_buffers
from zero_core.units import FlatUnit


@dataclass(frozen=True, slots=True)
class _Entry:
    """A parameter's place, and every name it has in the model's state dict (several if it is tied)."""

    position: int
    names: tuple[str, ...]


def full_state_dict(
    engine: ZeroEngine, *, rank0_only: bool = False, dtype: Literal["master"] | None = None
) -> dict[str, Any]:
    """The whole model by its own names, on the CPU: parameters, a tied one under each name, and buffers.

    rank0_only  other ranks help, and get an empty dict
    dtype       None: as held, floating parameters in the compute dtype; "master": those in fp32, unrounded

    Collective. Goes unit by unit: beside the result one unit is whole at a time. Buffers, and what modules
    give as extra state, are this rank's own.
    """
    if dtype not in (None, "master"):
        raise UsageError(f"dtype {dtype!r} of a full state dict must be None or 'master'")
    engine.require_state()
    wanted = engine.rank == 0 or not rank0_only
    live = engine.module.state_dict(keep_vars=True)
    result: dict[str, Any] = dict.fromkeys(live) if wanted else {}
    entries = _entries(engine, live)
    for unit in engine.units:
        flat = _whole(
            engine, unit, master=dtype == "master", receivers=1 if rank0_only else engine.world_size
        )
        if wanted:
            views = list(unit.views(flat))
            for entry in entries[unit.index]:
                value = views[entry.position].detach().to("cpu", copy=True)
                result.update(dict.fromkeys(entry.names, value))
        del flat
    if wanted:
        parameters = {name for unit in entries.values() for entry in unit for name in entry.names}
        for name in set(live) - parameters:
            value = live[name]
            result[name] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
    return result


@torch.no_grad()
def load_full_state_dict(engine: ZeroEngine, state: Mapping[str, Any] | None) -> None:
    """Fill parameters, masters and buffers with rank 0's `state`; others may pass the same, or None.

    Floating values of any dtype are taken as fp32 masters; moments and the count of steps stay as they
    are. Collective: each unit is broadcast by itself. Raises StateDictError on every rank, and changes
    nothing, where names are missing or unknown, a shape or an integer type differs, or tied names differ in
    value.
    """
    engine.require_state()
    live = engine.module.state_dict(keep_vars=True)
    entries = _entries(engine, live)
    with together(engine.collectives, "loading a full state dict", StateDictError):
        if engine.rank == 0:
            _check_full(engine, live, entries, state)
    values = state if engine.rank == 0 and state is not None else {}
    with engine.editing():
        _fill_full(engine, entries, values)


def _fill_full(engine: ZeroEngine, entries: Mapping[int, list[_Entry]], values: Mapping[str, Any]) -> None:
    """Broadcast rank 0's `values`, a unit at a time, and keep of each what the stage keeps."""
    states = {state.unit.index: state for state in engine.optimizer.states}
    for unit in engine.units:
        dtype = torch.float32 if unit.dtype.is_floating_point else unit.dtype
        flat = torch.zeros(unit.padded, dtype=dtype, device=engine.device)
        if values:
            views = list(unit.views(flat))
            for entry in entries[unit.index]:
                views[entry.position].copy_(values[entry.names[0]])
        engine.collectives.broadcast(flat)
        if unit.full is not None:
            unit.full[: unit.numel].copy_(flat[: unit.numel])
        if unit.shard is not None:
            unit.shard.copy_(flat[unit.start : unit.stop])
        if unit.index in states:
            held = states[unit.index]
            held.master.copy_(flat[held.start : held.stop])
        del flat
    own = persistent_buffers(engine.module)
    for name in sorted(own):
        source = values[name] if values else own[name]
        buffer = torch.empty(own[name].shape, dtype=own[name].dtype, device=engine.device).copy_(source)
        engine.collectives.broadcast(buffer.reshape(-1).view(torch.uint8))  # whatever its dtype
        own[name].copy_(buffer)


def sharded_state_dict(engine: ZeroEngine) -> dict[str, Any]:
    """This rank's part of everything, copied: plain values and tensors, for `torch.save` or the like.

        world_size, rank, stage, precision
        step, updates, loss_scale  steps of data and of the optimizer, and the state of the loss scale
        ranges   {"<kind>/<unit>": {"kind", "unit": its index, "name", "start", "stop", "tensor",
                  "parameters": [{"name", "shape", "offset"}, ...]}}
        buffers  {name: tensor}

    kind is "master", "momentum" or "variance" (fp32) of trainable units, "model" of frozen ones; `tensor` is
    flat, elements [start, stop) of the unit, in which a parameter begins at `offset`. At stage 0 every rank
    holds, and gets, all.
    """
    engine.require_state()
    ranges = {}
    for held in _held(engine):
        ranges[f"{held.kind}/{held.unit}"] = {
            **_describe(engine, held.unit, held.kind, held.start, held.tensor.numel()),
            "tensor": held.tensor.detach().clone(),
        }
    own = persistent_buffers(engine.module)
    return {
        **_header(engine),
        "step": engine.steps_done,
        "updates": engine.optimizer.steps_done,
        "loss_scale": engine.gate.state_dict(),
        "ranges": ranges,
        "buffers": {name: own[name].detach().clone() for name in sorted(own)},
    }


@torch.no_grad()
def load_sharded_state_dict(engine: ZeroEngine, state: Mapping[str, Any]) -> None:
    """Put back what `sharded_state_dict` gave this rank: exact, optimizer states and step included.

    Raises StateDictError on every rank, and changes nothing, if any rank's is of another N, rank, stage,
    precision or model, or lacks a range.
    """
    targets = {f"{held.kind}/{held.unit}": held for held in _held(engine)}
    own = persistent_buffers(engine.module)
    with together(engine.collectives, "loading a sharded state dict", StateDictError):
        _check_sharded(engine, state, targets, own)
    engine.begin_filling()
    for key, held in targets.items():
        held.tensor.copy_(state["ranges"][key]["tensor"])
    for name, buffer in own.items():
        buffer.copy_(state["buffers"][name])
    engine.filled(step=state["step"], updates=state["updates"], gate=state["loss_scale"])
    for unit in engine.units:  # frozen ones, of which stages 1 and 2 hold a part in the dict
        if not unit.unit.trainable and unit.full is not None and not _replicated(engine):
            _share(engine, unit, unit.full)
    engine.refresh_parameters()


def _entries(engine: ZeroEngine, live: Mapping[str, Any]) -> dict[int, list[_Entry]]:
    """For each unit its parameters that the model's state dict has, with all their names there."""
    names: dict[int, list[str]] = {}
    for name, value in live.items():
        names.setdefault(id(value), []).append(name)
    return {
        unit.index: [
            _Entry(position, tuple(names[id(parameter)]))
            for position, parameter in enumerate(unit.parameters)
            if id(parameter) in names
        ]
        for unit in engine.units
    }


def _whole(engine: ZeroEngine, unit: FlatUnit, *, master: bool, receivers: int) -> torch.Tensor:
    """[padded] the unit's values on the first `receivers` ranks; fp32 where masters are asked for."""
    state = next((s for s in engine.optimizer.states if s.unit is unit), None)
    if not master or state is None or state.master.dtype == state.compute.dtype:
        if unit.full is not None:
            flat = unit.full
        else:
            assert unit.shard is not None
            flat = _gathered(engine, unit, unit.shard, receivers)
        return flat.float() if master and flat.is_floating_point() else flat
    if _replicated(engine):
        return state.master
    return _gathered(engine, unit, state.master, receivers)


def _gathered(engine: ZeroEngine, unit: FlatUnit, part: torch.Tensor, receivers: int) -> torch.Tensor:
    flat = torch.empty(unit.padded, dtype=part.dtype, device=engine.device)
    flat[unit.start : unit.stop].copy_(part)
    _share(engine, unit, flat, receivers)
    return flat


def _share(engine: ZeroEngine, unit: FlatUnit, flat: torch.Tensor, receivers: int | None = None) -> None:
    engine.collectives.gather_from_owners(
        flat, unit.chunk, unit.numel, kind="access", tag=unit.index, active=receivers
    )


def _held(engine: ZeroEngine) -> Iterator[HeldState]:
    """The ranges of one rank's dict: at stage 0 everything, else its own part."""
    return held_states(engine.optimizer.states, engine.units, whole_replicas=_replicated(engine))


def _replicated(engine: ZeroEngine) -> bool:
    """Whether every rank holds, and steps, everything."""
    return engine.config.stage == 0


def _check_full(
    engine: ZeroEngine,
    live: Mapping[str, Any],
    entries: Mapping[int, list[_Entry]],
    state: Mapping[str, Any] | None,
) -> None:
    if state is None:
        raise StateDictError("rank 0 has no state dict to load: it is the one whose values all ranks take")
    missing, unknown = sorted(set(live) - set(state)), sorted(set(state) - set(live))
    if missing or unknown:
        raise StateDictError(f"full state dict: missing {missing[:5]}, not in the model {unknown[:5]}")
    other = sorted(name for name, value in live.items() if not isinstance(value, torch.Tensor))
    if other:
        raise StateDictError(f"extra state {other[:5]} is not loaded: set it on the module, on every rank")
    lost = [
        slot.name
        for unit in engine.units
        for position, slot in enumerate(unit.unit.slots)
        if position not in {entry.position for entry in entries[unit.index]}
    ]
    if lost:
        raise StateDictError(f"the model's own state dict leaves out parameters {lost[:5]}: none to load")
    buffers = {name: live[name] for name in persistent_buffers(engine.module)}
    parameters = {name: live[e.names[0]] for unit in entries.values() for e in unit for name in e.names}
    for name, own in (parameters | buffers).items():
        value = state[name]
        if not isinstance(value, torch.Tensor) or value.shape != own.shape:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise StateDictError(
                f"{name} has shape {shape} in the state dict, {tuple(own.shape)} in the model"
            )
        exact = not own.dtype.is_floating_point
        if value.dtype.is_floating_point == exact or (exact and value.dtype != own.dtype):
            raise StateDictError(
                f"{name} has dtype {value.dtype} in the state dict, {own.dtype} in the model"
            )
    for entry in (entry for unit in entries.values() for entry in unit):
        first, *others = (state[name] for name in entry.names)
        if not all(_same(first, tensor) for tensor in others):
            raise StateDictError(
                f"{' and '.join(entry.names)} are one parameter, but differ in the state dict"
            )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b or torch.equal(a, b):
        return True
    return a.is_floating_point() and torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)


def _header(engine: ZeroEngine) -> dict[str, Any]:
    return {
        "world_size": engine.world_size,
        "rank": engine.rank,
        "stage": engine.config.stage,
        "precision": engine.config.precision,
    }


def _describe(engine: ZeroEngine, index: int, kind: str, start: int, numel: int) -> dict[str, Any]:
    unit = engine.layout.units[index]
    slots = [{"name": slot.name, "shape": list(slot.shape), "offset": slot.offset} for slot in unit.slots]
    return {
        "kind": kind,
        "unit": index,
        "name": unit.name,
        "start": start,
        "stop": start + numel,
        "parameters": slots,
    }


def _check_sharded(
    engine: ZeroEngine, state: Mapping[str, Any], targets: Mapping[str, Any], own: Mapping[str, torch.Tensor]
) -> None:
    for key, value in _header(engine).items():
        if state.get(key) != value:
            raise StateDictError(
                f"sharded state dict of {key} {state.get(key)!r}, the engine has {value!r}: it goes back to "
                "where it was taken; zero_core.checkpoint loads at any number of ranks and stage"
            )
    ranges, buffers = state["ranges"], state["buffers"]
    for what, found, wanted in (
        ("ranges", set(ranges), set(targets)),
        ("buffers", set(buffers), set(own)),
    ):
        if found != wanted:
            raise StateDictError(
                f"sharded state dict: missing {what} {sorted(wanted - found)[:5]}, "
                f"unknown {sorted(found - wanted)[:5]}"
            )
    for key, held in targets.items():
        given, tensor = dict(ranges[key]), ranges[key]["tensor"]
        del given["tensor"]
        want = _describe(engine, held.unit, held.kind, held.start, held.tensor.numel())
        wrong = next((field for field in want if given.get(field) != want[field]), None)
        if wrong is not None:
            raise StateDictError(
                f"{key}: {wrong} is {given.get(wrong)!r} in the state dict, {want[wrong]!r} in the model"
            )
        _check_tensor(key, tensor, held.tensor)
    for name in buffers:
        _check_tensor(name, buffers[name], own[name])


def _check_tensor(name: str, given: torch.Tensor, own: torch.Tensor) -> None:
    if given.shape != own.shape or given.dtype != own.dtype:
        raise StateDictError(
            f"{name}: {tuple(given.shape)} of {given.dtype} in the state dict, {tuple(own.shape)} of "
            f"{own.dtype} in the engine"
        )
