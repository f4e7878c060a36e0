"""How many bytes a load needs, and how many more its blocks hold, by the arithmetic of the layout alone.

Fp32 with AdamW at stage 3: every rank holds its own part of three kinds of state. A rank's file has what it
owned when it saved: kind by kind, in each of them unit by unit, without gaps. It is cut into blocks of one
size from its first byte of data on, each with a digest; whoever needs a byte of a block has to read all of it
to verify it. No reader is asked; headers and manifest are not counted.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from zero_core.layout import Layout, pulls

KINDS = 3
_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of one load, all ranks: `needed` of the state, and `rounding` beyond them in the same blocks."""

    needed: int
    rounding: int


def share(saved: Layout, loading: Layout, *, block_bytes: int) -> Share:
    """What the ranks of `loading` have to read of what those of `saved` wrote."""
    sizes = [data_bytes(saved, source) for source in range(saved.world_size)]
    needed = touched_bytes = 0
    for rank in range(loading.world_size):
        touched: dict[int, set[int]] = defaultdict(set)
        for source, start, stop in ranges(saved, loading, rank):
            needed += stop - start
            touched[source].update(range(start // block_bytes, -(-stop // block_bytes)))
        for source, blocks in touched.items():
            touched_bytes += sum(
                min((block + 1) * block_bytes, sizes[source]) - block * block_bytes for block in blocks
            )
    return Share(needed, touched_bytes - needed)


def data_bytes(layout: Layout, rank: int) -> int:
    """Bytes of state in a rank's file."""
    return KINDS * _ITEM_BYTES * sum(stop - start for start, stop in _owned(layout, rank))


def ranges(saved: Layout, loading: Layout, rank: int) -> Iterator[tuple[int, int, int]]:
    """(file, start, stop) in bytes of the file's data, of all that a rank of `loading` will hold."""
    starts = [list(_starts(saved, source)) for source in range(saved.world_size)]
    units = len(saved.units)
    for kind in range(KINDS):
        for unit in range(units):
            start, stop = loading.owned(unit, rank)
            for move in pulls(saved, unit=unit, start=start, stop=stop):
                first = starts[move.source][kind * units + unit]
                owned = saved.owned(unit, move.source)[0]
                yield (
                    move.source,
                    first + (move.start - owned) * _ITEM_BYTES,
                    first + (move.stop - owned) * _ITEM_BYTES,
                )


def _owned(layout: Layout, rank: int) -> list[tuple[int, int]]:
    return [layout.owned(unit, rank) for unit in range(len(layout.units))]


def _starts(layout: Layout, rank: int) -> Iterator[int]:
    """Where each unit of each kind begins in a rank's file."""
    reached = 0
    for _ in range(KINDS):
        for start, stop in _owned(layout, rank):
            yield reached
            reached += (stop - start) * _ITEM_BYTES
