"""The units of a live model: which module each belongs to, and the flat tensors its parameters view.

Owns the binding between `nn.Parameter`s and flat storage. Knows nothing of gradients, optimizers or
when a unit is gathered: `gathering` and the engine decide that.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import nn

from zero_core.errors import ModelError
from zero_core.layout import Layout, ParameterSpec, Unit, build_layout, module_units

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class UnitState(Enum):
    """Where a unit's parameters are."""

    WHOLE = auto()
    """In a flat tensor of their own for good (stages 0 to 2)."""
    SHARDED = auto()
    """Only the owned part exists; the parameters have their shapes but no values (stage 3)."""
    GATHERED = auto()
    """In a buffer lent for the time of a forward or backward (stage 3)."""


@dataclass(slots=True)
class FlatUnit:
    """One unit of one model on one rank.

    full   [padded], or [capacity] where it is lent, compute dtype: the unit while WHOLE or GATHERED
    shard  [owned] compute dtype: this rank's part, from stage 3 on
    """

    index: int
    unit: Unit
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    dtype: torch.dtype
    start: int
    stop: int
    chunk: int
    padded: int
    capacity: int
    state: UnitState = UnitState.SHARDED
    full: torch.Tensor | None = None
    shard: torch.Tensor | None = None
    _placeholder: torch.Tensor | None = field(default=None, repr=False)

    @property
    def numel(self) -> int:
        return self.unit.numel

    @property
    def owned(self) -> int:
        return self.stop - self.start

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """The parameters' places in `flat`, [padded] or longer, each in its own shape."""
        for slot in self.unit.slots:
            yield flat[slot.offset : slot.stop].view(slot.shape)

    @torch.no_grad()
    def flatten(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A new flat tensor [padded] of `dtype` holding the parameters' present values."""
        flat = torch.zeros(self.padded, dtype=dtype, device=device)
        for view, parameter in zip(self.views(flat), self.parameters, strict=True):
            view.copy_(parameter)
        return flat

    def bind(self, flat: torch.Tensor, state: UnitState) -> None:
        """Let the parameters view `flat`, [padded]."""
        self.full, self.state = flat, state
        for view, parameter in zip(self.views(flat), self.parameters, strict=True):
            parameter.data = view

    def unbind(self, device: torch.device) -> torch.Tensor | None:
        """Take the whole tensor away; the parameters keep their shapes and read as nan if used."""
        flat, self.full, self.state = self.full, None, UnitState.SHARDED
        if self._placeholder is None:
            self._placeholder = torch.zeros((), dtype=self.dtype, device=device)
            if self.dtype.is_floating_point:
                self._placeholder.fill_(torch.nan)
        for slot, parameter in zip(self.unit.slots, self.parameters, strict=True):
            parameter.data = self._placeholder.expand(slot.shape)
        return flat


def held_dtype(name: str, precision: str) -> torch.dtype:
    """The dtype a unit of layout dtype `name` is held in."""
    found: torch.dtype = COMPUTE_DTYPES[precision] if name == "compute" else getattr(torch, name)
    return found


def bind_units(
    model: nn.Module, *, precision: str, tile: int, rank: int, world_size: int
) -> tuple[Layout, list[FlatUnit]]:
    """Find the model's units and the modules that use them. Moves and allocates nothing."""
    named = dict(model.named_parameters())
    if not named:
        raise ModelError(f"{type(model).__name__} has no parameters: there is nothing to train")
    by_boundary = boundaries(model)
    inside = module_units(by_boundary)
    home: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home.setdefault(id(parameter), set()).add(inside(name))

    def unit_of(name: str) -> str:
        # A parameter that is tied across units belongs to the module around them all: the root.
        homes = home[id(named[name])]
        return next(iter(homes)) if len(homes) == 1 else ""

    layout = build_layout(
        (_describe(name, parameter) for name, parameter in named.items()),
        unit_of,
        tile=tile,
        world_size=world_size,
    )
    units = []
    for index, (unit, capacity) in enumerate(zip(layout.units, layout.capacities(), strict=True)):
        start, stop = layout.owned(index, rank)
        units.append(
            FlatUnit(
                index=index,
                unit=unit,
                module=by_boundary.get(unit.name, model),
                parameters=tuple(named[slot.name] for slot in unit.slots),
                dtype=held_dtype(unit.dtype, precision),
                start=start,
                stop=stop,
                chunk=layout.chunk(index),
                padded=layout.padded(index),
                capacity=capacity,
            )
        )
    return layout, units


def boundaries(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost children of module lists and sequences: the modules that are units of their own.

    A module without a forward (a parameter list, say) is none: nothing tells when its parameters are used.
    """
    found: dict[str, nn.Module] = {}

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            runs = type(child).forward is not nn.Module.forward
            if isinstance(module, nn.ModuleList | nn.Sequential) and runs:
                found[inner] = child
            else:
                walk(child, inner)

    walk(model, "")
    return found


def _describe(name: str, parameter: nn.Parameter) -> ParameterSpec:
    if parameter.is_complex():
        raise ModelError(
            f"parameter {name} has dtype {parameter.dtype}: complex parameters are not supported"
        )
    floating = parameter.dtype.is_floating_point
    dtype = "compute" if floating else str(parameter.dtype).removeprefix("torch.")
    return ParameterSpec(name, tuple(parameter.shape), parameter.requires_grad, dtype)
