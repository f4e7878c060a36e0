"""What the routes answer when all goes well."""

import fastapi.routing
import httpx

from tests.unit.api.running import SPEC, TOKEN, Running, until

BEARER = {"Authorization": f"Bearer {TOKEN}"}


def test_a_job_from_submission_to_its_end(service: Running) -> None:
    answer = service.http.post("/v1/jobs", json=SPEC, headers=BEARER)
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert answer.headers["etag"] == f'"{job["version"]}"'
    assert set(job) == {
        *("id", "name", "state", "reason", "version", "attempt", "workers", "generation", "step", "steps"),
        *("loss", "goodput", "submitted_by", "created_at", "updated_at", "finished_at", "spec"),
    }
    assert job["workers"] == {"wanted": 2, "current": 0, "min": 1, "max": 3}
    assert (job["name"], job["state"], job["steps"], job["submitted_by"]) == ("tiny", "queued", 20, "api")
    assert job["spec"]["model"]["hidden"] == 32

    client, job_id = service.client, job["id"]
    until(lambda: client.job(job_id).state == "running")
    service.cluster.train(job_id, 5)
    until(lambda: client.job(job_id).step == 5)
    assert client.job(job_id).loss == 4.0 / 5
    resized = client.resize(job_id, 3)
    assert resized.workers.wanted == 3
    until(lambda: client.job(job_id).workers.current == 3)
    client.save_checkpoint(job_id)
    service.cluster.train(job_id, 15)
    until(lambda: client.job(job_id).over)
    final = client.job(job_id)
    assert (final.state, final.step, final.workers.current) == ("succeeded", 20, 0)
    assert final.finished_at is not None

    events = list(client.events(job_id))
    assert [event.id for event in events] == sorted({event.id for event in events})
    kinds = [event.kind for event in events]
    assert kinds.count("resize") == 1
    assert kinds.count("checkpoint") == 2
    assert [event.data["reason"] for event in events if event.kind == "checkpoint"] == ["demand", "final"]


def test_each_rank_of_the_current_generation_and_its_history(service: Running) -> None:
    job_id = service.submit_running()
    service.cluster.train(job_id, 3)
    service.client.resize(job_id, 3)
    service.cluster.train(job_id, 4)
    until(lambda: len(service.client.ranks(job_id)) == 3)
    until(lambda: service.client.job(job_id).step == 7)
    ranks = service.client.ranks(job_id)
    assert [(report.rank, report.step, report.generation) for report in ranks] == [
        (0, 7, 2),
        (1, 7, 2),
        (2, 7, 2),
    ]
    assert ranks[0].memory.parameters == 4000
    assert ranks[0].predicted.unattributed == 0
    assert [report.step for report in service.client.rank_history(job_id, 0)] == [1, 2, 3, 4, 5, 6, 7]
    assert [report.step for report in service.client.rank_history(job_id, 2)] == [4, 5, 6, 7]
    answer = service.http.get(f"/v1/jobs/{job_id}/ranks/0/history?limit=2", headers=BEARER).json()
    assert [report["step"] for report in answer["reports"]] == [1, 2]
    assert answer["next_after"] == answer["reports"][-1]["id"]
    path = f"/v1/jobs/{job_id}/ranks/0/history?after={answer['next_after']}&limit=2"
    more = service.http.get(path, headers=BEARER).json()
    assert [report["step"] for report in more["reports"]] == [3, 4]
    end = service.http.get(f"/v1/jobs/{job_id}/ranks/0/history?after=99999", headers=BEARER).json()
    assert end == {"reports": [], "next_after": 99999}


def test_a_repeated_submission_returns_the_first_job(service: Running) -> None:
    first = service.client.submit(SPEC, idempotency_key="once")
    assert service.client.submit(SPEC, idempotency_key="once").id == first.id
    assert service.client.submit(SPEC, idempotency_key="twice").id != first.id
    headers = {**BEARER, "Idempotency-Key": "once", "X-Requested-By": "tester"}
    answer = service.http.post("/v1/jobs", json=SPEC | {"steps": 21}, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_conflict")
    assert first.id in answer.json()["detail"]


def test_pages_of_jobs(service: Running) -> None:
    ids = [service.client.submit(SPEC).id for _ in range(5)]
    page = service.client.page(limit=2)
    assert [job.id for job in page.jobs] == ids[:2:-1]
    page = service.client.page(limit=2, cursor=page.next_cursor)
    assert [job.id for job in page.jobs] == ids[2:0:-1]
    page = service.client.page(limit=2, cursor=page.next_cursor)
    assert [job.id for job in page.jobs] == ids[:1]
    assert page.next_cursor is None
    assert [job.id for job in service.client.jobs()] == ids[::-1]
    assert list(service.client.jobs(state="failed")) == []


def test_pause_resume_and_cancel(service: Running) -> None:
    client, job_id = service.client, service.submit_running()
    client.pause(job_id)
    until(lambda: client.job(job_id).state == "paused")
    client.resume(job_id)
    until(lambda: client.job(job_id).state == "running")
    assert client.job(job_id).attempt == 2
    client.cancel(job_id)
    until(lambda: client.job(job_id).state == "cancelled")
    assert client.cancel(job_id).state == "cancelled"


def test_logs_and_checkpoints_of_a_job_that_left_some(service: Running, tmp_path_factory: object) -> None:
    job_id = service.submit_running()
    assert service.client.logs(job_id) == []
    assert service.client.checkpoints(job_id) == []
    folder = service.plane._folder(job_id).worker_logs
    folder.mkdir(parents=True)
    (folder / "w0.log").write_text("one\ntwo\n")
    (folder / "w1.log").write_text("three\n")
    logs = service.client.logs(job_id, tail=1)
    assert [(log.worker, log.lines, log.truncated) for log in logs] == [
        ("w0", ["two"], True),
        ("w1", ["three"], False),
    ]
    assert [log.worker for log in service.client.logs(job_id, worker="w1")] == ["w1"]


def test_a_plan_before_the_start(shared: Running) -> None:
    plan = shared.client.plan(SPEC)
    assert plan.fits
    assert plan.known
    assert plan.per_rank is not None
    assert plan.per_rank.total > plan.per_rank.parameters > 0
    too_many = shared.client.plan(SPEC | {"resources": {"cpus": 3}})
    assert not too_many.fits
    assert "place for 1" in too_many.reasons[0]
    own = {"model": {"kind": "custom", "factory": "mine:Model"}}
    unknown = shared.client.plan(SPEC | own)
    assert (unknown.known, unknown.per_rank, unknown.parameters) == (False, None, None)
    assert unknown.notes


def test_the_cluster(shared: Running) -> None:
    (node,) = shared.client.nodes()
    assert (node.cpus, node.cpus_free, node.alive) == (4, 4, True)


def test_every_route_is_in_the_openapi_document_with_its_answer(shared: Running) -> None:
    document = shared.http.get("/v1/openapi.json", headers=BEARER).json()
    routes = fastapi.routing.iter_route_contexts(shared.app.routes)
    served = {route.path for route in routes if route.path.startswith("/v1/")} - {"/v1/openapi.json"}
    assert served == {path for path in document["paths"] if path.startswith("/v1/")}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            # What a problem looks like, instead of FastAPI's own validation error.
            assert ("4XX" in operation["responses"]) == path.startswith("/v1/")
            assert "422" not in operation["responses"]
            assert bool(operation.get("security")) == path.startswith("/v1/")
    spec = document["components"]["schemas"]["JobSpec"]
    assert spec["additionalProperties"] is False
    assert spec["properties"]["global_batch"]["description"]


def test_head_of_a_stream_does_not_hang(service: Running) -> None:
    job_id = service.submit_running()
    answer = service.http.head(f"/v1/jobs/{job_id}/stream", headers=BEARER)
    assert answer.status_code in {200, 405}


def test_slow_streams_hold_up_no_request(service: Running) -> None:
    job_id = service.submit_running()
    with service.http.stream("GET", f"/v1/jobs/{job_id}/stream", headers=BEARER):
        answer = httpx.get(f"{service.url}/v1/jobs", headers=BEARER, timeout=5, trust_env=False)
    assert answer.status_code == 200
