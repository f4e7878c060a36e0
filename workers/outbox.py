"""A worker's numbered notices on their way to the controller: kept until it has asked for what comes after.

Bounded: a training thread that is 10,000 notices ahead waits for the controller. Knows no Ray, no torch.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

CAPACITY = 10_000
PAGE = 1_000


class Outbox:
    """Numbered from 1, over the life of the worker."""

    def __init__(self, capacity: int = CAPACITY, *, on_settling: Callable[[], None] = lambda: None) -> None:
        """on_settling: called when someone begins to wait until all has been taken in."""
        self._capacity = capacity
        self._notices: deque[dict[str, Any]] = deque()
        self._last = 0
        self._room = threading.Condition()
        self._closed = False
        self._on_settling = on_settling

    def put(self, notice: dict[str, Any]) -> None:
        """Add a notice; while the box is full, wait until it has been emptied or closed."""
        with self._room:
            self._room.wait_for(lambda: len(self._notices) < self._capacity or self._closed)
            self._notices.append(notice)
            self._last += 1

    def take(self, after: int) -> tuple[tuple[dict[str, Any], ...], int, bool]:
        """(notices after number `after`, the last one's number, whether that is all); earlier ones go.

        Asking again with the same number gives the same notices, so an answer lost on the way loses nothing.
        """
        with self._room:
            first = self._last - len(self._notices) + 1
            while self._notices and first <= after:
                self._notices.popleft()
                first += 1
            page = tuple(self._notices[i] for i in range(min(PAGE, len(self._notices))))
            self._room.notify_all()
            return page, first - 1 + len(page), len(page) == len(self._notices)

    def settle(self, timeout_s: float) -> bool:
        """Wait until every notice so far was asked beyond, or the box is closed; False if it took too long.

        What was only handed out may have been lost on the way.
        """
        with self._room:
            wanted = self._last
        self._on_settling()
        with self._room:
            return self._room.wait_for(
                lambda: self._last - len(self._notices) >= wanted or self._closed, timeout_s
            )

    def close(self) -> None:
        """Let a waiting `put` through: the group is being aborted, and its thread must come to its end."""
        with self._room:
            self._closed = True
            self._room.notify_all()

    def reopen(self) -> None:
        with self._room:
            self._closed = False
