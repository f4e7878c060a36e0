"""What one rank holds of the state of training, by reference.

Owns which tensors are the state (`held_states`): checkpoints write them, a new group takes them over,
replicas copy them. A snapshot outlives the engine it was taken from and keeps its memory until it is dropped.
Knows nothing of files, of who needs what, nor of how it travels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_core.config import ZeroConfig
from zero_core.layout import Layout
from zero_core.moving import MODEL, WHOLE, Form, Key, Meta, StateId
from zero_core.optimizer import UnitStates
from zero_core.sharing import SharedMemory
from zero_core.units import FlatUnit


@dataclass(frozen=True, slots=True)
class HeldState:
    """Elements [start, start + len) of a unit, of one kind of state, that this rank holds in `tensor`."""

    unit: int
    kind: str
    start: int
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank's state stands, between one update and the next.

    whole  whether all parameters that the rank holds are those of this state; not so from the update on to
           the end of the gathering, at stages 1 and 2
    """

    state: StateId
    updates: int
    gate: Mapping[str, Any] | None
    whole: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's part of the state after a step.

    meta     whose part of which state it is
    pieces   by unit and kind: the first element, and [held] flat from there on; fp32 for masters and moments
    full     by trainable unit: [numel] or longer, compute dtype, where the whole parameters are of this state
    buffers  the persistent buffers by name
    memory   the shared memory that its tensors lie in, as far as they do; kept as long as the snapshot
    again    looks again, where another rank may have written since; a copy being written is of step -1
    """

    meta: Meta
    pieces: Mapping[Key, tuple[int, torch.Tensor]]
    full: Mapping[int, torch.Tensor] | None
    buffers: Mapping[str, torch.Tensor]
    memory: SharedMemory | None = None
    again: "Callable[[], Snapshot] | None" = None

    def current(self) -> "Snapshot":
        """The same memory with what it holds by now."""
        return self if self.again is None else self.again()

    @property
    def step(self) -> int:
        return self.meta.state.step

    @property
    def generation(self) -> int:
        """Of the group that computed the step."""
        return self.meta.state.generation

    @property
    def rank(self) -> int:
        """Whose part it is, in the group of `layout`."""
        return self.meta.rank

    @property
    def layout(self) -> Layout:
        return self.meta.form.layout

    def place(self, unit: int, kind: str, start: int, stop: int) -> torch.Tensor:
        """[stop - start] where elements [start, stop) of a unit lie, of a kind that `moving.holds` names."""
        parameters = "master" if self.meta.form.precision == "fp32" else WHOLE
        if self.full is not None and kind == parameters and unit in self.full:
            return self.full[unit][start:stop]
        first, tensor = self.pieces[unit, kind]
        return tensor[start - first : stop - first]


def held_states(
    states: Sequence[UnitStates], units: Sequence[FlatUnit], *, whole_replicas: bool
) -> Iterator[HeldState]:
    """The flat states of one rank: all it holds, or only the part it owns of what is replicated."""
    for state in states:
        for kind in state.kinds:
            tensor, start = getattr(state, kind), state.start
            if not whole_replicas:
                tensor = tensor[state.unit.start - start : state.unit.stop - start]
                start = state.unit.start
            yield HeldState(state.unit.index, kind, start, tensor)
    for unit in units:
        if unit.unit.trainable:
            continue
        if unit.shard is not None:
            yield HeldState(unit.index, MODEL, unit.start, unit.shard)
            continue
        assert unit.full is not None
        start, stop = (0, unit.numel) if whole_replicas else (unit.start, unit.stop)
        yield HeldState(unit.index, MODEL, start, unit.full[start:stop])


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the state, by name; one that has several names goes by the first."""
    transient = {
        f"{path}.{key}" if path else key
        for path, owner in module.named_modules()
        for key in owner._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in module.named_buffers() if name not in transient}


def state_kinds(config: ZeroConfig) -> tuple[str, ...]:
    """What the optimizer holds of each trainable unit."""
    return "master", *config.optimizer.moments


def optimizer_kind(config: ZeroConfig) -> str:
    """What the optimizer is called: adamw, adam or sgd."""
    return type(config.optimizer).__name__.removesuffix("Config").lower()


def form_of(module: nn.Module, layout: Layout, config: ZeroConfig) -> Form:
    """What the states of an engine look like."""
    buffers = persistent_buffers(module)
    return Form(
        layout=layout,
        stage=config.stage,
        precision=config.precision,
        kinds=state_kinds(config),
        buffers=tuple(
            (name, buffers[name].numel() * buffers[name].element_size()) for name in sorted(buffers)
        ),
    )


def take(
    form: Form,
    rank: int,
    standing: Standing,
    *,
    states: Sequence[UnitStates],
    units: Sequence[FlatUnit],
    buffers: Mapping[str, torch.Tensor],
    memory: SharedMemory | None,
) -> Snapshot:
    """The live state of a rank; nothing is copied."""
    whole = standing.whole and form.stage in (1, 2)
    return Snapshot(
        meta=Meta(form, standing.state, rank, whole, False, standing.updates, standing.gate),
        pieces={
            (held.unit, held.kind): (held.start, held.tensor.detach())
            for held in held_states(states, units, whole_replicas=True)
        },
        full={u.index: u.full for u in units if u.unit.trainable and u.full is not None} if whole else None,
        buffers=buffers,
        memory=memory,
    )
