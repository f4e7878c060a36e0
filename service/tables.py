"""The tables of the database and their version. Knows columns and indices; no query and no meaning.

Every index serves one bounded query of `service.store`; migrations between versions do not exist yet.
"""

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA_VERSION = 2

_Number = BigInteger().with_variant(Integer, "sqlite")
"""SQLite counts up by itself only in a column of type INTEGER."""


class Base(DeclarativeBase):
    """All our tables."""


class SchemaRow(Base):
    """One row: the version of all the tables."""

    __tablename__ = "schema_version"

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class JobRow(Base):
    """A job; `number` orders jobs by submission, newest last."""

    __tablename__ = "jobs"

    number: Mapped[int] = mapped_column(_Number, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(63), unique=True)
    idempotency_key: Mapped[str | None] = mapped_column(String(512), unique=True)
    spec: Mapped[str] = mapped_column(Text)
    name: Mapped[str] = mapped_column(String(80))
    submitted_by: Mapped[str] = mapped_column(String(200))
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    version: Mapped[int]
    attempt: Mapped[int]
    wanted_workers: Mapped[int]
    workers: Mapped[int]
    generation: Mapped[int]
    step: Mapped[int] = mapped_column(BigInteger)
    loss: Mapped[float | None]
    created_at: Mapped[float]
    updated_at: Mapped[float]
    queued_at: Mapped[float]
    finished_at: Mapped[float | None]
    cursor: Mapped[int] = mapped_column(BigInteger)
    controller_losses: Mapped[int]
    began_at: Mapped[float | None]
    seen_at: Mapped[float | None]
    productive_s: Mapped[float]
    productive_step: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (Index("jobs_by_state", "state", "number"),)


class TimelineRow(Base):
    """An entry of a job's timeline; `seq` is its number in the controller's log, null for our own notes."""

    __tablename__ = "timeline"

    id: Mapped[int] = mapped_column(_Number, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    seq: Mapped[int | None] = mapped_column(BigInteger)
    type: Mapped[str] = mapped_column(String(8))
    kind: Mapped[str] = mapped_column(String(32))
    time: Mapped[float]
    rank: Mapped[int | None]
    generation: Mapped[int]
    step: Mapped[int | None] = mapped_column(BigInteger)
    body: Mapped[dict[str, Any]] = mapped_column(JSON)

    __table_args__ = (
        UniqueConstraint("job_id", "seq"),
        Index("timeline_by_job", "job_id", "id"),
        Index("timeline_by_type", "job_id", "type", "id"),
        Index("timeline_by_rank", "job_id", "rank", "id"),
        # An id is never given twice: streams resume after the last id they saw.
        {"sqlite_autoincrement": True},
    )


class RankLatestRow(Base):
    """Which timeline entry is the newest report of a rank; as many rows as the job had ranks at most."""

    __tablename__ = "rank_latest"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    generation: Mapped[int]
    entry_id: Mapped[int] = mapped_column(ForeignKey("timeline.id", ondelete="CASCADE"))
