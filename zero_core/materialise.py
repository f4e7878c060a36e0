"""A model built under `torch.device("meta")` comes to life a unit at a time.

Owns the order: modules are initialised in registration order, and a unit is handed on as soon as the last
of its parameters has values, so that never more is whole than the units begun. Under one seed the values are
those that building the model in the ordinary way gives, where its modules draw theirs in that order.
Knows nothing of ranks, stages or optimizers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zero_core.errors import ModelError
from zero_core.units import FlatUnit

Initialise = Callable[[nn.Module, str], None]
"""Fills one module's own parameters and buffers, in place; takes the module and its dotted name."""

# Not-a-number with a mark: what still reads like this after initialisation has not been filled.
_UNSET = {
    torch.float64: (torch.int64, 0x7FF9A5A5A5A5A5A5),
    torch.float32: (torch.int32, 0x7FE5A5A5),
    torch.float16: (torch.int16, 0x7FE5),
    torch.bfloat16: (torch.int16, 0x7FE5),
}


def initial_values(
    model: nn.Module, units: Sequence[FlatUnit], device: torch.device, initialise: Initialise | None
) -> Iterator[tuple[FlatUnit, torch.Tensor]]:
    """Each unit once, with its values before the first step: a new flat tensor [padded].

    fp32, so that masters can be taken from it, or the unit's own dtype where it is frozen or an integer's.
    Units with values come first, in order, then those on the meta device as they are completed.
    initialise  default: a module's own `reset_parameters`

    Raises ModelError naming the parameter or buffer that nothing fills.
    """
    meta = {id(p) for unit in units for p in unit.parameters if p.is_meta}
    for unit in units:
        if not any(id(p) in meta for p in unit.parameters):
            yield unit, unit.flatten(device, torch.float32 if unit.unit.trainable else unit.dtype)
    bench = _Bench(units, device, initialise or _reset)
    waiting = [(n, m) for n, m in model.named_modules() if _on_meta(m)]
    for name, module in waiting:
        bench.initialise(module, name)
        yield from bench.completed()


@dataclass(slots=True)
class _Begun:
    """A unit some of whose parameters have no values yet: `missing` holds their ids."""

    flat: torch.Tensor
    missing: set[int] = field(default_factory=set)


class _Bench:
    """The units and buffers that are being filled."""

    def __init__(self, units: Sequence[FlatUnit], device: torch.device, initialise: Initialise) -> None:
        self._device = device
        self._initialise = initialise
        self._unit_of = {id(p): unit for unit in units for p in unit.parameters}
        self._begun: dict[int, _Begun] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._meta_buffers: list[torch.Tensor] = []  # kept, so that no id is used twice

    @torch.no_grad()
    def initialise(self, module: nn.Module, name: str) -> None:
        """Give the module's own parameters and buffers memory, have them filled, and look that they are."""
        own = {key: p for key, p in module._parameters.items() if p is not None}
        fresh = {key: p for key, p in own.items() if p.is_meta or self._is_missing(p)}
        for parameter in fresh.values():
            self._begin(self._unit_of[id(parameter)])
        new_buffers = self._place_buffers(module)
        marks = {key: p._version for key, p in (*fresh.items(), *new_buffers.items())}
        # What has its values already (a tied parameter, or one that was never on meta) must not lose them.
        settled = {key: p for key, p in own.items() if key not in fresh}
        for key, parameter in settled.items():
            spare = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self._device)
            module._parameters[key] = nn.Parameter(spare, requires_grad=parameter.requires_grad)
        try:
            self._initialise(module, name)
        finally:
            module._parameters.update(settled)
        for what, members in (("parameter", fresh), ("buffer", new_buffers)):
            for key, tensor in members.items():
                if _unset(tensor, marks[key]):
                    raise ModelError(_nothing_fills(what, f"{name}.{key}" if name else key, module))
        for parameter in fresh.values():
            self._begun[self._unit_of[id(parameter)].index].missing.discard(id(parameter))

    def completed(self) -> Iterator[tuple[FlatUnit, torch.Tensor]]:
        """Units whose parameters all have values; they are no longer kept here."""
        for unit in {u.index: u for u in self._unit_of.values()}.values():
            begun = self._begun.get(unit.index)
            if begun is not None and not begun.missing:
                del self._begun[unit.index]
                flat = begun.flat
                del begun
                yield unit, flat if unit.unit.trainable else flat.to(unit.dtype)

    def _is_missing(self, parameter: nn.Parameter) -> bool:
        begun = self._begun.get(self._unit_of[id(parameter)].index)
        return begun is not None and id(parameter) in begun.missing

    def _begin(self, unit: FlatUnit) -> None:
        """Let the unit's parameters on meta view a new flat tensor, marked as unset."""
        if unit.index in self._begun:
            return
        dtype = torch.float32 if unit.dtype.is_floating_point else unit.dtype
        begun = _Begun(torch.zeros(unit.padded, dtype=dtype, device=self._device))
        self._begun[unit.index] = begun
        for view, parameter in zip(unit.views(begun.flat), unit.parameters, strict=True):
            if not parameter.is_meta:
                view.copy_(parameter)
                continue
            _mark(view)
            begun.missing.add(id(parameter))
            real = nn.Parameter(view, requires_grad=parameter.requires_grad)
            real.__dict__.update(parameter.__dict__)
            # The object stays, for ties and whoever holds it.
            torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]

    def _place_buffers(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Memory for the module's own buffers on meta; those that another module has filled are shared."""
        placed = {}
        for key, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if id(buffer) not in self._buffers:
                placed[key] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=self._device)
                _mark(placed[key])
                self._buffers[id(buffer)] = placed[key]
                self._meta_buffers.append(buffer)
            module._buffers[key] = self._buffers[id(buffer)]
        return placed


def _reset(module: nn.Module, _name: str) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _on_meta(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in own)


def _mark(tensor: torch.Tensor) -> None:
    if tensor.dtype in _UNSET:
        words, mark = _UNSET[tensor.dtype]
        tensor.view(words).fill_(mark)


def _unset(tensor: torch.Tensor, version: int) -> bool:
    """Whether any element still bears the mark; types without one: whether nobody wrote to the tensor."""
    if tensor.dtype in _UNSET:
        words, mark = _UNSET[tensor.dtype]
        return bool((tensor.detach().view(words) == mark).any())
    return tensor.numel() > 0 and tensor._version == version and not bool(tensor.detach().any())


def _nothing_fills(what: str, name: str, module: nn.Module) -> str:
    return (
        f"{what} {name} is on the meta device, and nothing filled it: give {type(module).__name__} a "
        "reset_parameters() that does, or ZeroEngine an initialise=function(module, name)"
    )
