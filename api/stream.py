"""A job's timeline as server-sent events: everything after an id, then what comes, until the job is over.

Events `event` and `report` carry the timeline's ids, so a client that connects again goes on exactly where
it was; `job` tells the job whenever it has changed and carries no id, which leaves the client's last one
standing. Bounded: in the number of open streams, in the page that is held, and in each wait.
"""

from collections.abc import AsyncIterator, Callable
from typing import TypeVar, TypeVarTuple

import anyio.to_thread
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.problems import Problem
from api.schemas import EventOut, JobOut, ReportOut
from service.control_plane import ControlPlane
from service.jobs import TERMINAL, Job
from service.store import TimelineEntry

MAX_STREAMS = 64
PAGE = 200
HEARTBEAT_S = 10.0
WAIT_S = 2.0
"""Longest wait for news in one go, which bounds how long a stream that was left holds its thread."""

SEND_TIMEOUT_S = 30.0
"""A client that takes nothing for so long is let go; it can connect again and miss nothing."""

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


class Streams:
    """The open streams of one service. They wait in threads of their own, and so never hold up a request."""

    def __init__(self, plane: ControlPlane, *, limit: int = MAX_STREAMS) -> None:
        self._plane = plane
        self._limit = limit
        self._open = 0
        self._threads: anyio.CapacityLimiter | None = None

    def answer(self, job_id: str, *, after: int, resumed: bool) -> Response:
        """The answer that streams what has an id greater than `after`. Raises NotFound.

        To a client that comes again (`resumed`) for a job that is over and told, 204: browsers stop then.
        """
        job, entries = self._look(job_id, after)
        if resumed and job.state in TERMINAL and not entries:
            return Response(status_code=204)
        return _JobStream(self, job_id, after)

    async def serve(self, job_id: str, after: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, or the refusal where too many are open."""
        if self._open >= self._limit:
            refusal = Problem(
                503,
                "too_many_streams",
                f"all {self._limit} streams are in use; close one, or read /v1/jobs/{job_id}/events",
                headers={"Retry-After": "5"},
            )
            await refusal.response(scope["path"])(scope, receive, send)
            return
        self._open += 1
        try:
            response = EventSourceResponse(
                self._events(job_id, after), ping=HEARTBEAT_S, sep="\n", send_timeout=SEND_TIMEOUT_S
            )
            await response(scope, receive, send)
        finally:
            self._open -= 1

    async def _events(self, job_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
        told: Job | None = None
        while True:
            job, entries = await self._in_thread(self._look, job_id, after)
            complete = len(entries) < PAGE
            if told is None and job.state not in TERMINAL:
                yield _job(job)
                told = job
            for entry in entries:
                yield _entry(entry)
                after = entry.id
            if not complete:
                continue
            # That the job is over is told last, after all that led to it.
            if job != told:
                yield _job(job)
                told = job
            if job.state in TERMINAL:
                return
            await self._in_thread(self._plane.wait_for_change, job_id, after, WAIT_S)

    def _look(self, job_id: str, after: int) -> tuple[Job, list[TimelineEntry]]:
        """The job, then a page of its timeline: where the job is over, a short page is the last one."""
        job = self._plane.get(job_id)
        return job, self._plane.timeline(job_id, after=after, limit=PAGE, kinds=None)

    async def _in_thread(
        self, function: Callable[[*_Arguments], _Result], *arguments: *_Arguments
    ) -> _Result:
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(self._limit)
        return await anyio.to_thread.run_sync(
            function, *arguments, abandon_on_cancel=True, limiter=self._threads
        )


class _JobStream(Response):
    """The answer to one client; the stream is opened and counted while it is being sent."""

    def __init__(self, streams: Streams, job_id: str, after: int) -> None:
        super().__init__(media_type="text/event-stream")
        self._streams = streams
        self._job_id = job_id
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._streams.serve(self._job_id, self._after, scope, receive, send)


def _job(job: Job) -> ServerSentEvent:
    return ServerSentEvent(JobOut.of(job).model_dump_json(), event="job", sep="\n")


def _entry(entry: TimelineEntry) -> ServerSentEvent:
    body, name = (ReportOut.of(entry), "report") if entry.kind == "report" else (EventOut.of(entry), "event")
    return ServerSentEvent(body.model_dump_json(), event=name, id=str(entry.id), sep="\n")
