"""The database: what is wanted, and what was reported.

Owns every query. Each method is one transaction; one that writes to a job locks its row first, so that
the ids of a job's timeline grow in the order in which they become visible. Knows neither the cluster nor
what a state means: the pure steps of `service.jobs` decide inside `change` and `append`.

Runs on SQLite (WAL, foreign keys on) and on PostgreSQL alike.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal

from sqlalchemy import (
    Connection,
    CursorResult,
    Engine,
    create_engine,
    delete,
    event,
    func,
    insert,
    inspect,
    select,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from service.errors import Conflict, InvalidRequest, KeyReused, NotFound, StoreError
from service.jobs import Job, JobState, Note, Outcome, observed
from service.tables import SCHEMA_VERSION, Base, JobRow, RankLatestRow, SchemaRow, TimelineRow
from workers.reports import Event, RankReport
from workers.spec import JobSpec

EntryType = Literal["event", "report"]

_BUSY_TIMEOUT_S = 15
_PROGRESS = frozenset(
    {"updated_at", "reason", "workers", "generation", "step", "loss", "cursor", "version"}
    | {"began_at", "seen_at", "productive_s", "productive_step"}
)
"""Fields that follow the training: their change does not raise the version."""


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One entry of a job's timeline, of the cluster (with `seq`) or of the control plane (without).

    `kind` is the event's kind, or "report"; `body` the event's data, or the whole report.
    """

    id: int
    job_id: str
    seq: int | None
    time: float
    kind: str
    rank: int | None
    generation: int
    step: int | None
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs, newest first, and where the next page starts (None: there is none)."""

    jobs: tuple[Job, ...]
    next_cursor: str | None


class Store:
    """All access to the database. Safe for use from many threads.

    Raises StoreError where the database cannot be opened or its schema is not this version's.
    """

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        shown_url = make_url(url).render_as_string()
        try:
            with self._write() as session:
                _prepare_schema(session, shown_url=shown_url)
        except DBAPIError as error:
            raise StoreError(
                f"the database {shown_url} cannot be opened: {error.orig}; see database_url and data_dir",
                code="store_unavailable",
            ) from error

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    def ping(self) -> None:
        """Raise what the database raises where it cannot be read."""
        with self._read() as session:
            session.execute(select(SchemaRow.version)).one()

    # Jobs.

    def create(self, outcome: Outcome, *, idempotency_key: str | None = None) -> tuple[Job, bool]:
        """Store a new job; with a key that was used before, return the first job and False.

        Raises KeyReused where the key came with another specification.
        """
        job = outcome.job
        scoped = None if idempotency_key is None else _scoped(job.submitted_by, idempotency_key)
        try:
            with self._write() as session:
                session.execute(insert(JobRow).values(**_columns(job), idempotency_key=scoped))
                _add_notes(session, job, outcome.notes, time=job.created_at)
        except IntegrityError:
            first = None if scoped is None else self._by_key(scoped)
            if first is None:
                raise
            return _same_submission(first, job.spec, idempotency_key), False
        return job, True

    def submitted_before(self, spec: JobSpec, *, who: str, idempotency_key: str) -> Job | None:
        """The job that `who` submitted under this key, if any. Raises KeyReused as `create` does."""
        first = self._by_key(_scoped(who, idempotency_key))
        return None if first is None else _same_submission(first, spec, idempotency_key)

    def get(self, job_id: str) -> Job:
        """The job. Raises NotFound."""
        with self._read() as session:
            return _job(_row(session, job_id))

    def page(self, *, cursor: str | None, limit: int, state: JobState | None = None) -> JobPage:
        """At most `limit` jobs, newest first, after the cursor of the page before."""
        query = select(JobRow).order_by(JobRow.number.desc()).limit(limit + 1)
        if cursor is not None:
            query = query.where(JobRow.number < _number(cursor))
        if state is not None:
            query = query.where(JobRow.state == state.value)
        with self._read() as session:
            rows = session.scalars(query).all()
        more = len(rows) > limit
        return JobPage(tuple(map(_job, rows[:limit])), str(rows[limit - 1].number) if more else None)

    def in_states(self, states: frozenset[JobState]) -> tuple[Job, ...]:
        """All jobs in these states, longest in the queue first."""
        query = select(JobRow).where(JobRow.state.in_(sorted(state.value for state in states)))
        with self._read() as session:
            return tuple(map(_job, session.scalars(query.order_by(JobRow.queued_at, JobRow.number))))

    def change(
        self,
        job_id: str,
        step: Callable[[Job], Outcome],
        *,
        now: float,
        expected_version: int | None = None,
    ) -> Job:
        """Apply a pure step to the job as it is now and store what comes out, in one transaction.

        Raises NotFound, Conflict (version_conflict) where the job is not at `expected_version`, and what
        the step raises; nothing is stored then.
        """
        with self._write() as session:
            before = _job(_row(session, job_id, lock=True))
            if expected_version is not None and before.version != expected_version:
                raise _version_conflict(job_id, expected=expected_version, seen=before.version)
            outcome = step(before)
            after = _versioned(before, outcome.job)
            _update(session, before, after)
            _add_notes(session, after, outcome.notes, time=now)
        return after

    # Timeline.

    def append(
        self, job_id: str, entries: Sequence[Event | RankReport], *, after: int, now: float
    ) -> Job | None:
        """Store entries of the controller's log that follow number `after`, and what they tell of the job.

        The cursor advances in the same transaction. None, with nothing stored, where the cursor is no
        longer at `after`: someone else has stored them.
        """
        with self._write() as session:
            before = _job(_row(session, job_id, lock=True))
            if before.cursor != after:
                return None
            if not entries:
                return before
            job = before
            for entry in entries:
                job = observed(job, entry, now=now)
            job = _versioned(before, replace(job, cursor=entries[-1].seq))
            _update(session, before, job)
            session.execute(insert(TimelineRow), [_entry_columns(job_id, entry) for entry in entries])
            _set_latest(session, job_id, entries)
        return job

    def entries(
        self,
        job_id: str,
        *,
        after: int,
        limit: int,
        kinds: EntryType | None = None,
        rank: int | None = None,
    ) -> list[TimelineEntry]:
        """At most `limit` entries with id > after, oldest first; of one type, or of one rank's reports."""
        query = select(TimelineRow).where(TimelineRow.job_id == job_id, TimelineRow.id > after)
        if kinds is not None:
            query = query.where(TimelineRow.type == kinds)
        if rank is not None:
            query = query.where(TimelineRow.rank == rank)
        with self._read() as session:
            return [_entry(row) for row in session.scalars(query.order_by(TimelineRow.id).limit(limit))]

    def latest_reports(self, job_id: str) -> list[TimelineEntry]:
        """The newest report of each rank of the newest generation that has reported, by rank."""
        newest = select(func.max(RankLatestRow.generation)).where(RankLatestRow.job_id == job_id)
        query = (
            select(TimelineRow)
            .join(RankLatestRow, RankLatestRow.entry_id == TimelineRow.id)
            .where(RankLatestRow.job_id == job_id, RankLatestRow.generation == newest.scalar_subquery())
            .order_by(RankLatestRow.rank)
        )
        with self._read() as session:
            return [_entry(row) for row in session.scalars(query)]

    def has_reported(self, job_id: str, rank: int) -> bool:
        """Whether the job ever had this rank."""
        with self._read() as session:
            return session.get(RankLatestRow, (job_id, rank)) is not None

    def last_id(self, job_id: str | None) -> int:
        """Id of the newest entry of the job's timeline, or of all of them; 0 where there is none."""
        query = select(func.max(TimelineRow.id))
        if job_id is not None:
            query = query.where(TimelineRow.job_id == job_id)
        with self._read() as session:
            return session.scalar(query) or 0

    # Transactions.

    @contextmanager
    def _read(self) -> Iterator[Session]:
        with Session(self._engine) as session:
            yield session

    @contextmanager
    def _write(self) -> Iterator[Session]:
        with (
            self._engine.connect() as connection,
            Session(connection.execution_options(writes=True)) as session,
            session.begin(),
        ):
            yield session

    def _by_key(self, scoped: str) -> Job | None:
        with self._read() as session:
            row = session.scalar(select(JobRow).where(JobRow.idempotency_key == scoped))
            return None if row is None else _job(row)


def _engine(url: str) -> Engine:
    if make_url(url).get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def _open(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
        # The driver would begin transactions at the first write only; `_begin` begins them itself.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A writer takes its lock at once: upgrading a reader's would fail instead of waiting.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _prepare_schema(session: Session, *, shown_url: str) -> None:
    connection = session.connection()
    present = set(inspect(connection).get_table_names())
    if SchemaRow.__tablename__ not in present:
        if foreign := present & set(Base.metadata.tables):
            raise StoreError(
                f"the database {shown_url} holds tables {sorted(foreign)} but no schema version: it is not "
                "ours; name another database"
            )
        Base.metadata.create_all(connection)
        session.add(SchemaRow(version=SCHEMA_VERSION))
        return
    version = session.scalars(select(SchemaRow.version)).one()
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"the database {shown_url} has schema version {version}, this release needs {SCHEMA_VERSION}; "
            "use the release that wrote it, or another database",
            details={"found": version, "needed": SCHEMA_VERSION},
        )


# Rows to values and back.


def _row(session: Session, job_id: str, *, lock: bool = False) -> JobRow:
    query = select(JobRow).where(JobRow.id == job_id)
    row = session.scalar(query.with_for_update() if lock else query)
    if row is None:
        raise NotFound(f"there is no job {job_id[:80]!r}", details={"job_id": job_id[:80]})
    return row


@lru_cache(maxsize=512)
def _spec(text: str) -> JobSpec:
    return JobSpec.model_validate_json(text)


def _job(row: JobRow) -> Job:
    values = {name: getattr(row, name) for name in _JOB_FIELDS}
    return Job(**values | {"spec": _spec(row.spec), "state": JobState(row.state)})


_JOB_FIELDS = tuple(field.name for field in fields(Job))


def _columns(job: Job) -> dict[str, Any]:
    values = {name: getattr(job, name) for name in _JOB_FIELDS}
    return values | {"spec": job.spec.model_dump_json(), "state": job.state.value}


def _versioned(before: Job, after: Job) -> Job:
    changed = {name for name in _JOB_FIELDS if getattr(before, name) != getattr(after, name)}
    return replace(after, version=before.version + 1) if changed - _PROGRESS else after


def _update(session: Session, before: Job, after: Job) -> None:
    """Write what changed, provided that the row is still at the version and the cursor that were read."""
    changed = {n: v for n, v in _columns(after).items() if getattr(before, n) != getattr(after, n)}
    if not changed:
        return
    unchanged = (JobRow.id == before.id, JobRow.version == before.version, JobRow.cursor == before.cursor)
    statement = update(JobRow).where(*unchanged).values(**changed)
    result = session.execute(statement.execution_options(synchronize_session=False))
    assert isinstance(result, CursorResult)
    if result.rowcount != 1:
        raise _version_conflict(before.id, expected=before.version, seen=None)


def _add_notes(session: Session, job: Job, notes: Sequence[Note], *, time: float) -> None:
    if notes:
        shared = {"job_id": job.id, "type": "event", "time": time, "generation": job.generation}
        rows = [shared | {"kind": note.kind, "step": job.step, "body": note.data} for note in notes]
        session.execute(insert(TimelineRow), rows)


def _entry_columns(job_id: str, entry: Event | RankReport) -> dict[str, Any]:
    shared = {"job_id": job_id, "seq": entry.seq, "time": entry.time, "generation": entry.generation}
    if isinstance(entry, RankReport):
        body = entry.model_dump(mode="json")
        return shared | {
            "type": "report", "kind": "report", "rank": entry.rank, "step": entry.step, "body": body
        }  # fmt: skip
    step = entry.data.get("step", entry.data.get("at_step"))
    return shared | {"type": "event", "kind": entry.kind, "rank": None, "step": step, "body": entry.data}


def _entry(row: TimelineRow) -> TimelineEntry:
    return TimelineEntry(
        row.id, row.job_id, row.seq, row.time, row.kind, row.rank, row.generation, row.step, row.body
    )


def _set_latest(session: Session, job_id: str, entries: Sequence[Event | RankReport]) -> None:
    """Point each rank that is among `entries` at its newest report."""
    newest = {entry.rank: entry for entry in entries if isinstance(entry, RankReport)}
    if not newest:
        return
    ours = (RankLatestRow.job_id == job_id, RankLatestRow.rank.in_(sorted(newest)))
    session.execute(delete(RankLatestRow).where(*ours).execution_options(synchronize_session=False))
    seqs = [entry.seq for entry in newest.values()]
    query = select(TimelineRow.id, TimelineRow.rank, TimelineRow.generation)
    stored = session.execute(query.where(TimelineRow.job_id == job_id, TimelineRow.seq.in_(seqs)))
    rows = [
        {"job_id": job_id, "rank": rank, "generation": generation, "entry_id": entry_id}
        for entry_id, rank, generation in stored
    ]
    session.execute(insert(RankLatestRow), rows)


def _scoped(who: str, idempotency_key: str) -> str:
    return f"{who}\n{idempotency_key}"


def _same_submission(first: Job, spec: JobSpec, idempotency_key: str | None) -> Job:
    if first.spec == spec:
        return first
    raise KeyReused(
        f"the idempotency key {idempotency_key!r} was used for job {first.id} with another specification; "
        "use a new key for a new job",
        details={"job_id": first.id},
    )


def _number(cursor: str) -> int:
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= 18):
        raise InvalidRequest(
            f"cursor {cursor[:40]!r} is not one that a page of jobs returned", code="invalid_cursor"
        )
    return int(cursor)


def _version_conflict(job_id: str, *, expected: int, seen: int | None) -> Conflict:
    now = "has changed meanwhile" if seen is None else f"is at version {seen}"
    return Conflict(
        f"job {job_id} {now}, not at version {expected}: read it again, then decide",
        details={"job_id": job_id, "expected_version": expected, "seen_version": seen},
    )
