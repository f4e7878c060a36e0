"""Checkpoints over HTTP and on the command line: real ones, of a job on the in-memory cluster."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from typer.testing import CliRunner, Result

from api import server_file
from api.cli import app
from api.cli_common import FAILED, FOUND, UNREACHABLE, WRONG_USAGE
from api.client import Client, Refused
from api.schemas import CheckpointsOut
from tests.distributed.ranks import run_ranks
from tests.distributed.test_worker_loop import _spec, _train
from tests.unit.api.running import SPEC, TOKEN, Running, running, until
from zero_core.checkpoint import inspection, manifest
from zero_core.checkpoint.container import BLOCK_BYTES

BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4, by two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, _train, folder, _spec(steps=4, checkpoints={"every_steps": 2}))
    return folder


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    return tmp_path


@pytest.fixture
def service(data_dir: Path) -> Iterator[Running]:
    with running(data_dir) as service:
        server_file.write(data_dir, service.url)
        yield service


@pytest.fixture
def job(service: Running, saved: Path) -> str:
    """Id of a running job that has them."""
    job_id = service.submit_running()
    shutil.copytree(saved, service.plane.checkpoints.root(job_id), dirs_exist_ok=True)
    return job_id


def _damage(folder: Path | str, step: int) -> str:
    (info,) = (info for info in manifest.scan(folder) if info.step == step)
    path = info.path / "rank-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[8 + int.from_bytes(raw[:8], "little")] ^= 1  # of a master: every reader needs it
    path.write_bytes(raw)
    return path.name


def _cli(data_dir: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--data-dir", str(data_dir), *arguments])


# Over HTTP


def test_listed_and_verified(service: Running, job: str) -> None:
    listed = service.client.checkpoints(job)
    assert [(one.step, one.world_size, one.stage) for one in listed] == [(2, 2, 2), (4, 2, 2)]
    whole = service.client.verify_checkpoint(job, 4)
    assert (whole.whole, whole.damage, whole.path) == (True, [], listed[1].path)
    name = _damage(service.plane.checkpoints.root(job), 4)
    found = service.client.verify_checkpoint(job, 4)
    assert not found.whole
    (damage,) = found.damage
    assert damage.file == name
    raw = (Path(listed[1].path) / name).read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    assert (damage.start, damage.stop) == (begin, min(begin + BLOCK_BYTES, len(raw)))
    assert service.client.verify_checkpoint(job, 2).whole


@pytest.mark.parametrize("what", ["manifest", "cut"])
def test_one_too_damaged_to_be_listed_is_verified_all_the_same(
    service: Running, data_dir: Path, job: str, what: str
) -> None:
    path = Path(service.client.checkpoints(job)[-1].path)
    file = path / ("manifest.json" if what == "manifest" else "rank-00000.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    assert [one.step for one in service.client.checkpoints(job)] == [2]
    found = service.client.verify_checkpoint(job, 4)
    assert (found.step, found.whole, found.damage[0].file) == (4, False, file.name)
    assert _cli(data_dir, "checkpoint", "verify", f"{job}@4").exit_code == FOUND
    assert _cli(data_dir, "checkpoint", "verify", str(path.parent)).exit_code == FOUND


def test_an_export_lies_in_the_jobs_own_folder_and_can_be_done_again(service: Running, job: str) -> None:
    first = service.client.export_checkpoint(job, 4, dtype="bf16")
    folder = Path(first.folder)
    assert folder.parent == service.plane._folder(job).path / "exports"
    for _ in range(2):
        again = service.client.export_checkpoint(job, 4, dtype="bf16", max_shard_bytes=20_000)
        assert again.folder == first.folder
        assert len(again.files) > len(first.files)
        assert again.files == sorted(path.name for path in folder.iterdir())
        assert again.bytes == sum(path.stat().st_size for path in folder.iterdir())
    with safe_open(next(folder.glob("*.safetensors")), framework="pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.bfloat16"}  # noqa: SIM118
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no drafts are left"


def test_an_export_of_a_damaged_checkpoint_is_refused_and_leaves_nothing(service: Running, job: str) -> None:
    name = _damage(service.plane.checkpoints.root(job), 2)
    with pytest.raises(Refused, match=name) as refused:
        service.client.export_checkpoint(job, 2)
    assert (refused.value.status, refused.value.code) == (409, "damaged_checkpoint")
    assert list((service.plane._folder(job).path / "exports").iterdir()) == []


def test_damage_has_its_exit_code_whatever_finds_it(
    service: Running, job: str, data_dir: Path, saved: Path
) -> None:
    root = Path(service.plane.checkpoints.root(job))
    name = _damage(root, 4)
    (damaged,) = root.glob("step-00000004*")
    (whole,) = saved.glob("step-00000004*")
    for arguments in (("diff", str(damaged), str(whole)), ("export", f"{job}@4")):
        result = _cli(data_dir, "checkpoint", *arguments)
        assert result.exit_code == FOUND, result.output
        assert name in result.stderr
        assert "Traceback" not in result.stderr


def test_a_store_that_does_not_answer_is_one_line(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
        ("AWS_ACCESS_KEY_ID", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_MAX_ATTEMPTS", "1"),
    ):
        monkeypatch.setenv(name, value)
    result = _cli(data_dir, "checkpoint", "ls", "s3://bucket/folder")
    assert (result.exit_code, result.stdout) == (FAILED, "")
    assert "127.0.0.1:9" in result.stderr


def test_an_export_that_cannot_be_written_says_so(service: Running, job: str) -> None:
    (service.plane._folder(job).path / "exports").touch()
    with pytest.raises(Refused, match="cannot be written") as refused:
        service.client.export_checkpoint(job, 2)
    assert (refused.value.status, refused.value.code) == (500, "export_failed")


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("JOB/checkpoints/3/verify", None, 404, "unknown_checkpoint"),
        ("none/checkpoints/2/verify", None, 404, "unknown_job"),
        ("JOB/checkpoints/-1/verify", None, 422, "invalid_request"),
        ("JOB/checkpoints/..%2F..%2Fx/verify", None, 404, "unknown_route"),
        ("JOB/checkpoints/2/export", {"folder": "/etc"}, 422, "invalid_request"),
        ("JOB/checkpoints/2/export", {"dtype": "int8"}, 422, "invalid_request"),
        ("JOB/checkpoints/2/export", {"max_shard_bytes": 0}, 422, "invalid_request"),
    ],
)
def test_what_is_refused(
    service: Running, job: str, path: str, body: dict[str, Any] | None, status: int, code: str
) -> None:
    answer = service.http.post(f"/v1/jobs/{path.replace('JOB', job)}", json=body, headers=BEARER)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_checks_hold_up_nobody_else_and_only_some_run_at_once(
    service: Running, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(folder: str) -> list[Any]:
        begun.release()
        assert go_on.wait(60)
        return []

    monkeypatch.setattr(inspection, "verify", slow)
    path = f"/v1/jobs/{job}/checkpoints/2/verify"
    answers: list[int] = []
    checks = [
        threading.Thread(
            target=lambda: answers.append(service.http.post(path, headers=BEARER, timeout=60).status_code)
        )
        for _ in range(2)
    ]
    for check in checks:
        check.start()
        assert begun.acquire(timeout=60)
    assert service.client.job(job).id == job, "others are answered meanwhile"
    with pytest.raises(Refused, match="ask again") as refused:
        service.client.verify_checkpoint(job, 2)
    assert (refused.value.status, refused.value.code) == (503, "busy")
    go_on.set()
    for check in checks:
        check.join(60)
    assert answers == [200, 200]


def test_a_job_that_starts_from_anothers_checkpoint(service: Running, job: str) -> None:
    given = {"start_from": {"job": job, "step": 2}}
    first = service.client.submit(SPEC | given, idempotency_key="once")
    assert service.client.submit(SPEC | given, idempotency_key="once").id == first.id
    told = service.client.job(first.id).spec.start_from
    assert (told.job, told.step, told.checkpoint, told.cast) == (job, 2, None, False)
    until(lambda: service.client.job(first.id).state == "running")
    received = service.cluster._controllers[first.id].spec.start_from
    assert (received.checkpoint, received.cast) == (service.client.checkpoints(job)[0].path, False)
    service.client.cancel(first.id)
    newest = service.submit_running(start_from={"job": job, "cast": True})
    received = service.cluster._controllers[newest].spec.start_from
    assert (received.checkpoint, received.cast) == (str(service.plane.checkpoints.root(job)), True)


@pytest.mark.parametrize(
    ("given", "status", "code"),
    [
        ({"job": "JOB", "step": 3}, 404, "unknown_checkpoint"),
        ({"job": "nobody"}, 404, "unknown_job"),
        ({"job": "EMPTY"}, 422, "no_checkpoint"),
        ({"job": "JOB", "checkpoint": "/x"}, 422, "invalid_spec"),
    ],
)
def test_beginnings_that_are_not_there_are_refused_on_submission(
    service: Running, job: str, given: dict[str, Any], status: int, code: str
) -> None:
    ids = {"JOB": job, "EMPTY": service.client.submit(SPEC).id}
    given = given | {"job": ids.get(given["job"], given["job"])}
    with pytest.raises(Refused) as refused:
        service.client.submit(SPEC | {"start_from": given})
    assert (refused.value.status, refused.value.code) == (status, code)


def test_a_job_that_keeps_its_checkpoints_elsewhere(service: Running, saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    job_id = service.submit_running(checkpoints={"location": str(place)})
    assert service.client.checkpoints(job_id) == []
    shutil.copytree(saved, place / job_id)
    assert [one.step for one in service.client.checkpoints(job_id)] == [2, 4]
    assert service.client.verify_checkpoint(job_id, 4).whole


def test_a_place_that_no_store_is_known_for_is_refused_on_submission(service: Running) -> None:
    with pytest.raises(Refused, match="Protocol not known: nosuch") as refused:
        service.client.submit(SPEC | {"checkpoints": {"location": "nosuch://bucket/folder"}})
    assert (refused.value.status, refused.value.code) == (422, "checkpoints_unreachable")


# On the command line


def test_listing_showing_and_verifying_a_jobs(service: Running, data_dir: Path, job: str) -> None:
    assert "step" in _cli(data_dir, "checkpoint", "ls", job[:6]).stdout
    listed = json.loads(_cli(data_dir, "checkpoint", "ls", job, "--json").stdout)
    assert [one["step"] for one in listed] == [2, 4]
    shown = json.loads(_cli(data_dir, "checkpoint", "show", f"{job}@2", "--json").stdout)
    assert (shown["step"], shown["world_size"], shown["samples_consumed"]) == (2, 2, 20)
    assert "fp32" in _cli(data_dir, "checkpoint", "show", job).stdout
    verified = _cli(data_dir, "checkpoint", "verify", job)
    assert (verified.exit_code, "whole" in verified.stdout) == (0, True)
    name = _damage(service.plane.checkpoints.root(job), 4)
    verified = _cli(data_dir, "checkpoint", "verify", job)
    assert verified.exit_code == FOUND
    assert name in verified.stdout
    told = _cli(data_dir, "checkpoint", "verify", f"{job}@4", "--json")
    assert told.exit_code == FOUND
    assert json.loads(told.stdout)["damage"][0]["file"] == name
    exported = json.loads(_cli(data_dir, "checkpoint", "export", f"{job}@2", "--json").stdout)
    assert (Path(exported["folder"]) / exported["files"][0]).is_file()
    missing = _cli(data_dir, "checkpoint", "show", f"{job}@9")
    assert (missing.exit_code, "there are: 2, 4" in missing.stderr) == (FAILED, True)


def test_folders_need_no_service(tmp_path: Path, saved: Path) -> None:
    shutil.copytree(saved, tmp_path / "root")
    root = str(tmp_path / "root")
    listed = json.loads(_cli(tmp_path, "checkpoint", "ls", root, "--json").stdout)
    one, two = (one["path"] for one in listed)
    assert json.loads(_cli(tmp_path, "checkpoint", "show", root, "--json").stdout)["step"] == 4
    assert json.loads(_cli(tmp_path, "checkpoint", "ls", one, "--json").stdout)[0]["step"] == 2
    assert _cli(tmp_path, "checkpoint", "verify", root).exit_code == 0
    same = _cli(tmp_path, "checkpoint", "diff", two, root)
    assert (same.exit_code, same.stdout.strip()) == (0, "the same state")
    other = _cli(tmp_path, "checkpoint", "diff", one, two, "--json")
    assert other.exit_code == FOUND
    assert json.loads(other.stdout)["differences"]
    assert _cli(tmp_path, "checkpoint", "diff", one, two).stdout.splitlines()[-1] == "they differ"
    target = tmp_path / "export"
    exported = _cli(tmp_path, "checkpoint", "export", root, "--to", str(target), "--dtype", "fp16")
    assert (exported.exit_code, exported.stdout.strip()) == (0, str(target))
    assert list(target.glob("*.safetensors"))
    again = _cli(tmp_path, "checkpoint", "export", root, "--to", str(target))
    assert (again.exit_code, "exists" in again.stderr) == (FAILED, True)
    name = _damage(root, 4)
    damaged = _cli(tmp_path, "checkpoint", "verify", root)
    assert (damaged.exit_code, name in damaged.stdout) == (FOUND, True)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_an_export_to_a_place_that_failed_can_be_done_again(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, tmp_path / "root")
    _damage(tmp_path / "root", 4)
    to = f"{scheme}{tmp_path / 'deep' / 'out'}"
    options = ("--to", to, "--max-shard", "20000")
    assert _cli(tmp_path, "checkpoint", "export", f"{tmp_path}/root", *options).exit_code == FOUND
    assert [path for path in (tmp_path / "deep").rglob("*") if path.is_file()] == []
    assert not list(tmp_path.rglob(".exporting-*"))
    exported = json.loads(_cli(tmp_path, "checkpoint", "export", str(saved), *options, "--json").stdout)
    assert exported["folder"] == to
    assert exported["files"] == sorted(path.name for path in (tmp_path / "deep" / "out").iterdir())
    assert len(exported["files"]) > 2
    again = _cli(tmp_path, "checkpoint", "export", str(saved), *options)
    assert (again.exit_code, f"{to} exists" in again.stderr) == (FAILED, True)
    assert not (tmp_path / "file:").exists()


def test_what_each_rank_of_another_group_would_read(tmp_path: Path, saved: Path) -> None:
    told = _cli(tmp_path, "reshard", "--dry-run", "--to", "3", str(saved), "--json")
    assert told.exit_code == 0, told.output
    reads = json.loads(told.stdout)
    assert (reads["from"], reads["to"], len(reads["bytes"])) == (2, 3, 3)
    assert all(amount > 0 for amount in reads["bytes"])
    plain = _cli(tmp_path, "reshard", "--dry-run", "--to", "30", str(saved))
    assert "2 -> 30 ranks" in plain.stdout
    assert "and 10 more" in plain.stdout


READING = (
    ("checkpoint", "ls"),
    ("checkpoint", "show"),
    ("checkpoint", "verify"),
    ("checkpoint", "diff", "SAVED"),
    ("checkpoint", "export", "--to", "x"),
    ("reshard", "--dry-run", "--to", "3"),
)


@pytest.mark.parametrize("command", READING, ids=lambda command: "-".join(command[:2]))
def test_a_wrong_place_is_told_with_what_is_there_and_whose_folder_is_meant(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for place, told in (
        (
            "./none",
            f"there is no {tmp_path / 'none'} on this machine: folders are read where the command runs",
        ),
        ("./empty/", f"{tmp_path / 'empty'} is no committed checkpoint and has none in it: folders are read"),
        ("./file", f"{tmp_path / 'file'} is a file: folders are read where the command runs"),
        ("memory://nothing", "there is no committed checkpoint at memory://nothing: give the address of one"),
        (f"/{'x' * 300}", "File name too long"),
    ):
        words = [str(saved) if word == "SAVED" else word for word in command]
        result = _cli(tmp_path, *words, place)
        assert (result.exit_code, result.stdout) == (FAILED, ""), result.output
        assert told in result.stderr
        assert not (tmp_path / "x").exists()


def test_paths_stay_whole_however_narrow_the_place_where_they_are_shown(tmp_path: Path, saved: Path) -> None:
    root = tmp_path / ("x" * 90)
    shutil.copytree(saved, root)
    lines = _cli(tmp_path, "checkpoint", "ls", str(root)).stdout.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == [info.location for info in manifest.scan(root)]
    shown = _cli(tmp_path, "checkpoint", "show", str(root)).stdout
    assert manifest.scan(root)[-1].location in shown


def test_a_damaged_one_is_listed_as_such(service: Running, data_dir: Path, job: str) -> None:
    root = Path(service.plane.checkpoints.root(job))
    newest = manifest.scan(root)[-1]
    file = newest.path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    found = service.client.surveyed_checkpoints(job)
    assert [one.step for one in found.checkpoints] == [2]
    assert [(one.step, one.path) for one in found.unusable] == [(newest.step, newest.location)]
    for target in (job, f"{root}/"):
        result = _cli(data_dir, "checkpoint", "ls", "--json", target)
        assert [one["step"] for one in json.loads(result.stdout)] == [2]
        assert f"step {newest.step} of generation {newest.generation} cannot be loaded: " in result.stderr
        assert "where the manifest says" in result.stderr


def test_a_folder_of_nothing_but_damaged_ones_names_the_newest(tmp_path: Path, saved: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(saved, root)
    for info in manifest.scan(root):
        file = info.path / "rank-00000.safetensors"
        file.write_bytes(file.read_bytes()[:-5])
        newest = info.path
    for command in (("checkpoint", "show"), ("reshard", "--dry-run", "--to", "3"), ("checkpoint", "ls")):
        result = _cli(tmp_path, *command, str(root))
        assert result.exit_code == FOUND
        assert f"no checkpoint in {root} can be loaded; the newest is {newest}: " in result.stderr
    assert _cli(tmp_path, "checkpoint", "verify", str(newest)).exit_code == FOUND, "as the message says"


@pytest.mark.parametrize("command", READING, ids=lambda command: "-".join(command[:2]))
@pytest.mark.parametrize("what", ["manifest.json", "rank-00000.safetensors"])
def test_damage_that_a_first_look_shows_has_its_exit_code(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (whole,) = saved.glob("step-00000004*")
    damaged = shutil.copytree(whole, tmp_path / whole.name)
    (damaged / what).write_bytes((whole / what).read_bytes()[:-5])
    result = _cli(tmp_path, *(str(saved) if word == "SAVED" else word for word in command), str(damaged))
    assert result.exit_code == FOUND, result.output
    assert what in result.output


def test_a_jobs_newest_is_verified_be_it_damaged_and_others_are_told_what_is_wrong(
    service: Running, data_dir: Path, job: str, saved: Path
) -> None:
    for step in (4, 2):
        path = service.client.checkpoints(job)[-1].path
        file = Path(path) / "rank-00000.safetensors"
        file.write_bytes(file.read_bytes()[:-5])
        result = _cli(data_dir, "checkpoint", "verify", job, "--json")
        assert result.exit_code == FOUND
        assert json.loads(result.stdout)["path"].endswith("step-00000004.g0001"), "the newest"
        result = _cli(data_dir, "checkpoint", "show", f"{job}@{step}")
        assert result.exit_code == FOUND
        assert f"no checkpoint of step {step} that can be loaded" in result.stderr
    for arguments in (("show",), ("export",), ("diff", str(saved))):
        result = _cli(data_dir, "checkpoint", *arguments, job)
        assert result.exit_code == FOUND
        assert f"job {job} has no checkpoint that can be loaded: step 2 of generation 1: " in result.stderr
        assert "; step 4 of generation 1: " in result.stderr
        assert "where the manifest says" in result.stderr
    assert "there are: 2, 4" in _cli(data_dir, "checkpoint", "show", f"{job}@9").stderr
    empty = service.client.submit(SPEC).id
    for command in ("verify", "show"):
        result = _cli(data_dir, "checkpoint", command, empty)
        assert (result.exit_code, "has no checkpoint yet" in result.stderr) == (FAILED, True)


def test_a_jobs_checkpoint_that_only_the_service_has(
    service: Running, data_dir: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = service.client.checkpoints(job)
    elsewhere = [one.model_copy(update={"path": "/on/another/machine"}) for one in listed]
    monkeypatch.setattr(
        Client, "surveyed_checkpoints", lambda client, job_id: CheckpointsOut(checkpoints=elsewhere)
    )
    for command in (
        ("checkpoint", "show"),
        ("checkpoint", "diff", job),
        ("reshard", "--dry-run", "--to", "3"),
    ):
        result = _cli(data_dir, *command, job)
        assert result.exit_code == FAILED
        assert "the checkpoint at /on/another/machine cannot be read from here: " in result.stderr
        assert "run the command there" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("reshard", "--to", "3", "FOLDER"), WRONG_USAGE),
        (("reshard", "--dry-run", "--to", "0", "FOLDER"), WRONG_USAGE),
        (("reshard", "--dry-run", "FOLDER"), WRONG_USAGE),
        (("checkpoint", "export", "FOLDER"), WRONG_USAGE),
        (("checkpoint", "export", "FOLDER", "--to", "x", "--dtype", "int8"), WRONG_USAGE),
        (("checkpoint", "export", "FOLDER", "--to", "x", "--max-shard", "much"), WRONG_USAGE),
        (("checkpoint", "show", "job@x"), WRONG_USAGE),
        (("checkpoint", "verify", "/no/such/folder"), FAILED),
        (("checkpoint", "show", "/no/such/folder"), FAILED),
        (("checkpoint", "verify", "job"), UNREACHABLE),
    ],
)
def test_exit_codes_of_what_cannot_be(
    tmp_path: Path, saved: Path, arguments: tuple[str, ...], code: int
) -> None:
    result = _cli(tmp_path, *(str(saved) if word == "FOLDER" else word for word in arguments))
    assert result.exit_code == code, result.output
