"""How much of an attempt's time went into steps that count. Pure: reports in, seconds out.

A step counts once: what is done again after a loss replaces what was done before. Everything else (starts,
pauses, checkpoints, steps that were lost) is the difference to the wall time.
"""

from array import array


class Goodput:
    """The steps of one attempt, as rank 0 has told them."""

    def __init__(self, *, step: int = 0, productive_s: float = 0.0) -> None:
        """step: finished before what is told; productive_s: what those of this attempt took."""
        self._first = step
        # After step first + i: one number a step, as a loss may lead back to any of them.
        self._sums = array("d", [productive_s])

    @property
    def productive_s(self) -> float:
        """Seconds of rank 0 in the steps that count."""
        return self._sums[-1]

    @property
    def step(self) -> int:
        return self._first + len(self._sums) - 1

    def at(self, step: int) -> float:
        """The same up to the end of `step`: what counts if training goes on from there."""
        return self._sums[min(max(step - self._first, 0), len(self._sums) - 1)]

    def told(self, step: int, step_s: float) -> None:
        """A step was finished. Steps come in order; one that was told before replaces all from it on."""
        self.resume(step - 1)
        self._sums.append(self._sums[-1] + step_s)

    def resume(self, step: int) -> None:
        """Training goes on after `step`: what was done beyond it is done again."""
        if step < self._first or step > self.step:
            # Beyond what this attempt has told: nothing of it is known to count.
            self._first, self._sums = step, array("d", [self._sums[0 if step < self._first else -1]])
        del self._sums[step - self._first + 1 :]


def goodput(productive_s: float, elapsed_s: float) -> float | None:
    """Productive time over wall time, 0 to 1; None before any time has passed."""
    return min(1.0, productive_s / elapsed_s) if elapsed_s > 0 else None
