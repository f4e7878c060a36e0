"""Every error is a problem with a stable code that names the field or the numbers."""

from collections.abc import Iterator
from typing import Any

import pytest

from api import problems
from api.limits import MAX_BODY_BYTES
from api.problems import field_name
from service import errors
from tests.unit.api.running import SPEC, TOKEN, Running

BEARER = {"Authorization": f"Bearer {TOKEN}"}


def _refused(service: Running, method: str, path: str, status: int, **request: Any) -> dict[str, Any]:
    answer = service.http.request(method, path, headers=BEARER | request.pop("headers", {}), **request)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == status
    assert problem["type"].endswith(problem["code"])
    assert problem["title"]
    assert problem["instance"] == path.partition("?")[0]
    return problem


def test_an_unknown_route_and_a_wrong_method(shared: Running) -> None:
    assert _refused(shared, "GET", "/v2", 404)["code"] == "unknown_route"
    assert _refused(shared, "GET", "/v1/jobs/", 404)["code"] == "unknown_route"
    problem = _refused(shared, "DELETE", "/v1/cluster", 405)
    assert problem["code"] == "method_not_allowed"
    assert "GET" in problem["detail"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": "many"}, "steps"),
        ({"setps": 1}, "setps"),
        ({"model": {"kind": "gpt", "layers": -1}}, "model.layers"),
        ({"model": {"kind": "gpt", "hiden": 1}}, "model.hiden"),
        ({"model": {"kind": "bert"}}, "model"),
        ({"data": {"kind": "text", "paths": []}}, "data.paths"),
        ({"data": {"kind": "text"}}, "data.paths"),
        ({"optimizer": {"betas": [0.9, 2]}}, "optimizer.betas.1"),
        ({"optimizer": {"kind": "sgd", "betas": [0.9, 0.9]}}, "optimizer.betas"),
        ({"optimizer": {"groups": [{"name": "default", "patterns": []}]}}, "optimizer"),
        ({"zero": {"stage": 4}}, "zero.stage"),
        ({"global_batch": 5, "micro_batch": 2}, "body"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/plan"])
def test_an_invalid_spec_names_the_field(
    shared: Running, change: dict[str, Any], field: str, path: str
) -> None:
    problem = _refused(shared, "POST", path, 422, json=SPEC | change)
    assert problem["code"] == "invalid_spec"
    assert problem["errors"][0]["field"] == field
    assert problem["detail"].startswith(field)


def test_a_missing_field_is_named_without_the_rest(shared: Running) -> None:
    problem = _refused(shared, "POST", "/v1/jobs", 422, json={"data": {"kind": "synthetic"}})
    assert {"field": "steps", "message": "Field required"} in problem["errors"]


def test_the_value_seen_is_shown_but_not_at_length(shared: Running) -> None:
    problem = _refused(shared, "POST", "/v1/jobs", 422, json=SPEC | {"name": "/" * 5000})
    assert problem["errors"][0]["value"].startswith("'///")
    assert len(problem["errors"][0]["value"]) == 200


@pytest.mark.parametrize("body", [b"{", b"", b"nonsense", b"\xff\xfe"])
def test_a_body_that_is_no_json(shared: Running, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    problem = _refused(shared, "POST", "/v1/jobs", 400 if body else 422, content=body, headers=headers)
    assert problem["code"] == ("malformed_json" if body else "invalid_spec")


@pytest.mark.parametrize("body", [[], "text", 5, None])
def test_json_that_is_no_object(shared: Running, body: object) -> None:
    assert _refused(shared, "POST", "/v1/jobs", 422, json=body)["code"] == "invalid_spec"


def test_a_body_too_large_announced_or_not(shared: Running) -> None:
    big = b" " * (MAX_BODY_BYTES + 1)

    def chunks() -> Iterator[bytes]:
        yield big

    headers = {"Content-Type": "application/json"}
    for content in (big, chunks()):
        problem = _refused(shared, "POST", "/v1/jobs", 413, content=content, headers=headers)
        assert problem["code"] == "body_too_large"
    assert str(MAX_BODY_BYTES) in problem["detail"]


@pytest.mark.parametrize(
    "query",
    [
        "/v1/jobs?limit=0",
        "/v1/jobs?limit=100000",
        "/v1/jobs?state=asleep",
        "/v1/jobs/x/events?after=-1",
        "/v1/jobs/x/events?after=99999999999999999999999",
        "/v1/jobs/x/ranks/-1/history",
        "/v1/jobs/x/ranks/one/history",
        "/v1/jobs/x/logs?tail=0",
        # S6: a name of a file that is none of the job's.
        "/v1/jobs/x/logs?worker=../../../etc/passwd",
        "/v1/jobs/x/logs?worker=/etc/passwd",
        "/v1/jobs/x/logs?worker=a%00",
        "/v1/jobs/x/logs?worker=a%0A",
    ],
)
def test_a_parameter_out_of_bounds(shared: Running, query: str) -> None:
    problem = _refused(shared, "GET", query, 422)
    assert problem["code"] == "invalid_request"
    assert problem["errors"][0]["field"] in {"limit", "state", "after", "rank", "tail", "worker"}


def test_an_unreadable_cursor(shared: Running) -> None:
    assert _refused(shared, "GET", "/v1/jobs?cursor=x%27--", 422)["code"] == "invalid_cursor"


@pytest.mark.parametrize("job_id", ["unknown", "..", "%2e%2e", "a%2Fb", "%00", "x" * 65])
def test_an_unknown_job(shared: Running, job_id: str) -> None:
    for suffix in ("", "/events", "/ranks", "/logs", "/checkpoints", "/stream"):
        answer = shared.http.get(f"/v1/jobs/{job_id}{suffix}", headers=BEARER)
        assert answer.status_code in {404, 422}, suffix
        assert answer.json()["code"] in {"unknown_job", "unknown_route", "invalid_request"}


def test_an_unknown_rank(service: Running) -> None:
    job_id = service.submit_running()
    assert _refused(service, "GET", f"/v1/jobs/{job_id}/ranks/7/history", 404)["code"] == "unknown_rank"


def test_an_unknown_worker(service: Running) -> None:
    job_id = service.submit_running()
    assert _refused(service, "GET", f"/v1/jobs/{job_id}/logs?worker=w7", 404)["code"] == "unknown_worker"


@pytest.mark.parametrize(
    ("workers", "told"),
    [(5, "4 micro-batches"), (4, "workers.max of 3")],
)
def test_an_impossible_resize_tells_the_bound(service: Running, workers: int, told: str) -> None:
    job_id = service.submit_running()
    problem = _refused(service, "PATCH", f"/v1/jobs/{job_id}", 409, json={"workers": workers})
    assert problem["code"] == "impossible_resize"
    assert told in problem["detail"]
    assert problem["wanted"] == workers


def test_more_than_the_cluster_has(service: Running) -> None:
    big = {"resources": {"cpus": 2}}
    job_id = service.submit_running(**big)
    problem = _refused(service, "PATCH", f"/v1/jobs/{job_id}", 409, json={"workers": 3})
    assert problem["code"] == "impossible_resize"
    assert "place for 2" in problem["detail"]
    problem = _refused(service, "POST", "/v1/jobs", 409, json=SPEC | {"resources": {"cpus": 3}})
    assert problem["code"] == "job_does_not_fit"
    assert problem["reasons"]


@pytest.mark.parametrize(
    "body", [{}, {"workers": 0}, {"workers": "2"}, {"workers": 2.0}, {"workers": 2, "x": 1}]
)
def test_a_resize_that_is_none(shared: Running, body: dict[str, Any]) -> None:
    problem = _refused(shared, "PATCH", "/v1/jobs/unknown", 422, json=body)
    assert problem["code"] == "invalid_request"


def test_the_wrong_state(service: Running) -> None:
    job_id = service.submit_running()
    problem = _refused(service, "POST", f"/v1/jobs/{job_id}/resume", 409)
    assert problem["code"] == "wrong_state"
    assert problem["state"] == "running"


def test_a_stale_version(service: Running) -> None:
    job = service.client.job(service.submit_running())
    path = f"/v1/jobs/{job.id}"
    stale = {"If-Match": f'"{job.version - 1}"'}
    problem = _refused(service, "PATCH", path, 412, json={"workers": 3}, headers=stale)
    assert problem["code"] == "version_conflict"
    assert problem["seen_version"] == job.version
    nonsense = {"If-Match": "*"}
    problem = _refused(service, "PATCH", path, 422, json={"workers": 3}, headers=nonsense)
    assert problem["code"] == "invalid_request"
    assert service.client.resize(job.id, 3, version=job.version).workers.wanted == 3


def test_the_cluster_away(service: Running) -> None:
    service.cluster.available = False
    answer = service.http.get("/v1/cluster", headers=BEARER)
    assert answer.status_code == 503
    assert answer.json()["code"] == "cluster_unavailable"
    assert int(answer.headers["retry-after"]) > 0


def test_a_fault_of_ours_tells_nothing_of_the_inside(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("password=secret")

    monkeypatch.setattr(service.plane, "nodes", broken)
    problem = _refused(service, "GET", "/v1/cluster", 500)
    assert problem["code"] == "internal_error"
    assert "secret" not in str(problem)


def test_every_branch_of_the_error_tree_has_a_status() -> None:
    branches = set(errors.ServiceError.__subclasses__()) - {errors.StoreError}
    assert branches == set(problems.STATUS)
    assert problems.problem_of(errors.ControllerGone("gone"), path="/").status == 503
    assert problems.problem_of(errors.StoreError("old"), path="/").status == 500


def test_a_problem_cannot_be_overwritten_by_details() -> None:
    error = errors.WrongState("no", details={"status": 1, "code": "x", "state": "running"})
    body = problems.problem_of(error, path="/").response("/")
    assert b'"status":409' in bytes(body.body)
    assert b'"code":"wrong_state"' in bytes(body.body)


def test_field_names_leave_out_the_member_of_a_union() -> None:
    body = {"model": {"kind": "gpt", "layers": 0}, "gpt": [{"kind": "x"}]}
    assert field_name(["model", "gpt", "layers"], body) == "model.layers"
    assert field_name(["gpt", 0, "kind"], body) == "gpt.0.kind"
    assert field_name(["absent", "deep", 3], body) == "absent.deep.3"
    assert field_name([], None) == ""
