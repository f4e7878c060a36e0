"""The command line against a service: what is printed, and the exit codes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from api import server_file
from api.cli import FAILED, UNREACHABLE, app
from tests.unit.api.running import SPEC, TOKEN, Running, running, until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with the token and a job specification in it."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(SPEC))
    return tmp_path


@pytest.fixture
def service(folder: Path) -> Iterator[Running]:
    """A service that the command line finds in `folder`."""
    with running(folder) as service:
        server_file.write(folder, service.url)
        yield service


def _run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--data-dir", str(folder), *arguments])


def test_a_job_by_hand(service: Running, folder: Path) -> None:
    submitted = _run(folder, "submit", str(folder / "job.yaml"))
    assert submitted.exit_code == 0, submitted.output
    job_id = submitted.stdout.strip()
    until(lambda: service.client.job(job_id).state == "running")
    assert job_id in _run(folder, "jobs").stdout
    service.cluster.train(job_id, 5)
    until(lambda: service.client.job(job_id).step == 5)

    assert "3 workers wanted" in _run(folder, "resize", job_id[:8], "3").stdout
    until(lambda: service.client.job(job_id).workers.current == 3)
    assert "next step boundary" in _run(folder, "checkpoint", "save", job_id).stdout
    service.cluster.train(job_id, 1)
    until(lambda: len(service.client.ranks(job_id)) == 3)
    shown = _run(folder, "show", job_id).stdout
    for expected in (job_id, "running", "2 -> 3 workers", "tokens/s", "predicted"):
        assert expected in shown
    assert json.loads(_run(folder, "show", job_id, "--json").stdout)["id"] == job_id

    assert "pausing" in _run(folder, "pause", job_id).stdout
    until(lambda: service.client.job(job_id).state == "paused")
    assert "queued" in _run(folder, "resume", job_id).stdout
    until(lambda: service.client.job(job_id).state == "running")
    service.cluster.train(job_id, 20)
    watched = _run(folder, "watch", job_id)
    assert watched.exit_code == 0, watched.output
    assert "succeeded, step 20 of 20" in watched.stdout
    assert [job["state"] for job in json.loads(_run(folder, "jobs", "--json").stdout)] == ["succeeded"]


def test_watching_a_job_that_fails(service: Running, folder: Path) -> None:
    job_id = service.submit_running()
    service.cluster.fail(job_id, "the loss is not a number")
    watched = _run(folder, "watch", job_id)
    assert watched.exit_code == FAILED
    assert "the loss is not a number" in watched.stdout


def test_submitting_again_with_the_same_key_and_watching(service: Running, folder: Path) -> None:
    arguments = ("submit", str(folder / "job.yaml"), "--idempotency-key", "once")
    job_id = _run(folder, *arguments).stdout.strip()
    until(lambda: service.client.job(job_id).state == "running")
    service.client.cancel(job_id)
    watched = _run(folder, *arguments, "--watch")
    assert watched.stdout.splitlines()[0] == job_id
    assert watched.exit_code == FAILED


def test_cancel_and_the_dashboard(service: Running, folder: Path) -> None:
    job_id = service.submit_running()
    assert job_id in _run(folder, "cancel", job_id).stdout
    shown = _run(folder, "dashboard")
    assert shown.stdout.strip() == f"{service.url}/dashboard"
    assert str(folder / "token") in shown.stderr.replace("\n", "")


def test_logs(service: Running, folder: Path) -> None:
    job_id = service.submit_running()
    logs = folder / "jobs" / job_id / "logs"
    logs.mkdir(parents=True)
    (logs / "w0.log").write_text("a [b]bracket[/b]\nlast\n")
    assert _run(folder, "logs", job_id).stdout == "== w0\na [b]bracket[/b]\nlast\n"
    assert _run(folder, "logs", job_id, "--worker", "w0", "--tail", "1").stdout == "== w0\nlast\n"
    refused = _run(folder, "logs", job_id, "--worker", "../../token")
    assert refused.exit_code == FAILED
    assert "worker" in refused.stderr


def test_a_job_that_fits_and_one_that_does_not(service: Running, folder: Path) -> None:
    planned = _run(folder, "plan", str(folder / "job.yaml"), "--fits")
    assert planned.exit_code == 0
    assert "2 workers: fits" in planned.stdout
    told = json.loads(_run(folder, "plan", str(folder / "job.yaml"), "--fits", "--json").stdout)
    assert told["fits"]
    (folder / "big.yaml").write_text(yaml.safe_dump(SPEC | {"resources": {"cpus": 3}}))
    planned = _run(folder, "plan", str(folder / "big.yaml"), "--fits")
    assert planned.exit_code == FAILED
    assert "does not fit" in planned.stdout
    refused = _run(folder, "submit", str(folder / "big.yaml"))
    assert refused.exit_code == FAILED
    assert "job_does_not_fit" in refused.stderr


def test_refusals_say_what_and_end_with_1(service: Running, folder: Path) -> None:
    job_id = service.submit_running()
    (folder / "wrong.yaml").write_text(yaml.safe_dump(SPEC | {"steps": 0, "sed": 1}))
    for arguments, expected in (
        (("show", "zz"), "unknown_job"),
        (("resize", job_id, "9"), "impossible_resize"),
        (("resume", job_id), "wrong_state"),
        (("submit", str(folder / "wrong.yaml")), "sed: Extra inputs"),
        (("submit", str(folder / "absent.yaml")), "cannot read"),
        (("jobs", "--state", "asleep"), "invalid_request"),
    ):
        result = _run(folder, *arguments)
        assert result.exit_code == FAILED, arguments
        assert expected in result.stderr, (arguments, result.stderr)


@pytest.mark.parametrize("content", ["[1]", "5", "", "a: [", "a: !!python/object/apply:os.getcwd []"])
def test_a_file_that_is_no_specification(service: Running, folder: Path, content: str) -> None:
    (folder / "job.yaml").write_text(content)
    result = _run(folder, "submit", str(folder / "job.yaml"))
    assert result.exit_code == FAILED
    assert "job.yaml" in result.stderr


def test_no_service_and_wrong_usage(tmp_path: Path) -> None:
    result = _run(tmp_path, "jobs")
    assert result.exit_code == UNREACHABLE
    assert "elastic-zero serve" in result.stderr
    assert _run(tmp_path, "resize", "x", "none").exit_code == 2
    assert _run(tmp_path, "resize", "x", "0").exit_code == 2
    assert _run(tmp_path, "nonsense").exit_code == 2
    (tmp_path / "token").write_text("x")
    (tmp_path / "token").chmod(0o600)
    away = CliRunner().invoke(app, ["--data-dir", str(tmp_path), "--url", "http://127.0.0.1:1", "jobs"])
    assert away.exit_code == UNREACHABLE


def test_down_where_nothing_runs(tmp_path: Path) -> None:
    result = _run(tmp_path, "down")
    assert result.exit_code == 0
    assert "no service runs" in result.stdout


def test_a_wrong_setting_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_ZERO_PORT", "many")
    result = _run(tmp_path, "jobs")
    assert result.exit_code == FAILED
    assert "setting port" in result.stderr
