"""A model whose worker writes no checkpoint's file to its end."""

import time
from collections.abc import Sequence

from tests.integration.paced_model import Paced
from zero_core.checkpoint.store import Files


class Unwritten(Paced):
    """From its building on, all that its process writes for a checkpoint takes an hour a piece."""

    def __init__(self, *, pause_s: float) -> None:
        super().__init__(pause_s=pause_s)
        Files.pwrite = _hold  # type: ignore[method-assign]


def _hold(self: Files, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    time.sleep(3600)
    raise AssertionError("a test that waits for this has hung")
