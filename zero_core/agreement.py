"""What ranks have to agree on, compared over one small collective, so that an error on one is one on all.

Knows numbers and bits; nothing of what they stand for.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zero_core.collectives import Collectives
from zero_core.errors import ZeroError

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
        raise error(f"{what} failed on rank(s) {ranks[:8]}: see their errors; nothing was changed")


def gather_bits(collectives: Collectives, bits: Sequence[bool]) -> list[list[bool]]:
    """Every rank's bits, a row for each rank; all ranks pass equally many."""
    return [unpack(row, len(bits)) for row in collectives.gather_numbers(pack(bits))]


def pack(bits: Sequence[bool]) -> list[float]:
    """Bits as a few fp64 numbers."""
    return [
        float(sum(1 << place for place, bit in enumerate(bits[start : start + _BITS]) if bit))
        for start in range(0, len(bits), _BITS)
    ]


def unpack(numbers: Sequence[float], count: int) -> list[bool]:
    """The first `count` bits of what `pack` gave."""
    return [bool(int(numbers[i // _BITS]) >> i % _BITS & 1) for i in range(count)]
