"""Opens generations in the place of a job's checkpoints, again and again while that fails.

Where an attempt's first generation cannot be opened, the place is taken to be wrong. Later, a full disk or a
store that is out for a while is no reason to let go of what the workers hold. Knows no torch.
"""

from collections.abc import Callable
from pathlib import Path

from workers.policies import GivenUp, Wait
from zero_core.checkpoint import manifest

_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0


class Opening:
    """For one attempt of a job. `open` is to be called until it no longer says Wait."""

    def __init__(
        self,
        root: str | Path,
        *,
        again: bool,
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        """again: whether the attempt has had a generation here; say: tells people, once for each outage."""
        self._root = root
        self._again = again
        self._clock = clock
        self._say = say
        self._retry_s = _FIRST_RETRY_S
        self._next_at: float | None = None

    def open(self, generation: int) -> Wait | GivenUp | None:
        """None: this generation may commit checkpoints, and no older one any more."""
        if self._next_at is not None and self._clock() < self._next_at:
            return Wait()
        try:
            manifest.open_generation(self._root, generation)
        except OSError as error:
            return self._failed(f"no checkpoints can be kept in {self._root} ({error})")
        self._again, self._retry_s, self._next_at = True, _FIRST_RETRY_S, None
        return None

    def _failed(self, said: str) -> Wait | GivenUp:
        if not self._again:
            return GivenUp(f"{said}: give another checkpoints.location")
        if self._next_at is None:
            self._say(f"{said}: the workers keep what they hold and go on once it can be written again")
        self._next_at = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
        return Wait()
