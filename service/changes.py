"""Wakes those who wait for a job to change: streams. Owns counters and a condition, no data.

Knows neither the database nor what changed; a waiter looks for itself after each wake.
"""

import threading
import time
from collections.abc import Callable


class Changes:
    """A bell for each job, and one for all of them."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._rung: dict[str | None, int] = {None: 0}
        self._closed = False

    def ring(self, job_id: str) -> None:
        """Something about the job was stored."""
        with self._condition:
            self._rung[job_id] = self._rung.get(job_id, 0) + 1
            self._rung[None] += 1
            self._condition.notify_all()

    def close(self) -> None:
        """Let everyone go, now and later."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def wait(self, job_id: str | None, has_changed: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until `has_changed()`, asked first and after each ring; False at timeout or close."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._condition:
                seen = self._rung.get(job_id, 0)
            if has_changed():
                return True
            with self._condition:
                while not self._closed and self._rung.get(job_id, 0) == seen:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        return False
                    self._condition.wait(left_s)
                if self._closed:
                    return False
