"""The newest checkpoint that a generation can go back to, as the controller knows it.

A listing tells what is there and not whether it verifies: what is damaged comes to light when a generation
has to begin from an older one. Until a newer one is committed, a state of that older step is then not too old
to go on from. Knows no torch.
"""

from contextlib import suppress
from pathlib import Path

from zero_core.checkpoint import manifest


class Latest:
    """`location`: its folder's path or address, None without one. `floor_step`: no older state counts."""

    def __init__(self, root: str | Path) -> None:
        self._root = root
        self.location: str | None = None
        self.floor_step = 0
        self._take(manifest.latest(root))

    def look(self) -> None:
        """List again: a commit may not have been told, or what was there may be gone.

        Where the place cannot be read for now, what is known stays.
        """
        with suppress(OSError):
            self._take(manifest.latest(self._root))

    def _take(self, found: manifest.CheckpointInfo | None) -> None:
        location = found.location if found else None
        if location != self.location:
            self.location, self.floor_step = location, found.step if found else 0

    def saved(self, step: int, location: str) -> None:
        """A commit was told; perhaps late, after that of a newer generation."""
        if step >= self.floor_step:
            self.location, self.floor_step = location, step

    def began(self, step: int) -> None:
        """A generation has begun at this step, having found nothing newer that it could go on from."""
        self.floor_step = min(self.floor_step, step)
