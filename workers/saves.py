"""One process's checkpoints: taken in its training loop, written behind it, told of when they are committed.

Owns what becomes of a save: committed (older ones may go, an event), failed (an event, and the job goes on),
or cut off with its generation, and then owed by the next one. Outlives generations, as the writer does. Knows
the engine and the job's folder; nothing of Ray, of groups or of how a file is written.
"""

import platform
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from workers.errors import UntoldError
from zero_core import checkpoint
from zero_core.checkpoint import Outcome, SavedCheckpoint, Saver, manifest
from zero_core.engine import ZeroEngine
from zero_core.errors import CheckpointError, FencedError, PeerLostError

Sink = Callable[[dict[str, Any]], None]

_LOOK_S = 0.2
"""Between two looks at whether the group that a save is waited for has been broken off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A checkpoint that is due.

    root, fenced      where to, and whether only the newest generation may commit there
    generation, rank  the group that saves, and this process's place in it
    reason            why; the event repeats it
    extra             JSON values that a load gets back
    seed              what the job's random numbers come from, for whoever reads the manifest
    keep, keep_every  what of older ones stays
    behind            whether training goes on while it is written
    must              whether the job must not go on without it: its failure is then raised
    owed              whether some rank knows of one that was cut off, which this one makes up for
    """

    root: str | Path
    fenced: bool
    generation: int
    rank: int
    step: int
    reason: str
    extra: Mapping[str, Any]
    seed: int
    keep: int
    keep_every: int | None
    behind: bool
    must: bool
    owed: bool = False


@dataclass(slots=True)
class _Open:
    """A save that is being written."""

    order: Order
    stall_s: float = 0.0
    begun: threading.Event = field(default_factory=threading.Event)
    """Training goes on, so that `stall_s` is known."""


class Saves:
    """Thread-safe, but for `save`, which the training thread alone calls: collective, like a step."""

    def __init__(
        self,
        *,
        sink: Sink,
        settle: Callable[[], bool] = lambda: True,
        broken_off: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """sink: takes notices, from any thread.

        settle: waits until the controller has all notices so far; False if it does not collect them. No
        checkpoint covers a step that has not been told: a rank killed after it is not to take with it the
        account of steps that nobody will repeat.
        broken_off: whether this generation's group was aborted.
        """
        self._sink = sink
        self._settle = settle
        self._broken_off = broken_off
        self._lock = threading.Condition()
        self._saver = Saver(self._done)
        self._open: _Open | None = None
        self._dropped: Order | None = None
        self._past: FencedError | UntoldError | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        with self._lock:
            return self._open is not None

    def serve(self, engine: ZeroEngine) -> None:
        """Have the engine's account of its memory count what saves behind the training copy."""
        self._saver.serve(engine)

    def save(self, engine: ZeroEngine, order: Order) -> None:
        """Take a checkpoint; returns when it is committed, or as soon as training may go on (`behind`).

        One that is still being written is waited for first. A failure is an event; it is raised where the job
        must not go on without this one. Raises FencedError or UntoldError where this group is of the past,
        PeerLostError where it is broken off.
        """
        began = time.perf_counter()
        self._wait(order.generation)
        self.check(order.generation)
        self._make_up(order)
        try:
            if order.behind:
                self._begin(engine, order, began)
            else:
                self._tell_first(order)
                saved = checkpoint.save(
                    engine,
                    order.root,
                    extra=order.extra,
                    generation=order.generation,
                    fenced=order.fenced,
                    seed=order.seed,
                    versions=_versions(),
                )
                self._committed(order, saved, stall_s=time.perf_counter() - began)
        except FencedError:
            raise
        except CheckpointError as error:
            self._failed(order, error)
            if order.must:
                raise
        except BaseException:
            with self._lock:
                self._dropped = order  # cut off with its group
            raise

    def owed(self, generation: int) -> Order | None:
        """What a generation before this one was saving when it ended, and nobody has saved since."""
        with self._lock:
            dropped = self._dropped
        return dropped if dropped is not None and dropped.generation < generation else None

    def check(self, generation: int) -> None:
        """Raise FencedError or UntoldError where a save has shown that this generation is of the past."""
        with self._lock:
            dropped, past = self._dropped, self._past
        if past is not None and dropped is not None and dropped.generation == generation:
            raise past

    def close(self) -> None:
        """Wait for what is being written, and end the writer."""
        self._saver.close()

    def _make_up(self, order: Order) -> None:
        """This one covers what was cut off before; say so."""
        before = self.owed(order.generation)
        if before is not None:
            with self._lock:
                self._dropped = self._past = None
        if order.rank == 0 and (before is not None or order.owed):
            self._sink(
                {
                    "type": "checkpoint_dropped",
                    "generation": order.generation,
                    "step": order.step,
                    "dropped_step": before.step if before else None,
                    "dropped_generation": before.generation if before else None,
                    "reason": "its group ended before it was committed; one is taken now in its place",
                }
            )

    def _begin(self, engine: ZeroEngine, order: Order, began: float) -> None:
        mine = _Open(order)
        with self._lock:
            self._open = mine
        try:
            self._saver.begin(
                engine,
                order.root,
                extra=order.extra,
                generation=order.generation,
                fenced=order.fenced,
                seed=order.seed,
                versions=_versions(),
                first=lambda: self._tell_first(order),
            )
            mine.stall_s = time.perf_counter() - began
            mine.begun.set()
        except BaseException:
            with self._lock:
                if self._open is mine:
                    self._open = None
                self._lock.notify_all()
            raise

    def _tell_first(self, order: Order) -> None:
        if not self._settle():
            error = UntoldError(
                f"rank {order.rank} does not save step {order.step}: the controller has not collected the "
                "reports of the steps before it; it is cut off, or this worker is"
            )
            with self._lock:
                self._dropped, self._past = order, error
            raise error
        if self._broken_off(order.generation):
            raise PeerLostError(
                f"generation {order.generation} was broken off: step {order.step} is not saved"
            )

    def _done(self, outcome: Outcome) -> None:
        """From the writer's thread: the open save has ended."""
        with self._lock:
            ended, error = self._open, outcome.error
        if ended is None:
            return
        ended.begun.wait()
        try:
            if outcome.saved is not None:
                self._committed(ended.order, outcome.saved, stall_s=ended.stall_s)
            elif isinstance(error, FencedError) or self._broken_off(ended.order.generation):
                with self._lock:
                    self._dropped = ended.order
                    self._past = error if isinstance(error, FencedError) else None
            elif error is not None:
                self._failed(ended.order, error)
        finally:
            with self._lock:
                self._open = None
                self._lock.notify_all()

    def _committed(self, order: Order, saved: SavedCheckpoint, *, stall_s: float) -> None:
        if order.rank != 0:
            return
        # The new one is committed: only now may an older one go.
        trouble: dict[str, str] = {}
        try:
            name = manifest.folder_name(saved.step, order.generation)
            manifest.prune(order.root, keep=order.keep, keep_every=order.keep_every, sound=name)
        except (OSError, CheckpointError) as error:
            trouble = {"not_removed": f"older checkpoints stay: {error}"}
        self._sink(
            {
                "type": "checkpoint",
                "generation": order.generation,
                "step": saved.step,
                "location": saved.location,
                "bytes": saved.bytes,
                "seconds": saved.seconds,
                "stall_s": stall_s,
                "reason": order.reason,
                **trouble,
            }
        )

    def _failed(self, order: Order, error: CheckpointError) -> None:
        if order.rank == 0:
            self._sink(
                {
                    "type": "checkpoint_failed",
                    "generation": order.generation,
                    "step": order.step,
                    "reason": order.reason,
                    "error": str(error),
                }
            )

    def _wait(self, generation: int) -> None:
        """Until nothing is being written. Raises PeerLostError where the group is broken off meanwhile."""
        with self._lock:
            while not self._lock.wait_for(lambda: self._open is None, _LOOK_S):
                if self._broken_off(generation):
                    raise PeerLostError(f"generation {generation} was broken off while a save was waited for")


@cache
def _versions() -> dict[str, str]:
    """What a checkpoint is written with."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    with suppress(PackageNotFoundError):  # where the source is used as it is
        found["elastic-zero"] = version("elastic-zero")
    return found
