"""A background loop: one thread that does one thing again and again until it is told to end.

Knows nothing of what it does. An error is logged and the next round comes after the usual pause; the loop
never ends silently, and tells how its last round went.
"""

import threading
from collections.abc import Callable

from service.errors import ClusterUnavailable
from service.journal import logger

_log = logger(__name__)

STOP_TIMEOUT_S = 70.0
"""Longest wait for a round under way at `stop`: no call inside of one takes longer."""


class Loop:
    """Calls `action` every `interval_s` seconds, and sooner when kicked."""

    def __init__(self, name: str, action: Callable[[], None], *, interval_s: float) -> None:
        self.name = name
        self._action = action
        self._interval_s = interval_s
        self._kicked = threading.Event()
        self._stopping = False
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; once only."""
        if self._thread is not None:
            raise RuntimeError(f"loop {self.name} was started already")
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def kick(self) -> None:
        """Have the next round begin at once."""
        self._kicked.set()

    def stop(self) -> None:
        """End after the round under way."""
        self._stopping = True
        self._kicked.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                _log.error("a background loop does not end", loop=self.name, waited_s=STOP_TIMEOUT_S)

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def trouble(self) -> str | None:
        """Why the loop is not well: not running, or how its last round failed; None where all is well."""
        if self._thread is None or not self._thread.is_alive():
            return "not running"
        return self._error

    def _run(self) -> None:
        while not self._stopping:
            self._kicked.clear()
            try:
                self._action()
                if self._error is not None:
                    _log.info("a background loop is well again", loop=self.name)
                self._error = None
            except Exception as error:
                self._tell(error)
            self._kicked.wait(self._interval_s)

    def _tell(self, error: Exception) -> None:
        """Log an error once while it lasts: an outage of minutes would fill the log otherwise."""
        text = f"{type(error).__name__}: {error}"
        if text != self._error:
            expected = isinstance(error, ClusterUnavailable)
            _log.error(
                "a background loop failed; it tries again", loop=self.name, error=text, exc_info=not expected
            )
        self._error = text
