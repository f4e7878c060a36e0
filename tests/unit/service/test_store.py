"""The database, on a real SQLite file."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Dialect, create_mock_engine
from sqlalchemy.dialects import postgresql

from service import jobs
from service.errors import Conflict, InvalidRequest, KeyReused, NotFound, StoreError, WrongState
from service.jobs import Job, JobState, Note, Outcome
from service.store import Store
from service.tables import Base
from tests.unit.service.makers import NOW, event, phase, report, spec_of
from workers.reports import Event, RankReport
from workers.spec import JobSpec

Entries = list[Event | RankReport]


def create(
    store: Store, job_id: str, *, key: str | None = None, spec: JobSpec | None = None
) -> tuple[Job, bool]:
    outcome = jobs.submitted(job_id, spec or spec_of(), who="ann", now=NOW)
    return store.create(outcome, idempotency_key=key)


def test_a_job_comes_back_as_it_was_stored(store: Store) -> None:
    job, created = create(store, "job-1")
    assert created
    assert store.get("job-1") == job
    (note,) = store.entries("job-1", after=0, limit=10)
    assert (note.kind, note.seq, note.body["action"]) == ("request", None, "submit")


def test_an_unknown_job_is_told_by_code(store: Store) -> None:
    with pytest.raises(NotFound) as caught:
        store.get("nope")
    assert caught.value.code == "unknown_job"


def test_the_same_key_returns_the_first_job(store: Store) -> None:
    first, _ = create(store, "job-1", key="k")
    again, created = create(store, "job-2", key="k")
    assert (again, created) == (first, False)
    assert store.submitted_before(spec_of(), who="ann", idempotency_key="k") == first
    assert store.submitted_before(spec_of(), who="bob", idempotency_key="k") is None


def test_the_same_key_with_another_spec_is_a_conflict(store: Store) -> None:
    create(store, "job-1", key="k")
    with pytest.raises(KeyReused) as caught:
        create(store, "job-2", key="k", spec=spec_of(steps=7))
    assert caught.value.code == "idempotency_conflict"


def test_a_race_for_one_key_makes_one_job(store: Store) -> None:
    barrier = threading.Barrier(8)

    def submit(number: int) -> str:
        barrier.wait()
        return create(store, f"job-{number}", key="k")[0].id

    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(submit, range(8)))
    assert len(ids) == 1
    assert len(store.page(cursor=None, limit=100).jobs) == 1


def test_pages_go_from_the_newest_to_the_oldest_without_gap(store: Store) -> None:
    for number in range(7):
        create(store, f"job-{number}")
    seen, cursor = [], None
    for size in (3, 3, 1):
        page = store.page(cursor=cursor, limit=3)
        assert len(page.jobs) == size
        seen += [job.id for job in page.jobs]
        cursor = page.next_cursor
    assert cursor is None
    assert seen == [f"job-{number}" for number in reversed(range(7))]


def test_a_page_of_one_state(store: Store) -> None:
    for number in range(4):
        create(store, f"job-{number}")
    store.change("job-2", lambda job: jobs.cancelled(job, who="ann", now=NOW), now=NOW)
    page = store.page(cursor=None, limit=2, state=JobState.CANCELLED)
    assert [job.id for job in page.jobs] == ["job-2"]


@pytest.mark.parametrize("cursor", ["x", "-1", "1e3", "", "9" * 30, "²"])
def test_a_made_up_cursor_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        store.page(cursor=cursor, limit=2)
    assert caught.value.code == "invalid_cursor"


def test_a_change_is_one_version_further_and_progress_is_not(store: Store) -> None:
    create(store, "job-1")
    job = store.change("job-1", lambda job: jobs.started(job, now=NOW), now=NOW)
    assert job.version == 2
    after = store.append("job-1", [phase("starting"), report(seq=2)], after=0, now=NOW)
    assert after is not None
    assert (after.version, after.step) == (2, 1)
    after = store.append("job-1", [phase("running", seq=3)], after=2, now=NOW)
    assert after is not None
    assert after.version == 3


def test_a_stale_version_is_refused_and_nothing_is_stored(store: Store) -> None:
    create(store, "job-1")
    store.change("job-1", lambda job: jobs.resized(job, 3, who="ann", now=NOW), now=NOW)
    with pytest.raises(Conflict) as caught:
        store.change(
            "job-1", lambda job: jobs.resized(job, 4, who="bob", now=NOW), now=NOW, expected_version=1
        )
    assert caught.value.details == {"job_id": "job-1", "expected_version": 1, "seen_version": 2}
    assert store.get("job-1").wanted_workers == 3


def test_a_step_that_raises_stores_nothing(store: Store) -> None:
    create(store, "job-1")
    before = store.last_id("job-1")
    with pytest.raises(WrongState):
        store.change("job-1", lambda job: jobs.resumed(job, who="ann", now=NOW), now=NOW)
    assert store.last_id("job-1") == before


def test_concurrent_changes_are_all_counted(store: Store) -> None:
    create(store, "job-1")

    def note(number: int) -> None:
        store.change("job-1", lambda job: Outcome(job, (Note("request", {"n": number}),)), now=NOW)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(note, range(40)))
    entries = store.entries("job-1", after=0, limit=100)
    assert len(entries) == 41
    assert [entry.id for entry in entries] == sorted(entry.id for entry in entries)


def test_entries_are_stored_once_and_the_cursor_goes_with_them(store: Store) -> None:
    create(store, "job-1")
    entries: Entries = [phase("starting"), *(report(seq=seq, step=seq) for seq in range(2, 6))]
    assert store.append("job-1", entries, after=0, now=NOW) is not None
    assert store.append("job-1", entries, after=0, now=NOW) is None
    assert store.get("job-1").cursor == 5
    stored = store.entries("job-1", after=0, limit=100)
    assert [entry.seq for entry in stored] == [None, 1, 2, 3, 4, 5]


def test_two_readers_of_one_log_store_it_once(store: Store) -> None:
    create(store, "job-1")
    entries: Entries = [report(seq=seq, step=seq) for seq in range(1, 21)]
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: store.append("job-1", entries, after=0, now=NOW), range(4)))
    assert sum(job is not None for job in done) == 1
    assert len(store.entries("job-1", after=0, limit=100, kinds="report")) == 20


def test_the_timeline_is_read_by_type_by_rank_and_in_pages(store: Store) -> None:
    create(store, "job-1")
    entries: Entries = [
        phase("running"),
        *(report(seq=2 + i, rank=i % 2, step=1 + i // 2) for i in range(6)),
        event("checkpoint", {"step": 3, "bytes": 1}, seq=8),
    ]
    store.append("job-1", entries, after=0, now=NOW)
    events = store.entries("job-1", after=0, limit=100, kinds="event")
    assert [entry.kind for entry in events] == ["request", "phase", "checkpoint"]
    assert events[-1].step == 3
    first = store.entries("job-1", after=0, limit=2, kinds="report")
    rest = store.entries("job-1", after=first[-1].id, limit=100, kinds="report")
    assert [entry.seq for entry in first + rest] == [2, 3, 4, 5, 6, 7]
    of_rank = store.entries("job-1", after=0, limit=100, rank=1)
    assert [(entry.rank, entry.step) for entry in of_rank] == [(1, 1), (1, 2), (1, 3)]
    assert of_rank[0].body["worker"] == "w1"


def test_the_latest_ranks_are_those_of_the_newest_generation(store: Store) -> None:
    create(store, "job-1")
    old: Entries = [report(seq=1 + rank, rank=rank, world_size=4) for rank in range(4)]
    store.append("job-1", old, after=0, now=NOW)
    assert [entry.rank for entry in store.latest_reports("job-1")] == [0, 1, 2, 3]
    new: Entries = [report(seq=5 + rank, rank=rank, step=2, generation=2, world_size=3) for rank in range(3)]
    store.append("job-1", new, after=4, now=NOW)
    latest = store.latest_reports("job-1")
    assert [(entry.rank, entry.step, entry.generation) for entry in latest] == [(r, 2, 2) for r in range(3)]
    assert store.has_reported("job-1", 3)
    assert not store.has_reported("job-1", 4)


def test_a_store_opens_again_with_all_that_it_had(url: str, store: Store) -> None:
    job, _ = create(store, "job-1")
    again = Store(url)
    assert again.get("job-1") == job
    again.close()


def test_another_schema_version_is_refused(url: str, store: Store, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "test.db") as connection:
        connection.execute("UPDATE schema_version SET version = 99")
    connection.close()
    with pytest.raises(StoreError, match="schema version 99, this release needs 2"):
        Store(url)


def test_a_database_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE jobs (x INTEGER)")
    connection.close()
    with pytest.raises(StoreError, match="not ours"):
        Store(f"sqlite:///{path}")


def test_a_database_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="unable to open") as caught:
        Store(f"sqlite:///{tmp_path / 'no' / 'such' / 'folder.db'}")
    assert caught.value.code == "store_unavailable"


def test_sqlite_is_in_wal_mode_with_foreign_keys(store: Store) -> None:
    with store._read() as session:
        connection = session.connection()
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1


def test_pages_use_indices(store: Store) -> None:
    plans = {
        "SELECT * FROM jobs WHERE state = 'x' AND number < 5 ORDER BY number DESC LIMIT 3": "jobs_by_state",
        "SELECT * FROM timeline WHERE job_id = 'x' AND id > 5 ORDER BY id LIMIT 3": "timeline_by_job",
        "SELECT * FROM timeline WHERE job_id = 'x' AND type = 'event' AND id > 5 ORDER BY id LIMIT 3": (
            "timeline_by_type"
        ),
        "SELECT * FROM timeline WHERE job_id = 'x' AND rank = 1 AND id > 5 ORDER BY id LIMIT 3": (
            "timeline_by_rank"
        ),
    }
    with store._read() as session:
        for query, index in plans.items():
            rows = session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {query}").all()
            told = " ".join(str(row) for row in rows)
            assert index in told
            assert "TEMP B-TREE" not in told


def test_the_schema_compiles_for_postgresql() -> None:
    statements: list[str] = []
    dialect: Dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    engine = create_mock_engine(
        "postgresql+psycopg://",
        lambda sql, *_: statements.append(str(sql.compile(dialect=dialect))),
    )
    Base.metadata.create_all(engine, checkfirst=False)
    assert sum("CREATE TABLE" in statement for statement in statements) == 4
