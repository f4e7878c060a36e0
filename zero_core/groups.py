"""Which settings each parameter is stepped with: groups by name, and where a unit is cut between them.

Pure arithmetic over the layout; knows neither torch nor gradients.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from zero_core.config import DEFAULT_GROUP, TILE_STEP, OptimizerConfig, ParameterGroup, ZeroConfig
from zero_core.layout import Layout, Slot, Unit


@dataclass(frozen=True, slots=True)
class Stepping:
    """What a run of elements is stepped with. The learning rate in `settings` is the group's base."""

    group: str
    settings: OptimizerConfig


def group_of(config: ZeroConfig, name: str) -> ParameterGroup | None:
    """The first group with a pattern that matches the parameter's name."""
    for group in config.groups:
        if any(fnmatchcase(name, pattern) for pattern in group.patterns):
            return group
    return None


def stepping(config: ZeroConfig, slot: Slot) -> Stepping:
    """The settings of one parameter.

    Where its group sets no weight decay of its own, the optimizer's applies to parameters of two or more
    dimensions; biases, norms and scalars do not decay.
    """
    group = group_of(config, slot.name)
    settings = config.optimizer if group is None else group.applied(config.optimizer)
    if (group is None or group.weight_decay is None) and len(slot.shape) < 2:
        settings = replace(settings, weight_decay=0.0)
    return Stepping(DEFAULT_GROUP if group is None else group.name, settings)


def members(config: ZeroConfig, layout: Layout) -> Mapping[str, list[str]]:
    """The names of each group's trainable parameters, in the layout's order; empty groups included."""
    found: dict[str, list[str]] = {name: [] for name in (DEFAULT_GROUP, *(g.name for g in config.groups))}
    for unit in layout.units:
        for slot in unit.slots if unit.trainable else ():
            found[stepping(config, slot).group].append(slot.name)
    return found


def runs(
    config: ZeroConfig, unit: Unit, start: int, stop: int, trained: frozenset[str] | None = None
) -> Iterator[tuple[int, int, Stepping]]:
    """Cut [start, stop) of a unit into runs (from, to, settings), relative to `start`.

    trained  names of the parameters that are in any run; None: all

    A run that begins between two multiples of `TILE_STEP` elements is cut at the second: a vectorised kernel
    rounds the last few elements of a slice by other instructions, so slices must end at the same places
    whoever owns them.
    """
    for a, b, settings in _same_settings(config, unit, start, stop, trained):
        aligned = min(b, -(-(start + a) // TILE_STEP) * TILE_STEP - start)
        if a < aligned:
            yield a, aligned, settings
        if aligned < b:
            yield aligned, b, settings


def _same_settings(
    config: ZeroConfig, unit: Unit, start: int, stop: int, trained: frozenset[str] | None
) -> Iterator[tuple[int, int, Stepping]]:
    open_run: tuple[int, int, Stepping] | None = None
    for slot in unit.slots:
        a, b = max(slot.offset, start) - start, min(slot.stop, stop) - start
        if a >= b or (trained is not None and slot.name not in trained):
            continue
        settings = stepping(config, slot)
        if open_run and open_run[1:] == (a, settings):
            open_run = (open_run[0], b, settings)
        else:
            if open_run:
                yield open_run
            open_run = (a, b, settings)
    if open_run:
        yield open_run
