"""Who owns which element: the one piece of arithmetic that everything rests on.

A model's parameters, tied ones once, in registration order, are grouped into *units*. Units are cut
into *tiles*; rank r of N owns a contiguous run of a unit's tiles. The logical space (units, elements)
depends neither on N nor on the stage nor on padding, so two layouts of one model differ only in where
the cuts fall. `moves` compares two of them: the live reshard, the checkpoint reader and the replica all
read the ranges it yields.

Plain integers: knows neither torch nor a process group.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

from zero_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter as the layout sees it.

    name       its first name in registration order; a tied parameter appears once
    shape      elements along each dimension; () for a 0-d parameter
    trainable  whether it is stepped
    dtype      "compute" for every floating type (held in the engine's precision), else its own, as "uint8"
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    dtype: str = "compute"

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place within its unit: elements [offset, offset + numel)."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of whole parameters that is communicated as one flat tensor of `numel` elements."""

    name: str
    trainable: bool
    dtype: str
    slots: tuple[Slot, ...]
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", self.slots[-1].stop if self.slots else 0)

    @property
    def root(self) -> bool:
        """Whether its parameters belong to no narrower module than the model."""
        return self.name == ""

    @property
    def kind(self) -> tuple[bool, bool, str]:
        """Units of one kind take turns in buffers of one size."""
        return self.root, self.trainable, self.dtype


@dataclass(frozen=True, slots=True)
class Move:
    """Elements [start, stop) of unit `unit` (an index), owned by `source` before and `target` after."""

    unit: int
    start: int
    stop: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The units of a model and the cut at world size N.

    Every element of every unit has exactly one owner. A rank's part of a unit is `chunk(unit)` elements
    long, a whole number of tiles, except where the unit ends: there it is shorter, or empty.
    """

    units: tuple[Unit, ...]
    tile: int
    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.tile < 1:
            raise ConfigError(f"world_size {self.world_size} and tile {self.tile} must be at least 1")

    def chunk(self, unit: int) -> int:
        """Distance in elements between the starts of two neighbouring ranks' parts of a unit."""
        tiles = -(-self.units[unit].numel // self.tile)
        return -(-tiles // self.world_size) * self.tile

    def padded(self, unit: int) -> int:
        """Elements of a buffer that holds the whole unit as N equal chunks."""
        return self.chunk(unit) * self.world_size

    def capacities(self) -> list[int]:
        """Elements of the buffer each unit is lent while it is whole: one size for all units of a kind.

        The root unit is in flight together with others, so it has a kind of its own.
        """
        largest: dict[tuple[bool, bool, str], int] = {}
        for index, unit in enumerate(self.units):
            largest[unit.kind] = max(largest.get(unit.kind, 0), self.padded(index))
        return [largest[unit.kind] for unit in self.units]

    def owned(self, unit: int, rank: int) -> tuple[int, int]:
        """The elements [start, stop) of the unit that `rank` owns; start == stop where it owns none."""
        chunk, numel = self.chunk(unit), self.units[unit].numel
        return min(rank * chunk, numel), min((rank + 1) * chunk, numel)

    def numel(self, *, trainable: bool | None = None) -> int:
        """Psi: all elements, or those of the trainable or the frozen units."""
        return sum(u.numel for u in self.units if trainable is None or u.trainable == trainable)

    def at(self, world_size: int) -> "Layout":
        """The same logical space cut for another world size."""
        return Layout(self.units, self.tile, world_size)


def build_layout(
    parameters: Iterable[ParameterSpec],
    unit_of: Callable[[str], str],
    *,
    tile: int,
    world_size: int,
) -> Layout:
    """Group parameters, in registration order, into the units that `unit_of(name)` names.

    A unit holds trainable parameters or frozen ones, never both, so that gradients and optimizer states
    exist for whole units, and one dtype, so that it is one flat tensor. Units come in the order in which
    their first parameter was registered.
    """
    members: dict[tuple[str, bool, str], list[Slot]] = {}
    for parameter in parameters:
        slots = members.setdefault((unit_of(parameter.name), parameter.trainable, parameter.dtype), [])
        offset = slots[-1].stop if slots else 0
        slots.append(Slot(parameter.name, tuple(parameter.shape), offset))
    units = tuple(Unit(*key, tuple(slots)) for key, slots in members.items())
    return Layout(units, tile, world_size)


def moves(old: Layout, new: Layout) -> Iterator[Move]:
    """The ranges of the logical space, cut wherever the owner changes in `old` or in `new`.

    Yields O(old N + new N) ranges for each unit, in order, without gap or overlap; ranges that stay with
    their owner (source == target) are among them.
    """
    if old.units != new.units:
        raise ConfigError("layouts of different models cannot be compared: their units differ")
    for unit in range(len(new.units)):
        for target in range(new.world_size):
            start, stop = new.owned(unit, target)
            yield from pulls(old, unit=unit, start=start, stop=stop, target=target)


def pulls(old: Layout, *, unit: int, start: int, stop: int, target: int = 0) -> Iterator[Move]:
    """Elements [start, stop) of a unit, cut by who owned them in `old`: what `target` fetches."""
    chunk = old.chunk(unit)
    while start < stop:
        source = start // chunk
        end = min((source + 1) * chunk, stop)
        yield Move(unit, start, end, source, target)
        start = end


def module_units(boundaries: Iterable[str]) -> Callable[[str], str]:
    """The default grouping: every parameter below a boundary module belongs to that module's unit.

    `boundaries` are dotted module names, none inside another (see `units.boundaries`). Parameters
    outside of all of them form the root unit, named "".
    """
    names = frozenset(boundaries)

    def unit_of(parameter: str) -> str:
        head = parameter
        while head:
            head = head.rpartition(".")[0]
            if head in names:
                return head
        return ""

    return unit_of
