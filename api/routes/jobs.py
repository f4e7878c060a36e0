"""Jobs: submit, list, get, resize, stop, and what happened to them."""

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from api.routes.parameters import After, ExpectedVersion, JobId, Limit, Plane, Who
from api.schemas import (
    MAX_ID,
    EventsOut,
    JobOut,
    JobPageOut,
    LogsOut,
    ResizeIn,
)
from api.stream import Streams
from service.errors import InvalidRequest
from service.jobs import Job, JobState
from service.logs import MAX_TAIL_LINES
from workers.spec import JobSpec

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


def _answer(job: Job, response: Response) -> JobOut:
    response.headers["ETag"] = f'"{job.version}"'
    return JobOut.of(job)


@router.post("", status_code=201)
def submit(
    spec: JobSpec,
    plane: Plane,
    who: Who,
    response: Response,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=200,
            description="A repeat with the same key returns the first job instead of submitting another.",
        ),
    ] = None,
) -> JobOut:
    """Submit a job; it is refused here if it could never fit the cluster as it is."""
    job = plane.submit(spec, who=who, idempotency_key=idempotency_key)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return _answer(job, response)


@router.get("")
def list_jobs(
    plane: Plane,
    cursor: Annotated[
        str | None, Query(max_length=64, description="`next_cursor` of the page before.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
) -> JobPageOut:
    """Jobs, newest first."""
    return JobPageOut.of(plane.list_jobs(cursor=cursor, limit=limit, state=state))


@router.get("/{job_id}")
def get_job(job_id: JobId, plane: Plane, response: Response) -> JobOut:
    """One job as it is now."""
    return _answer(plane.get(job_id), response)


@router.patch("/{job_id}", status_code=202)
def resize(
    *,
    job_id: JobId,
    change: ResizeIn,
    plane: Plane,
    who: Who,
    expected_version: ExpectedVersion,
    response: Response,
) -> JobOut:
    """Ask for another world size; the job trains on until its new workers are ready."""
    job = plane.resize(job_id, change.workers, who=who, expected_version=expected_version)
    return _answer(job, response)


@router.post("/{job_id}/cancel", status_code=202)
def cancel(job_id: JobId, plane: Plane, who: Who, response: Response) -> JobOut:
    """Stop the job for good. `cancelled` shows once its workers are gone."""
    return _answer(plane.cancel(job_id, who=who), response)


@router.post("/{job_id}/pause", status_code=202)
def pause(job_id: JobId, plane: Plane, who: Who, response: Response) -> JobOut:
    """Save the job's state and free its workers."""
    return _answer(plane.pause(job_id, who=who), response)


@router.post("/{job_id}/resume", status_code=202)
def resume(job_id: JobId, plane: Plane, who: Who, response: Response) -> JobOut:
    """Let a paused job go on from its last checkpoint."""
    return _answer(plane.resume(job_id, who=who), response)


@router.get("/{job_id}/events")
def events(job_id: JobId, plane: Plane, after: After = 0, limit: Limit = 100) -> EventsOut:
    """What happened to the job, oldest first."""
    return EventsOut.of(plane.timeline(job_id, after=after, limit=limit, kinds="event"), after)


@router.get("/{job_id}/logs")
def logs(
    job_id: JobId,
    plane: Plane,
    worker: Annotated[
        str | None,
        Query(
            max_length=63,
            pattern=r"^[a-z0-9][a-z0-9-]*$",
            description="One worker by name; all of them without.",
        ),
    ] = None,
    tail: Annotated[int, Query(ge=1, le=MAX_TAIL_LINES, description="Last lines of each log.")] = 100,
) -> LogsOut:
    """The ends of the workers' logs."""
    return LogsOut.of(plane.logs(job_id, worker=worker, tail_lines=tail))


@router.get("/{job_id}/stream", response_class=Response, responses={204: {}})
def stream(
    request: Request,
    job_id: JobId,
    after: After = 0,
    last_event_id: Annotated[
        str | None, Header(description="Sent by browsers that connect again; counts before `after`.")
    ] = None,
) -> Response:
    """Server-sent events `job`, `event` and `report` as they come; the stream ends with the job."""
    streams: Streams = request.app.state.streams
    if last_event_id:
        after = _entry_id(last_event_id)
    return streams.answer(job_id, after=after, resumed=bool(last_event_id))


def _entry_id(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= MAX_ID:
        return int(text)
    raise InvalidRequest(f"the header Last-Event-ID is {text[:40]!r}, not the id of a timeline entry")
