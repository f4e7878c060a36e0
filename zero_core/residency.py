"""Which whole units are in memory at one time, from stage 2 on.

Stage 2 and 3 hold whole gradients only while backward fills them and while other ranks read them; stage 3
holds whole parameters only while they are used, one unit ahead of that, or, if there is a budget for it, from
forward to backward. This module plays the passes through, unit by unit in registration order, and counts the
buffers; the engine, whose modules run in that order, then needs exactly those.

Plain integers: knows neither torch nor a process group.
"""

from collections import Counter
from collections.abc import Iterator

from zero_core.config import ITEM_BYTES, ZeroConfig
from zero_core.layout import Layout

LENT_DEPTH = 3
"""Reductions that may be under way at one time where whole gradients are lent and all ranks share memory."""

_FIXED_ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}


Buffers = Counter[tuple[int, str]]
"""How many flat buffers, by elements and by dtype ("compute", or its name)."""


def item_bytes(dtype: str, precision: str) -> int:
    """Bytes of an element of a unit: the compute dtype's for "compute", else the named type's."""
    return ITEM_BYTES[precision] if dtype == "compute" else _FIXED_ITEM_BYTES[dtype]


def kept_gathered(layout: Layout, config: ZeroConfig) -> frozenset[int]:
    """Units that stay whole from forward to backward: as many as fit, the smallest first, then the last."""
    sizes = [
        capacity * item_bytes(unit.dtype, config.precision)
        for unit, capacity in zip(layout.units, layout.capacities(), strict=True)
    ]
    left, kept = config.keep_gathered_bytes if config.stage == 3 else 0, set()
    for index in sorted(range(len(sizes)), key=lambda i: (layout.units[i].numel, -i)):
        if sizes[index] > left:
            break
        left -= sizes[index]
        kept.add(index)
    return frozenset(kept)


def gradient_buffers(layout: Layout, config: ZeroConfig) -> Buffers:
    """Buffers for whole gradients from stage 2 on: one that fills, and those that others may still read."""
    if layout.world_size == 1:
        count = 1
    elif config.transport == "network":
        # What has been sent is free; one is for a unit that a branch leaves out, reduced out of its turn.
        count = 2 + config.overlap
    else:
        count = 1 + (LENT_DEPTH if config.overlap else 1)  # `reduction` says why these are enough
    needed: Buffers = Counter()
    if config.stage < 2:
        return needed
    inner = 0
    for unit, capacity in zip(layout.units, layout.capacities(), strict=True):
        if unit.trainable and capacity and (unit.root or inner < count):
            inner += not unit.root
            needed[capacity, unit.dtype] += 1
    return needed


def gathered_buffers(layout: Layout, config: ZeroConfig) -> Buffers:
    """Buffers for whole parameters at stage 3: the most in use at one time, over both passes."""
    most: Buffers = Counter()
    if config.stage < 3:
        return most
    capacities = layout.capacities()
    for present in _residents(layout, config):
        count = Counter((capacities[i], layout.units[i].dtype) for i in present if capacities[i])
        for key, number in count.items():
            most[key] = max(most[key], number)
    return most


def buffer_bytes(buffers: Buffers, precision: str) -> int:
    return sum(
        number * capacity * item_bytes(dtype, precision) for (capacity, dtype), number in buffers.items()
    )


def _residents(layout: Layout, config: ZeroConfig) -> Iterator[set[int]]:
    """The units that are whole, after each gathering of a forward and a backward."""
    keep = kept_gathered(layout, config)
    root = [i for i, unit in enumerate(layout.units) if unit.root]
    modules: dict[str, list[int]] = {}
    for index, unit in enumerate(layout.units):
        if not unit.root:
            modules.setdefault(unit.name, []).append(index)
    present: set[int] = set()
    forward = root + [i for members in modules.values() for i in members]
    for members in [root, *modules.values()]:
        for index in members:
            present |= _with_next(forward, index, config)
            yield present
        if members is not root:
            present -= set(members) - keep
    present &= keep
    backward = root + [i for members in reversed(modules.values()) for i in members]
    backward = [i for i in backward if i not in keep]
    for members in [root, *reversed(modules.values())]:
        for index in members:
            if index not in keep:
                present |= _with_next(backward, index, config)
                yield present
        if members is not root:
            present -= set(members)


def _with_next(order: list[int], index: int, config: ZeroConfig) -> set[int]:
    place = order.index(index)
    return set(order[place : place + 1 + config.prefetch_units])
