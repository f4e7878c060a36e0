"""The stream: nothing lost, nothing doubled, however often it breaks off; and bounded."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from api import stream as stream_module
from api.client import Client, Streamed, _server_sent
from api.schemas import EventOut, JobOut, ReportOut
from service.fake_cluster import FakeCluster
from tests.unit.api.running import TOKEN, Running, running, until

BEARER = {"Authorization": f"Bearer {TOKEN}"}
Item = tuple[str, dict[str, Any], int | None]


def _read(service: Running, job_id: str, *, most: int | None = None, **request: Any) -> list[Item]:
    """Items of a stream, all or the first `most`."""
    items: list[Item] = []
    headers = BEARER | request.pop("headers", {})
    with service.http.stream("GET", f"/v1/jobs/{job_id}/stream", headers=headers, **request) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for name, data, entry_id in _server_sent(answer.iter_lines()):
            items.append((name, json.loads(data), entry_id))
            if most is not None and len(items) == most:
                break
    return items


def _finished(service: Running, *, steps: int = 20) -> str:
    job_id = service.submit_running(steps=steps)
    service.cluster.train(job_id, steps)
    until(lambda: service.client.job(job_id).over)
    return job_id


def test_a_finished_job_is_told_whole_and_the_stream_ends(service: Running) -> None:
    job_id = _finished(service)
    items = _read(service, job_id)
    told = [entry_id for _, _, entry_id in items if entry_id is not None]
    entries = service.plane.timeline(job_id, after=0, limit=1000)
    assert told == [entry.id for entry in entries]
    reports = [data for name, data, _ in items if name == "report"]
    assert len(reports) == 40
    assert [data["seq"] for name, data, _ in items if name != "job" and data["seq"]] == list(
        range(1, sum(entry.seq is not None for entry in entries) + 1)
    )
    name, job, entry_id = items[-1]
    assert (name, job["state"], entry_id) == ("job", "succeeded", None)
    # The same objects as over REST.
    assert job == service.http.get(f"/v1/jobs/{job_id}", headers=BEARER).json()
    latest = service.http.get(f"/v1/jobs/{job_id}/ranks", headers=BEARER).json()["ranks"]
    assert latest == reports[-2:]
    events = service.http.get(f"/v1/jobs/{job_id}/events", headers=BEARER).json()["events"]
    assert events == [data for name, data, _ in items if name == "event"]


def test_it_goes_on_exactly_after_any_id(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "PAGE", 3)
    job_id = _finished(service, steps=3)
    ids = [entry_id for _, _, entry_id in _read(service, job_id) if entry_id]
    for cut in range(len(ids)):
        by_header = _read(service, job_id, headers={"Last-Event-ID": str(ids[cut])}) if ids[cut + 1 :] else []
        by_query = _read(service, job_id, params={"after": ids[cut]})
        assert [entry_id for _, _, entry_id in by_query if entry_id] == ids[cut + 1 :]
        assert by_header in ([], by_query)


def test_the_header_counts_before_the_query(service: Running) -> None:
    job_id = _finished(service, steps=3)
    ids = [entry_id for _, _, entry_id in _read(service, job_id) if entry_id]
    items = _read(service, job_id, params={"after": 0}, headers={"Last-Event-ID": str(ids[-2])})
    assert [entry_id for _, _, entry_id in items if entry_id] == ids[-1:]


def test_a_browser_that_comes_again_after_the_end_is_sent_away(service: Running) -> None:
    job_id = _finished(service, steps=3)
    last = service.plane.timeline(job_id, after=0, limit=1000)[-1].id
    answer = service.http.get(f"/v1/jobs/{job_id}/stream", headers={**BEARER, "Last-Event-ID": str(last)})
    assert answer.status_code == 204


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "9" * 40])
def test_a_last_id_that_is_none(service: Running, last: str) -> None:
    job_id = service.submit_running()
    answer = service.http.get(f"/v1/jobs/{job_id}/stream", headers={**BEARER, "Last-Event-ID": last})
    assert answer.status_code == 422
    assert answer.json()["code"] == "invalid_request"


def test_news_come_as_they_happen(service: Running) -> None:
    job_id = service.submit_running()
    stream = service.client.follow(job_id)
    _next(stream, lambda item: isinstance(item, EventOut) and item.data.get("phase") == "running")
    for step in (1, 2):
        service.cluster.train(job_id)
        seen = _next(stream, lambda item: isinstance(item, ReportOut) and item.rank == 1)
        assert seen.item.step == step  # type: ignore[union-attr]
    service.client.resize(job_id, 3)
    _next(stream, lambda item: isinstance(item, EventOut) and item.kind == "resize")
    _next(stream, lambda item: isinstance(item, JobOut) and item.workers.current == 3)
    service.client.cancel(job_id)
    last = list(stream)[-1].item
    assert isinstance(last, JobOut)
    assert last.state == "cancelled"


def _next(stream: Iterator[Streamed], wanted: Any) -> Streamed:
    return next(streamed for streamed in stream if wanted(streamed.item))


def test_a_client_survives_a_restart_of_the_service_and_misses_nothing(tmp_path: Path) -> None:
    cluster, seqs, last = FakeCluster(), [], []
    with running(tmp_path, cluster=cluster) as first:
        job_id = first.submit_running()
        port = int(first.url.rsplit(":", 1)[1])
        url = first.url

        def follow() -> None:
            with Client(url, TOKEN) as client:
                for streamed in client.follow(job_id):
                    if isinstance(streamed.item, JobOut):
                        last[:] = [streamed.item]
                    elif streamed.item.seq is not None:
                        seqs.append(streamed.item.seq)

        follower = threading.Thread(target=follow)
        follower.start()
        cluster.train(job_id, 5)
        until(lambda: len(seqs) >= 8)
    cluster.train(job_id, 5)
    with running(tmp_path, cluster=cluster, port=port):
        cluster.train(job_id, 10)
        follower.join(20)
        assert not follower.is_alive()
    assert seqs == [entry["seq"] for entry in cluster.log_of(job_id)]
    assert last[0].state == "succeeded"


def test_a_quiet_stream_has_heartbeats(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "HEARTBEAT_S", 0.05)
    job_id = service.submit_running()
    with service.http.stream("GET", f"/v1/jobs/{job_id}/stream", headers=BEARER) as answer:
        beats = (line for line in answer.iter_lines() if line.startswith(":"))
        assert len([next(beats), next(beats)]) == 2


def test_more_streams_than_the_bound_are_refused_and_given_back(tmp_path: Path) -> None:
    with running(tmp_path, max_streams=2) as service:
        job_id = service.submit_running()
        path = f"/v1/jobs/{job_id}/stream"
        with ExitStack() as stack:
            http = stack.enter_context(httpx.Client(base_url=service.url, headers=BEARER, trust_env=False))
            lines = [stack.enter_context(http.stream("GET", path)).iter_lines() for _ in range(2)]
            assert [next(one) for one in lines] == ["event: job"] * 2
            refused = service.http.get(path, headers=BEARER)
            assert refused.status_code == 503
            assert refused.json()["code"] == "too_many_streams"
            assert service.http.get("/v1/jobs", headers=BEARER).status_code == 200
        until(lambda: service.app.state.streams._open == 0)
        assert _read(service, job_id, most=1)[0][0] == "job"


def test_lines_to_events() -> None:
    lines = [": ping", "", "id: 7", "event: report", "data: {", "data:  1}", "", "data: x", "", "event: lost"]
    assert list(_server_sent(iter(lines))) == [("report", "{\n 1}", 7), ("", "x", None)]
