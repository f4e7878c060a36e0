"""Which checkpoints a folder holds, whole or not: by their names and that they were committed.

`zero_core.checkpoint.manifest.scan` lists those that could be loaded; here are those that are damaged, too.
Knows no torch.
"""

from dataclasses import dataclass
from pathlib import Path

from zero_core.checkpoint import manifest
from zero_core.checkpoint.store import open_store


@dataclass(frozen=True, slots=True, order=True)
class Committed:
    """A checkpoint by its name; `location` is its folder's path or address."""

    step: int
    generation: int
    location: str


def committed(root: str | Path) -> list[Committed]:
    """All under `root` that were committed, oldest first; of a step saved twice, the newer one last."""
    store = open_store(root)
    return [Committed(*parsed, store.location(name)) for parsed, name in manifest.committed(store).items()]


def is_checkpoint(location: str | Path) -> bool:
    """Whether this is the folder of a committed checkpoint, be it damaged."""
    return open_store(location).size(manifest.MANIFEST) is not None
