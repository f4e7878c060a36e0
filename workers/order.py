"""In which order samples are read: a pseudo-random permutation for each epoch, computed element by element.

A balanced Feistel network over the next even power of two, walked until it lands inside of the range, is a
permutation of [0, size) that needs no table: an index costs the same for a thousand samples or a trillion.
Depends on (seed, epoch) only. Knows neither ranks nor files.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_MASK_64 = (1 << 64) - 1


def mix(*values: int) -> int:
    """A 63-bit hash of integers; the same on every platform and in every version of Python."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = _finalise(state ^ (value & _MASK_64))
        state = _finalise(state + ((value >> 64) & _MASK_64) + 0x9E3779B97F4A7C15)
    return state >> 1


def _finalise(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _finalise_array(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Permutation:
    """A keyed permutation of [0, size)."""

    size: int
    key: int

    def __call__(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Images of positions in [0, size), elementwise."""
        images = self._encrypt(positions)
        # The network permutes a range less than four times as large; walking on along its cycle from a
        # value outside leads back inside after a few rounds and keeps the whole a permutation.
        while (outside := images >= np.uint64(self.size)).any():
            images[outside] = self._encrypt(images[outside])
        return images

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half = np.uint64(max(1, -(-(self.size - 1).bit_length() // 2)))
        mask = np.uint64((1 << int(half)) - 1)
        left, right = values >> half, values & mask
        for turn in range(_ROUNDS):
            scrambled = _finalise_array(right ^ np.uint64(mix(self.key, turn)))
            left, right = right, left ^ (scrambled & mask)
        return (left << half) | right


@dataclass(frozen=True, slots=True)
class Origin:
    """From where a job counts its places: step `step` begins at place `samples`.

    (0, 0) but in a job that has started from the checkpoint of another one, which may have had another
    global batch or other data. All ranks have the same one, whatever their number.
    """

    step: int = 0
    samples: int = 0

    def place(self, step: int, *, global_batch: int) -> int:
        """The first place that step `step` (from 0) reads: the samples consumed before it."""
        return self.samples + (step - self.step) * global_batch


FROM_THE_START = Origin()


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Which sample is read at which place of an endless run of epochs, each in its own order."""

    samples: int
    seed: int

    def ids(self, start: int, count: int) -> NDArray[np.int64]:
        """Sample ids of places start .. start + count - 1, counted from the beginning of the job."""
        found = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            epoch, position = divmod(start + filled, self.samples)
            length = min(count - filled, self.samples - position)
            positions = np.arange(position, position + length, dtype=np.uint64)
            permutation = Permutation(self.samples, mix(self.seed, epoch))
            found[filled : filled + length] = permutation(positions)
            filled += length
        return found

    def micro_batch(
        self, step: int, number: int, *, global_batch: int, micro_batch: int, origin: Origin
    ) -> NDArray[np.int64]:
        """Sample ids of micro-batch `number` of step `step`, both from 0; sizes in samples."""
        start = origin.place(step, global_batch=global_batch)
        return self.ids(start + number * micro_batch, micro_batch)
