"""The API from Python: one method for each thing it can do, typed, synchronous.

Used by the command line, the demo and the tests. Knows HTTP and the wire schemas, not where the service or
its token is kept: `api.connection` finds those.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from api.schemas import (
    WHO_HEADER,
    CheckpointOut,
    CheckpointsOut,
    EventOut,
    EventsOut,
    ExportOut,
    JobOut,
    JobPageOut,
    LogOut,
    LogsOut,
    NodeOut,
    NodesOut,
    PlanOut,
    RankHistoryOut,
    RanksOut,
    ReadinessOut,
    ReportOut,
    VerifyOut,
)
from workers.spec import JobSpec

TIMEOUT_S = 30.0
SILENCE_TIMEOUT_S = 35.0
"""Longest silence on a stream; the service sends a heartbeat every ten seconds."""

RECONNECT_PAUSE_S = 0.5

_PATIENT = httpx.Timeout(TIMEOUT_S, read=None)
"""For what reads whole checkpoints."""

_Model = TypeVar("_Model", bound=BaseModel)
StreamItem = JobOut | EventOut | ReportOut
_STREAMED: dict[str, type[JobOut | EventOut | ReportOut]] = {
    "job": JobOut,
    "event": EventOut,
    "report": ReportOut,
}


class ClientError(Exception):
    """Root: the service could not be asked, or refused."""


class Unreachable(ClientError):  # noqa: N818 - named for the outcome
    """Nothing answered at the address, or the answer broke off."""


class Refused(ClientError):  # noqa: N818 - named for the outcome
    """The service answered with a problem: its HTTP status, stable code, and further members."""

    def __init__(self, status: int, code: str, detail: str, members: dict[str, Any]) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.members = members


class Ambiguous(ClientError):  # noqa: N818 - named for the outcome
    """The beginning of an id that several jobs, or nodes, share."""


class NoSuchNode(ClientError):  # noqa: N818 - named for the outcome
    """No node of the cluster is meant by what was given."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """One item of a job's stream. `after` is where a new stream would go on."""

    item: StreamItem
    after: int


class Client:
    """A connection to one service. Close it, or use it in a `with` block.

    Every method raises Unreachable, or Refused with the code that the service gave.
    """

    def __init__(self, url: str, token: str, *, who: str = "client") -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}", WHO_HEADER: who},
            timeout=TIMEOUT_S,
            # The address is on this machine or given; a proxy from the environment has no part in it.
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Jobs.

    def submit(self, spec: JobSpec | dict[str, Any], *, idempotency_key: str | None = None) -> JobOut:
        """Submit a job. A dict is sent as it is, for the service to judge."""
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return self._ask(JobOut, "POST", "/v1/jobs", json=_body(spec), headers=headers)

    def plan(self, spec: JobSpec | dict[str, Any]) -> PlanOut:
        """What a job would need on each rank, and whether the cluster has room."""
        return self._ask(PlanOut, "POST", "/v1/plan", json=_body(spec))

    def job(self, job_id: str) -> JobOut:
        return self._ask(JobOut, "GET", _path(job_id))

    def find(self, prefix: str) -> JobOut:
        """The job with this id, or the only one whose id begins so. Raises Ambiguous."""
        try:
            return self.job(prefix)
        except Refused as refusal:
            if refusal.code != "unknown_job" or not prefix:
                raise
            found = [job for job in self.jobs() if job.id.startswith(prefix)]
            if not found:
                raise
        if len(found) > 1:
            ids = ", ".join(job.id for job in found[:5])
            raise Ambiguous(f"{len(found)} jobs begin with {prefix!r}: {ids}; give more of the id")
        return found[0]

    def page(self, *, cursor: str | None = None, limit: int = 50, state: str | None = None) -> JobPageOut:
        """Jobs, newest first, and the cursor of the next page."""
        wanted = {"cursor": cursor, "limit": limit, "state": state}
        return self._ask(JobPageOut, "GET", "/v1/jobs", params=_given(wanted))

    def jobs(self, *, state: str | None = None) -> Iterator[JobOut]:
        """All jobs, newest first, a page at a time."""
        cursor: str | None = None
        while True:
            page = self.page(cursor=cursor, limit=200, state=state)
            yield from page.jobs
            cursor = page.next_cursor
            if cursor is None:
                return

    def resize(self, job_id: str, workers: int, *, version: int | None = None) -> JobOut:
        """Ask for another world size; with `version`, only if the job is still at it."""
        headers = {} if version is None else {"If-Match": f'"{version}"'}
        return self._ask(JobOut, "PATCH", _path(job_id), json={"workers": workers}, headers=headers)

    def cancel(self, job_id: str) -> JobOut:
        return self._ask(JobOut, "POST", _path(job_id, "/cancel"))

    def pause(self, job_id: str) -> JobOut:
        return self._ask(JobOut, "POST", _path(job_id, "/pause"))

    def resume(self, job_id: str) -> JobOut:
        return self._ask(JobOut, "POST", _path(job_id, "/resume"))

    # What happened to a job.

    def events(self, job_id: str, *, after: int = 0) -> Iterator[EventOut]:
        """All events after an id, oldest first, a page at a time."""
        while True:
            wanted = {"after": after, "limit": 1000}
            page = self._ask(EventsOut, "GET", _path(job_id, "/events"), params=wanted)
            yield from page.events
            if not page.events:
                return
            after = page.next_after

    def ranks(self, job_id: str) -> list[ReportOut]:
        """The newest report of each rank of the current generation."""
        return self._ask(RanksOut, "GET", _path(job_id, "/ranks")).ranks

    def rank_history(self, job_id: str, rank: int, *, after: int = 0) -> Iterator[ReportOut]:
        """All reports of one rank after an id, oldest first, a page at a time."""
        while True:
            wanted = {"after": after, "limit": 1000}
            page = self._ask(RankHistoryOut, "GET", _path(job_id, f"/ranks/{rank}/history"), params=wanted)
            yield from page.reports
            if not page.reports:
                return
            after = page.next_after

    def logs(self, job_id: str, *, worker: str | None = None, tail: int = 100) -> list[LogOut]:
        """The last lines of each worker's log."""
        wanted = _given({"worker": worker, "tail": tail})
        return self._ask(LogsOut, "GET", _path(job_id, "/logs"), params=wanted).logs

    def checkpoints(self, job_id: str) -> list[CheckpointOut]:
        """The committed checkpoints that can be loaded, newest last."""
        return self.surveyed_checkpoints(job_id).checkpoints

    def surveyed_checkpoints(self, job_id: str) -> CheckpointsOut:
        """The committed checkpoints, those that are damaged apart."""
        return self._ask(CheckpointsOut, "GET", _path(job_id, "/checkpoints"))

    def save_checkpoint(self, job_id: str) -> JobOut:
        """Save one at the next step boundary."""
        return self._ask(JobOut, "POST", _path(job_id, "/checkpoints"))

    def verify_checkpoint(self, job_id: str, step: int) -> VerifyOut:
        """Have a whole checkpoint read; waits as long as that takes."""
        path = _path(job_id, f"/checkpoints/{step}/verify")
        return self._ask(VerifyOut, "POST", path, timeout=_PATIENT)

    def export_checkpoint(
        self, job_id: str, step: int, *, dtype: str = "master", max_shard_bytes: int | None = None
    ) -> ExportOut:
        """Have a checkpoint's parameters exported into the job's folder; waits as long as that takes."""
        body = _given({"dtype": dtype, "max_shard_bytes": max_shard_bytes})
        path = _path(job_id, f"/checkpoints/{step}/export")
        return self._ask(ExportOut, "POST", path, json=body, timeout=_PATIENT)

    def follow(self, job_id: str, *, after: int = 0, patience_s: float = 60.0) -> Iterator[Streamed]:
        """What happened after an id and what happens, until the job is over.

        Goes on where it was when the connection is lost. Raises Unreachable once the service has not
        answered for `patience_s`.
        """
        lost_since: float | None = None
        while True:
            try:
                for streamed in self._stream(job_id, after):
                    lost_since, after = None, streamed.after
                    yield streamed
                    if isinstance(streamed.item, JobOut) and streamed.item.over:
                        return
            except Unreachable:
                if lost_since is not None and time.monotonic() - lost_since > patience_s:
                    raise
            lost_since = lost_since or time.monotonic()
            time.sleep(RECONNECT_PAUSE_S)

    # The service.

    def nodes(self) -> list[NodeOut]:
        """The cluster's nodes and who is on them."""
        return self._ask(NodesOut, "GET", "/v1/nodes").nodes

    def find_node(self, prefix: str) -> NodeOut:
        """The only node whose id begins so, or that lives at this address. Raises NoSuchNode, Ambiguous."""
        nodes = self.nodes()
        found = [
            node
            for node in nodes
            # A machine that was started again has its old node's address.
            if prefix and (node.id.startswith(prefix) or (node.alive and node.address == prefix))
        ]
        if not found:
            known = ", ".join(f"{node.id[:12]} ({node.address})" for node in nodes) or "none"
            raise NoSuchNode(f"no node begins with {prefix!r}; there are: {known}")
        if len(found) > 1:
            ids = ", ".join(node.id[:12] for node in found[:5])
            raise Ambiguous(f"{len(found)} nodes are meant by {prefix!r}: {ids}; give more of the id")
        return found[0]

    def drain(self, node_id: str, *, reason: str = "asked for", deadline_s: float | None = None) -> NodeOut:
        """Give a node no new work, and have jobs move off it."""
        body = {"reason": reason, "deadline_s": deadline_s}
        return self._ask(NodeOut, "POST", f"/v1/nodes/{quote(node_id, safe='')}/drain", json=body)

    def ready(self) -> ReadinessOut:
        """How what the service needs stands; a service that is not ready answers too."""
        response = self._send("GET", "/readyz")
        return ReadinessOut.model_validate_json(response.content)

    def _stream(self, job_id: str, after: int) -> Iterator[Streamed]:
        timeout = httpx.Timeout(TIMEOUT_S, read=SILENCE_TIMEOUT_S)
        try:
            with self._http.stream(
                "GET",
                _path(job_id, "/stream"),
                headers={"Accept": "text/event-stream"},
                params={"after": after},
                timeout=timeout,
            ) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response)
                for name, data, entry_id in _server_sent(response.iter_lines()):
                    after = entry_id or after
                    if name in _STREAMED:  # a newer service may tell of more
                        yield Streamed(_STREAMED[name].model_validate_json(data), after)
        except httpx.TransportError as error:
            raise Unreachable(f"the stream from {self.url} broke off: {error!r}") from error

    def _ask(self, model: type[_Model], method: str, path: str, **request: Any) -> _Model:
        response = self._send(method, path, **request)
        if not response.is_success:
            raise _refusal(response)
        return model.model_validate_json(response.content)

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise Unreachable(f"no answer from {self.url}: {error!r}") from error


def _server_sent(lines: Iterator[str]) -> Iterator[tuple[str, str, int | None]]:
    """(event, data, id) of each server-sent event in `lines`; comments are passed over."""
    data: list[str] = []
    name, entry_id = "", None
    for line in lines:
        if not line:
            if data:
                yield name, "\n".join(data), entry_id
            name, data, entry_id = "", [], None
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "event":
                name = value
            case "data":
                data.append(value)
            case "id":
                entry_id = int(value)


def _refusal(response: httpx.Response) -> Refused:
    try:
        members = response.json()
        return Refused(response.status_code, members["code"], members["detail"], members)
    except (json.JSONDecodeError, KeyError, TypeError):
        text = response.text[:200]
        return Refused(
            response.status_code, "not_ours", f"an answer that is not from elastic-zero: {text}", {}
        )


def _body(spec: JobSpec | dict[str, Any]) -> dict[str, Any]:
    return spec.model_dump(mode="json") if isinstance(spec, JobSpec) else spec


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _path(job_id: str, rest: str = "") -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}{rest}"
