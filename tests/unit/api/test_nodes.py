"""Nodes: who is on them, and taking one out of service, over HTTP, from Python and from the command line."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli import app
from api.client import Ambiguous, NoSuchNode, Refused
from service.fake_cluster import FakeCluster
from tests.unit.api.running import TOKEN, Running, running, until

BEARER = {"Authorization": f"Bearer {TOKEN}", "X-Requested-By": "ann"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    """Three nodes of one CPU; the first is the head."""
    with running(tmp_path, cluster=FakeCluster(cpus=1, nodes=3)) as service:
        yield service


def test_the_nodes_and_who_is_on_them(service: Running) -> None:
    job_id = service.submit_running()
    until(lambda: any(node.jobs for node in service.client.nodes()))
    answer = service.http.get("/v1/nodes", headers=BEARER)
    assert answer.status_code == 200
    first, second, third = answer.json()["nodes"]
    assert first == {
        **{"id": "node-0", "address": "127.0.0.1", "alive": True, "head": True},
        **{"cpus": 1.0, "cpus_free": 0.0, "gpus": 0.0, "gpus_free": 0.0},
        **{"memory_bytes": 8 << 30, "memory_free_bytes": 8 << 30, "draining": False, "deadline": None},
        "jobs": [{"job": job_id, "workers": ["w0"], "controller": True}],
    }
    assert second["jobs"] == [{"job": job_id, "workers": ["w1"], "controller": False}]
    assert (third["jobs"], third["cpus_free"]) == ([], 1.0)
    assert service.http.get("/v1/cluster", headers=BEARER).json() == answer.json()
    service.client.cancel(job_id)
    until(lambda: not any(node.jobs for node in service.client.nodes()))


def test_a_drained_node_takes_no_work_and_its_jobs_move(service: Running) -> None:
    job_id = service.submit_running()
    answer = service.http.post(
        "/v1/nodes/node-1/drain", json={"reason": "kernel update", "deadline_s": 60}, headers=BEARER
    )
    assert answer.status_code == 202
    node = answer.json()
    assert (node["id"], node["draining"]) == ("node-1", True)
    assert 0 < node["deadline"] - time.time() <= 60
    assert service.cluster.drains == [("node-1", "kernel update (ann)")]
    until(lambda: [event.kind for event in service.client.events(job_id)].count("drain") == 1)
    until(lambda: [node.jobs for node in service.client.nodes()][1] == [])
    assert [place.node for place in service.cluster.status(job_id).workers] == ["node-0", "node-2"]
    # A job that needs the drained node's place waits for it in vain, and does not fit if it needs all three.
    with pytest.raises(Refused) as caught:
        service.client.submit(
            {**service.client.job(job_id).spec.model_dump(mode="json"), "workers": {"wanted": 3}}
        )
    assert caught.value.code == "job_does_not_fit"


def test_asking_again_changes_nothing_but_for_an_earlier_deadline(service: Running) -> None:
    first = service.client.drain("node-1", deadline_s=100)
    assert first.deadline is not None
    assert service.client.drain("node-1", deadline_s=1000).deadline == first.deadline
    assert service.client.drain("node-1").deadline == first.deadline
    assert len(service.cluster.drains) == 1
    sooner = service.client.drain("node-1", deadline_s=50).deadline
    assert sooner is not None
    assert sooner < first.deadline


def test_what_cannot_be_drained_is_refused(service: Running) -> None:
    def refused(node_id: str, body: object) -> tuple[int, str]:
        answer = service.http.post(f"/v1/nodes/{node_id}/drain", json=body, headers=BEARER)
        assert answer.headers["content-type"] == "application/problem+json"
        return answer.status_code, answer.json()["code"]

    assert refused("nothing", {}) == (404, "unknown_node")
    assert refused("node-0", {}) == (409, "head_node")
    assert refused("node-1", {"deadline_s": 0}) == (422, "invalid_request")
    assert refused("node-1", {"deadline": 5}) == (422, "invalid_request")
    assert refused("node-1", {"reason": "a\nb"}) == (422, "invalid_request")
    assert service.http.post("/v1/nodes/node-1/drain", json={}).status_code == 401
    service.cluster.available = False
    assert refused("node-1", {}) == (503, "cluster_unavailable")
    assert service.cluster.drains == []


def test_a_node_is_found_by_the_beginning_of_its_id_or_its_address(service: Running) -> None:
    assert service.client.find_node("node-2").id == "node-2"
    with pytest.raises(Ambiguous, match="3 nodes are meant by 'node'"):
        service.client.find_node("node")
    with pytest.raises(Ambiguous):
        service.client.find_node("127.0.0.1")
    with pytest.raises(NoSuchNode, match="no node begins with 'x'; there are: node-0"):
        service.client.find_node("x")


def test_the_commands(service: Running, tmp_path: Path) -> None:
    token = tmp_path / "client-token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    job_id = service.submit_running()
    until(lambda: any(node.jobs for node in service.client.nodes()))

    def run(*words: str) -> tuple[int, str]:
        given = ["--data-dir", str(tmp_path), "--url", service.url, "--token-file", str(token)]
        done = CliRunner().invoke(app, [*given, *words], env={"COLUMNS": "200"})
        return done.exit_code, done.output

    code, said = run("drain", "node-1", "--deadline", "60", "--reason", "why")
    assert (code, said) == (0, "node node-1 (127.0.0.1) is drained; on it: no job\n") or job_id in said
    assert service.cluster.drains[0][0] == "node-1"
    code, said = run("nodes")
    assert code == 0
    assert "draining" in said
    assert "(head)" in said
    code, said = run("nodes", "--json")
    assert [node["draining"] for node in json.loads(said)] == [False, True, False]
    assert run("drain", "nothing")[0] == 1
