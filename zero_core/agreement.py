"""What ranks have to agree on, compared over one small collective, so that an error on one is one on all.

Knows numbers, bits and what an engine is built from; nothing of a step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import zip_longest
from zlib import crc32

from zero_core.collectives import Collectives
from zero_core.config import ZeroConfig
from zero_core.errors import ConfigError, ModelError, ZeroError
from zero_core.layout import Layout
from zero_core.links import Purpose

_BITS = 48  # of each fp64 number, which holds 53 exactly


@contextmanager
def together(collectives: Collectives, what: str, error: type[ZeroError]) -> Iterator[None]:
    """What one rank fails in, all fail in, at the end of the block and with the rank named."""
    failure: Exception | None = None
    try:
        yield
    except Exception as caught:
        failure = caught
    failed = collectives.gather_numbers((float(failure is not None),))
    if isinstance(failure, ZeroError):
        raise failure
    if failure is not None:
        raise error(f"{what} failed on rank {collectives.rank}: {failure!r}") from failure
    ranks = [rank for rank, (flag,) in enumerate(failed) if flag]
    if ranks:
        raise error(f"{what} failed on rank(s) {ranks[:8]}: see their errors")


def check_alike(collectives: Collectives, config: ZeroConfig, layout: Layout) -> None:
    """Before anything is allocated: all ranks have the same settings and the same model.

    Raises ConfigError or ModelError, on every rank, that names the setting or the unit, and a rank.
    """
    settings = {field.name: repr(getattr(config, field.name)) for field in fields(config)}
    units = [(unit.name, crc32(repr(unit).encode())) for unit in layout.units]
    table = collectives.gather_objects((settings, units))
    for rank, (theirs, others) in enumerate(table):
        for name, value in table[0][0].items():
            if theirs[name] != value:
                raise ConfigError(
                    f"{name} is {theirs[name]} on rank {rank} and {value} on rank 0: settings must be the "
                    "same on every rank"
                )
        for first, other in zip_longest(table[0][1], others):
            if first != other:
                name = (first or other)[0] or "the root unit"
                raise ModelError(
                    f"the model of rank {rank} differs from rank 0's at {name}: names, shapes, what is "
                    "trainable and what is tied must be the same on every rank"
                )


def gather_bits(collectives: Collectives, bits: Sequence[bool]) -> list[list[bool]]:
    """Every rank's bits, a row for each rank; all ranks pass equally many."""
    rows = collectives.gather_numbers(pack(bits), purpose=Purpose.WHOLE)
    return [unpack(row, len(bits)) for row in rows]


def pack(bits: Sequence[bool]) -> list[float]:
    """Bits as a few fp64 numbers."""
    return [
        float(sum(1 << place for place, bit in enumerate(bits[start : start + _BITS]) if bit))
        for start in range(0, len(bits), _BITS)
    ]


def unpack(numbers: Sequence[float], count: int) -> list[bool]:
    """The first `count` bits of what `pack` gave."""
    return [bool(int(numbers[i // _BITS]) >> i % _BITS & 1) for i in range(count)]
