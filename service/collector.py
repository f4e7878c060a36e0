"""Carries the controllers' logs into the database, from the stored cursor on.

Owns the threads that read; one job's trouble never holds up another's. Knows no policy: what an entry means
for its job is decided by `service.jobs` inside the store's transaction.
"""

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from service.changes import Changes
from service.cluster import Cluster
from service.errors import ClusterUnavailable, ControllerGone
from service.jobs import LIVE, Job
from service.journal import logger
from service.store import Store
from workers.naming import JobFolder
from workers.reports import Event, RankReport, log_entry

BATCH = 1000
"""Entries of one transaction."""

THREADS = 8
MAX_BATCHES = 50
"""Batches of one visit to a job, so that a long log does not keep a thread for itself."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0

_log = logger(__name__)

ReadLog = Callable[[int], Iterable[dict[str, Any]]]
"""Entries of a job's log after a number, at most BATCH."""


@dataclass(slots=True)
class _Trouble:
    """A job that could not be read lately: what was said, and when it is tried again."""

    text: str
    pause_s: float
    not_before: float


class Collector:
    """`visit_all` is one round over all live jobs."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        changes: Changes,
        *,
        storage: Path,
        clock: Callable[[], float],
        on_stopped: Callable[[], None],
    ) -> None:
        """`on_stopped` is called after a job has left the live states: its controller can be ended."""
        self._store = store
        self._cluster = cluster
        self._changes = changes
        self._storage = storage
        self._clock = clock
        self._on_stopped = on_stopped
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="collector")
        # Both are touched by the round's thread and, for its own job, by a visit.
        self._under_way: set[str] = set()
        self._troubles: dict[str, _Trouble] = {}

    def visit_all(self) -> None:
        """Send a thread to each live job that has none and is not to be left alone for a while."""
        for job in self._store.in_states(LIVE):
            trouble = self._troubles.get(job.id)
            if job.id in self._under_way or (trouble and time.monotonic() < trouble.not_before):
                continue
            self._under_way.add(job.id)
            self._pool.submit(self._visit, job)

    def close(self) -> None:
        """End once the visits under way are done."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def drain(self, job: Job) -> Job:
        """Store all that the job's controller has logged; returns the job after it."""
        return self._carry(job, lambda after: self._cluster.read(job.id, after=after, limit=BATCH))

    def drain_file(self, job: Job) -> Job:
        """Store what a controller that is gone has left in the job's log file."""
        path = JobFolder(self._storage, job.id).log
        return self._carry(job, lambda after: entries_of_file(path, after=after, limit=BATCH))

    def _visit(self, job: Job) -> None:
        try:
            self.drain(job)
            self._troubles.pop(job.id, None)
        except ControllerGone:
            pass  # not there yet, or lost: the keeper sees to it
        except Exception as error:
            self._note(job.id, error)
        finally:
            self._under_way.discard(job.id)

    def _note(self, job_id: str, error: Exception) -> None:
        before = self._troubles.get(job_id)
        text = f"{type(error).__name__}: {error}"
        pause_s = min(before.pause_s * 2, _LONGEST_PAUSE_S) if before else _FIRST_PAUSE_S
        if before is None or before.text != text:
            # An outage is the keeper's to report; everything else is a fault of ours.
            tell = _log.warning if isinstance(error, ClusterUnavailable) else _log.error
            tell("a job's log cannot be carried over; it is tried again", job=job_id, error=text)
        self._troubles[job_id] = _Trouble(text, pause_s, time.monotonic() + pause_s)

    def _carry(self, job: Job, read: ReadLog) -> Job:
        for _ in range(MAX_BATCHES):
            raw = list(read(job.cursor))
            if not raw:
                return job
            entries = [_parsed(entry) for entry in raw]
            if entries[0].seq != job.cursor + 1:
                _log.error("a job's log has a gap", job=job.id, after=job.cursor, next=entries[0].seq)
            stored = self._store.append(job.id, entries, after=job.cursor, now=self._clock())
            if stored is None:  # someone else was first: go on from where they came to
                job = self._store.get(job.id)
                continue
            self._changes.ring(job.id)
            if job.state in LIVE and stored.state not in LIVE:
                self._on_stopped()
            job = stored
        return job


def entries_of_file(path: Path, *, after: int, limit: int) -> list[dict[str, Any]]:
    """Entries with seq > after of a log file; nothing where there is no file.

    A last line without an end was cut off by a crash: it was never an entry.
    """
    if not path.exists():
        return []
    with path.open("rb") as lines:
        whole = (json.loads(line) for line in lines if line.endswith(b"\n"))
        return list(islice((entry for entry in whole if entry["seq"] > after), limit))


def _parsed(entry: dict[str, Any]) -> Event | RankReport:
    return log_entry.validate_python(entry)
