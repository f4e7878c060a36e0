"""Stage 3: a unit's parameters exist whole only while they are used.

Owns the hooks that gather a unit before its module's forward and release it afterwards, the pool of
buffers it is gathered into, and the trick that makes this safe for autograd: what a forward saves of a
gathered buffer is saved as a *reference into the unit*, and backward, when it asks for the values, gathers
the unit again. So nothing is kept by accident, any buffer can serve any unit, and a module that
backward needs is there whether or not its hooks ran. Gathering ahead of that, when the gradient reaches
a module's outputs, serves modules that recompute their forward inside backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero_core.buffers import BufferPool
from zero_core.collectives import Collectives, Pending
from zero_core.errors import UsageError
from zero_core.trees import tensors_in
from zero_core.units import FlatUnit, UnitState
from zero_core.widening import unseen


@dataclass(frozen=True, slots=True)
class _UnitReference:
    """What backward keeps of a tensor that lay in a gathered buffer: where it lay within the unit."""

    unit: FlatUnit
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Order:
    """The units a pass gathers, in order: what it was in the step before tells what comes next.

    Not what it was in the micro-batch before: all of a step's must gather alike, so that a rank without a
    share in the last round can repeat what its own last micro-batch did.
    """

    before: list[FlatUnit] = field(default_factory=list)
    now: list[FlatUnit] = field(default_factory=list)
    position: int = 0

    def begin(self) -> None:
        self.now, self.position = [], 0

    def end_step(self) -> None:
        self.before = self.now

    def needed(self, unit: FlatUnit) -> FlatUnit | None:
        """Take note of a unit; returns the one that followed it last time, if the pass is the same so far."""
        self.now.append(unit)
        if self.position < len(self.before) and self.before[self.position] is unit:
            self.position += 1
            return self.before[self.position] if self.position < len(self.before) else None
        self.position = len(self.before)  # another way through the model: nothing is known
        return None


class Gatherer:
    """Gathers and releases the units of one model.

    `active` says how many ranks (the first ones) take part in the current round with data of their own;
    `record` takes the gathers of a micro-batch, so that an idle rank can take part in the same ones.
    Units in `keep` stay whole from forward to backward; with `prefetch` the next unit is gathered ahead.
    """

    def __init__(
        self,
        units: Sequence[FlatUnit],
        collectives: Collectives,
        pool: BufferPool,
        record: Callable[[FlatUnit, str], None],
        active: Callable[[], int],
        *,
        keep: frozenset[int],
        prefetch: bool,
    ) -> None:
        self._units = units
        self._collectives = collectives
        self._pool = pool
        self._record = record
        self._active = active
        self._in_use: dict[int, int] = {unit.index: 0 for unit in units}
        self._by_address: dict[int, FlatUnit] = {}
        self._handles: list[RemovableHandle] = []
        self._keep = keep
        self._prefetch = prefetch
        self._coming: dict[int, tuple[torch.Tensor, Pending]] = {}
        """Gathered ahead and not used yet, by unit."""
        self._held: set[int] = set()
        """Units that stay whole until backward has used them."""
        self._orders = {"forward": _Order(), "backward": _Order(), "evaluation": _Order()}
        self._pass = "forward"

    @property
    def in_backward(self) -> bool:
        return self._pass == "backward"

    def begin(self, which: str) -> None:
        """A pass begins: "forward", "backward" or "evaluation"; what the last one did not use is dropped."""
        self._drop_coming()
        self._pass = which
        self._orders[which].begin()

    def end_step(self) -> None:
        """What this step's passes gathered is expected of the next one's; its values are not kept."""
        self.release_all()
        for order in self._orders.values():
            order.end_step()

    def forget(self) -> None:
        """Nothing is expected of the next step: this one ended early, and not everywhere alike."""
        for order in self._orders.values():
            order.before = []

    def install_hooks(self) -> None:
        """From now on every unit is gathered around its module's forward."""
        by_module: dict[nn.Module, list[FlatUnit]] = {}
        for unit in self._units:
            by_module.setdefault(unit.module, []).append(unit)
        for module, members in by_module.items():
            self._handles.append(module.register_forward_pre_hook(self._before(members), prepend=True))
            self._handles.append(module.register_forward_hook(self._after(members), always_call=True))
        unit_of = {parameter: unit for unit in self._units for parameter in unit.parameters}
        for module in {module for root in by_module for module in root.modules()}:
            hook = _without_values(unit_of)
            self._handles.append(module.register_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]

    def watch_for_abort(self) -> None:
        """Where nothing is gathered in forward: a rank that computes still finds out in time."""

        def hook(_module: nn.Module, _inputs: Any) -> None:
            if not torch.compiler.is_compiling():
                self._collectives.check()

        for module in {unit.module for unit in self._units}:
            self._handles.append(module.register_forward_pre_hook(hook))

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def gather(self, unit: FlatUnit) -> torch.Tensor:
        """The whole unit, [padded], gathered now if it is not there."""
        if unit.full is None:
            self._make_room(unit)
            ahead = unit.index in self._coming
            flat, pending = self._coming.pop(unit.index) if ahead else self._start(unit)
            self._collectives.finish_gather(pending)
            unit.bind(flat, UnitState.GATHERED)
            if flat.numel():
                self._by_address[flat.untyped_storage().data_ptr()] = unit
            following = self._orders[self._pass].needed(unit)
            if self._prefetch and following is not None:
                self._gather_ahead(following)
        assert unit.full is not None
        return unit.full

    def _gather_ahead(self, unit: FlatUnit) -> None:
        if unit.full is None and unit.index not in self._coming:
            self._coming[unit.index] = self._start(unit)

    def _start(self, unit: FlatUnit) -> tuple[torch.Tensor, Pending]:
        kind = "gather_backward" if self.in_backward else "gather"
        flat = self._pool.lend(unit.capacity, unit.dtype)
        self._record(unit, kind)
        return flat, self._fill(unit, flat, kind, self._active())

    def _make_room(self, unit: FlatUnit) -> None:
        """In backward a frozen unit has no reduction to end its use: the next module's gather does."""
        if self.in_backward and not unit.unit.root:
            for other in self._units:
                trained = other.unit.trainable and any(p.requires_grad for p in other.parameters)
                ends_itself = other.unit.root or trained or other.module is unit.module
                if not ends_itself and self._in_use[other.index] == 0:
                    self.release(other)

    def release(self, unit: FlatUnit) -> None:
        """Give the buffer back; the parameters are sharded again."""
        if unit.state is UnitState.GATHERED:
            flat = unit.unbind(self._collectives.device)
            assert flat is not None
            self._by_address.pop(flat.untyped_storage().data_ptr(), None)
            self._pool.take_back(flat)

    def release_all(self) -> None:
        """After backward, or after a failed forward: nothing stays gathered."""
        self._drop_coming()
        self._held.clear()
        for unit in self._units:
            self._in_use[unit.index] = 0
            self.release(unit)

    def _drop_coming(self) -> None:
        """What was gathered ahead for another way through the model than the one that was taken."""
        for flat, pending in self._coming.values():
            self._collectives.finish_gather(pending)
            self._pool.take_back(flat)
        self._coming.clear()

    def serve(self, unit: FlatUnit, kind: str, active: int) -> None:
        """Give this idle rank's part of the unit to the ranks that work; nothing is kept."""
        flat = self._pool.lend(unit.capacity, unit.dtype)
        self._collectives.finish_gather(self._fill(unit, flat, kind, active))
        self._pool.take_back(flat)

    @contextmanager
    def whole(self, units: Sequence[FlatUnit]) -> Iterator[None]:
        """All of `units` whole at once, in memory of their own."""
        try:
            for unit in units:
                self.release(unit)
                flat = torch.empty(unit.padded, dtype=unit.dtype, device=self._collectives.device)
                self._collectives.finish_gather(
                    self._fill(unit, flat, "access", self._collectives.world_size)
                )
                unit.bind(flat, UnitState.WHOLE)
            yield
        finally:
            for unit in units:
                unit.unbind(self._collectives.device)

    def _fill(self, unit: FlatUnit, flat: torch.Tensor, kind: str, active: int) -> Pending:
        assert unit.shard is not None
        flat[unit.start : unit.stop].copy_(unit.shard)
        return self._collectives.begin_gather(
            flat, unit.chunk, unit.numel, kind=kind, tag=unit.index, active=active
        )

    def _before(self, members: list[FlatUnit]) -> Callable[[nn.Module, Any], None]:
        @unseen
        def hook(_module: nn.Module, _inputs: Any) -> None:
            for unit in members:
                if unit.state is not UnitState.WHOLE:
                    self.gather(unit)
                    self._in_use[unit.index] += 1

        return hook

    def _after(self, members: list[FlatUnit]) -> Callable[[nn.Module, Any, Any], None]:
        @unseen
        def before_backward(_gradient: torch.Tensor) -> None:
            for unit in members:
                self.gather(unit)

        @unseen
        def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            if torch.is_grad_enabled() and not self.in_backward:
                # Backward may recompute this module without calling its hooks, and needs its parameters then.
                for output in tensors_in(outputs):
                    if output.requires_grad:
                        output.register_hook(before_backward)  # type: ignore[no-untyped-call]
            for unit in members:
                self._in_use[unit.index] = max(0, self._in_use[unit.index] - 1)
                # A forward that runs inside backward is a recomputation: backward needs the unit next.
                if self._pass == "forward" and unit.index in self._keep:
                    self._held.add(unit.index)
                if self._in_use[unit.index] == 0 and not self.in_backward and unit.index not in self._held:
                    self.release(unit)

        return hook

    def reference(self, tensor: torch.Tensor) -> _UnitReference | None:
        """The unit a saved tensor lies in, if it lies in a gathered one."""
        unit = self._by_address.get(tensor.untyped_storage().data_ptr())
        if unit is None or tensor.dtype != unit.dtype:
            return None
        return _UnitReference(unit, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def resolve(self, reference: _UnitReference) -> torch.Tensor:
        """The values a reference stands for, gathered again if need be."""
        flat = self.gather(reference.unit)
        return flat.as_strided(reference.size, reference.stride, reference.offset)


def _without_values(unit_of: Mapping[nn.Parameter, FlatUnit]) -> Callable[[nn.Module, str, bool], None]:
    """A state dict of parameters that have no values now would hold nan; one of variables tells names."""

    def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        for name, parameter in module._parameters.items():
            if keep_vars or parameter is None or not parameter.numel():
                continue
            unit = unit_of.get(parameter)
            if unit is not None and unit.state is UnitState.SHARDED:
                raise UsageError(
                    f"state_dict() of a model at stage 3: {prefix}{name} has no values between forwards; use "
                    "zero_core.state_dict.full_state_dict(engine), or full_parameters() around it"
                )

    return hook
