"""What a job's owner wants of it now. Commands come in on one side, the conductor takes them on the other.

Nothing is queued: the newest wanted number counts, a cancel or a pause stays until the attempt ends.
"""

import threading

from workers.commands import Cancel, Pause, Resize, SaveCheckpoint


class Orders:
    """Thread-safe."""

    def __init__(self, wanted: int, *, cancel: str | None = None, pause: str | None = None) -> None:
        """`cancel` and `pause` name who has asked for it, where that was before this process began."""
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._wanted = self._stood = wanted
        """The number that is wanted, and the one to go back to where it cannot be had."""
        self._resize: Resize | None = None
        self._cancel = cancel
        self._pause = pause
        self._checkpoint = False

    def give(self, command: Resize | Pause | Cancel | SaveCheckpoint) -> None:
        with self._lock:
            match command:
                case Resize():
                    self._wanted, self._resize = command.workers, command
                case Pause():
                    self._pause = command.who
                case Cancel():
                    self._cancel = command.who
                case SaveCheckpoint():
                    self._checkpoint = True
        self._changed.set()

    def wake(self) -> None:
        """Something has happened elsewhere that whoever waits here should look at."""
        self._changed.set()

    def wait(self, timeout_s: float) -> None:
        """Return after the time, or at once when something new is wanted or `wake` was called."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    @property
    def wanted(self) -> int:
        with self._lock:
            return self._wanted

    @property
    def cancel(self) -> str | None:
        """Who wants the job to end."""
        with self._lock:
            return self._cancel

    @property
    def pause(self) -> str | None:
        """Who wants the job to pause."""
        with self._lock:
            return self._pause

    @property
    def resize(self) -> Resize | None:
        """The resize that is still to be done."""
        with self._lock:
            return self._resize

    def resized(self, order: Resize) -> None:
        """It was done; a newer one is left alone."""
        with self._lock:
            if self._resize is order:
                self._stood, self._resize = order.workers, None

    def refused(self, order: Resize) -> int:
        """It cannot be done: what was wanted before is wanted again, unless there is a newer one.

        Returns the number that is wanted now. A group that has lost workers goes on growing back to it.
        """
        with self._lock:
            if self._resize is order:
                self._wanted, self._resize = self._stood, None
            return self._wanted

    def take_checkpoint(self) -> bool:
        """Whether a checkpoint has been asked for since the last call."""
        with self._lock:
            taken, self._checkpoint = self._checkpoint, False
            return taken
