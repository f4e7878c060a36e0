"""Nobody gets in without the token, by any route or method, nor through somebody's browser (S7)."""

import re

import fastapi.routing
import pytest

from api.auth import SESSION_COOKIE, SESSION_LIFETIME_S, Auth
from tests.unit.api.running import TOKEN, Running

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
OPEN = {("GET", "/healthz"), ("HEAD", "/healthz"), ("GET", "/readyz"), ("HEAD", "/readyz")}
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def _paths(service: Running) -> set[str]:
    routes = fastapi.routing.iter_route_contexts(service.app.routes)
    return {re.sub(r"{[^}]*}", "1", route.path) for route in routes}


def test_every_route_and_method_is_refused_without_a_token(shared: Running) -> None:
    paths = _paths(shared)
    assert {"/v1/jobs", "/v1/jobs/1/stream", "/docs", "/v1/openapi.json", "/dashboard/assets/1"} <= paths
    for path in sorted(paths | {"/", "/nowhere", "//v1/jobs", "/healthz/"}):
        for method in METHODS:
            if (method, path) in OPEN or path == "/dashboard/session":
                continue
            answer = shared.http.request(method, path)
            assert answer.status_code == 401, (method, path)
            assert "www-authenticate" in answer.headers


def test_signing_in_takes_the_token(shared: Running) -> None:
    for method in METHODS:
        answer = shared.http.request(method, "/dashboard/session", content=b"token=wrong")
        assert answer.status_code == 401, method
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("value", ["Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"])
def test_a_wrong_token_is_refused(shared: Running, value: str) -> None:
    answer = shared.http.get("/v1/jobs", headers={"Authorization": value})
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "unauthorized"


def test_the_token_lets_in(shared: Running) -> None:
    assert shared.http.get("/v1/jobs", headers=BEARER).status_code == 200
    assert shared.http.get("/v1/openapi.json", headers=BEARER).json()["info"]["title"] == "elastic-zero"
    assert shared.http.get("/docs", headers=BEARER).status_code == 200


def test_health_needs_none(service: Running) -> None:
    assert service.http.get("/healthz").json() == {"status": "ok"}
    assert service.http.head("/healthz").status_code == 200
    assert service.http.get("/readyz").json()["ok"] is True
    service.cluster.available = False
    answer = service.http.get("/readyz")
    assert answer.status_code == 503
    assert "unavailable" in answer.json()["checks"]["cluster"]


@pytest.mark.parametrize(
    "host", ["attacker.example", "127.0.0.1.attacker.example:80", "", "[bad", "10.0.0.1"]
)
def test_a_foreign_host_is_refused_although_the_token_is_right(shared: Running, host: str) -> None:
    for path in ("/v1/jobs", "/healthz", "/dashboard"):
        answer = shared.http.get(path, headers={**BEARER, "Host": host})
        assert answer.status_code in {400, 403}, path  # the server itself refuses what is no host at all
        if answer.status_code == 403:
            assert answer.json()["code"] == "foreign_host"


def test_loopback_by_any_of_its_names(shared: Running) -> None:
    for host in ("localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8400"):
        assert shared.http.get("/v1/jobs", headers={**BEARER, "Host": host}).status_code == 200, host


@pytest.mark.parametrize(
    "origin", ["https://attacker.example", "http://127.0.0.1:1", "null", "http://localhost"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_a_foreign_origin_is_refused(shared: Running, origin: str, method: str) -> None:
    answer = shared.http.request(method, "/v1/jobs", headers={**BEARER, "Origin": origin})
    assert answer.status_code == 403
    assert answer.json()["code"] == "foreign_origin"
    assert "access-control-allow-origin" not in answer.headers


def test_the_own_origin_is_served(shared: Running) -> None:
    answer = shared.http.get("/v1/jobs", headers={**BEARER, "Origin": shared.url})
    assert answer.status_code == 200


def test_a_session_reads_and_changes_from_the_own_origin_only(service: Running) -> None:
    answer = service.http.post("/dashboard/session", data={"token": TOKEN}, headers={"Origin": service.url})
    assert answer.status_code == 303
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    # httpx keeps the cookie from here on.
    assert service.http.get("/v1/jobs").status_code == 200
    assert service.http.get("/dashboard").status_code == 200
    unknown = "/v1/jobs/unknown/cancel"
    assert service.http.post(unknown).json()["code"] == "foreign_origin"
    assert service.http.post(unknown, headers={"Origin": "http://127.0.0.1:1"}).status_code == 403
    assert service.http.post(unknown, headers={"Origin": service.url}).json()["code"] == "unknown_job"


def test_a_session_ends_and_cannot_be_made_up() -> None:
    now = [1_000.0]
    auth = Auth(token="a", now_s=lambda: now[0])
    cookie = auth.issue_session()
    assert auth.accepts_session(cookie)
    ends, signature = cookie.split(".")
    assert not auth.accepts_session(f"{int(ends) + 1}.{signature}")
    assert not auth.accepts_session(f"{ends}.")
    assert not auth.accepts_session("")
    assert not Auth(token="b", now_s=lambda: now[0]).accepts_session(cookie)
    now[0] += SESSION_LIFETIME_S
    assert not auth.accepts_session(cookie)


def test_a_made_up_cookie_is_refused(service: Running) -> None:
    service.http.cookies.set(SESSION_COOKIE, "9999999999.00")
    assert service.http.get("/v1/jobs").status_code == 401


def test_who_asks_is_a_label_of_plain_characters(service: Running) -> None:
    job_id = service.submit_running()
    service.http.post(f"/v1/jobs/{job_id}/pause", headers={**BEARER, "X-Requested-By": "<b>x</b>"})
    asked = [event.data for event in service.client.events(job_id) if event.kind == "request"]
    assert [data["who"] for data in asked] == ["tester", "api"]


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(Auth(token="secret"))


def test_answers_stay_out_of_frames_and_caches(shared: Running) -> None:
    for path in ("/v1/jobs", "/nowhere", "/healthz"):
        headers = shared.http.get(path, headers=BEARER).headers
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
