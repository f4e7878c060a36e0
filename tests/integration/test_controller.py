"""Controller and workers on a real local Ray: resized, killed, gone on, whatever the history."""

import os
import signal
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from tests.distributed.ranks import run_ranks
from tests.integration.jobs import (
    Job,
    assert_ledger,
    reference_losses,
    runs,
    spec_of,
    wait_for_cpus,
    wait_for_status,
)
from zero_core.checkpoint import manifest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def _kill(job: Job, *workers: str) -> None:
    for victim in [job.pids()[worker] for worker in workers]:
        os.kill(victim, signal.SIGKILL)


def _assert_from_the_checkpoint(job: Job, survivors: dict[str, int]) -> None:
    recovery = job.wait_event("recovery")["data"]
    assert recovery["source"] == "checkpoint"
    assert recovery["at_step"] % 5 == 0
    # One may be being written while the next five steps are done, and only the one after that waits for it.
    assert 0 <= recovery["steps_repeated"] <= 2 * 5
    assert recovery["new_workers"] == len(survivors)
    job.wait_step(recovery["at_step"] + 6, generation=recovery["generation"])
    assert survivors.items() <= job.pids().items()
    workers = {r["worker"] for r in job.reports() if r["generation"] == recovery["generation"]}
    assert workers == set(survivors)
    assert_ledger(job, range(1, recovery["at_step"] + 5))


class Blocker:
    """Takes a place on the cluster."""

    def hold(self) -> None:
        time.sleep(1000)


def _parameters(rank: int, world_size: int, folder: Path) -> str:
    """The digest of all parameters and moments in the newest checkpoint."""
    from safetensors import safe_open

    latest = manifest.latest(folder)
    assert latest is not None
    assert latest.step == 400
    layout = manifest.read(latest.path).layout
    digest = sha256()
    for unit in range(len(layout.units)):
        for kind in ("master", "momentum", "variance"):
            for owner in range(layout.world_size):
                with safe_open(latest.path / manifest.shard_name(owner), framework="np") as file:
                    if f"{kind}/{unit}" in file.keys():  # noqa: SIM118 - it is no mapping
                        digest.update(file.get_tensor(f"{kind}/{unit}").tobytes())
    return digest.hexdigest()


def test_two_four_three_workers_lose_no_step_and_change_no_number(job: Job, tmp_path: Path) -> None:
    """Also L7 (torchrun): no resize counts as a failure, as this job may not have a single one."""
    spec = spec_of(steps=90, recovery={"max_worker_losses": 0, "max_node_losses": 0})
    job.start(spec)
    job.wait_step(5, world_size=2)
    before = job.pids()
    job.command("resize", workers=4)
    job.wait_step(1, world_size=4)
    job.command("resize", workers=3)
    job.wait_phase("succeeded")

    first, second = (event["data"] for event in job.events("resize"))
    assert (first["old_workers"], first["new_workers"], first["who"]) == (2, 4, "tester")
    assert (second["old_workers"], second["new_workers"]) == (4, 3)
    assert first["steps_lost"] == second["steps_lost"] == 0
    assert 0 < first["pause_s"] < 60
    assert set(first["seconds"]) == {"wait", "stop", "form", "start", "move", "load"}
    assert first["source"] == second["source"] == "live"
    assert (first["cause"], first["steps_repeated"]) == ("asked for", 0)
    assert 0 < first["bytes_needed"] <= first["bytes_moved"] <= 1.05 * first["bytes_needed"]
    # Survivors kept their processes.
    after = job.pids()
    assert {name: after[name] for name in before} == before
    assert len(after) == 4
    assert {r["worker"] for r in job.reports() if r["world_size"] == 3} == {"w0", "w1", "w2"}
    # No step was done twice, and each by all ranks of its generation.
    done = [(r["step"], r["rank"]) for r in job.reports()]
    assert len(done) == len(set(done))
    assert_ledger(job, range(1, 91))
    losses = {r["step"]: r["loss"] for r in job.reports()}
    paceless = {**spec, "model": {**spec["model"], "arguments": {"pause_s": 0.0}}}
    (reference,) = run_ranks(1, reference_losses, paceless, tmp_path / "reference")
    assert losses == pytest.approx(reference, rel=1e-5)
    saved = [(e["data"]["step"], e["data"]["reason"]) for e in job.events("checkpoint")]
    assert [reason for _, reason in saved if reason not in ("interval", "owed")] == ["final"]
    assert saved[-1] == (90, "final")
    assert not any(runs(pid) for pid in after.values())
    assert job.phases() == ["starting", "running", "resizing", "running", "resizing", "running", "succeeded"]


@pytest.mark.parametrize("victim", ["w0", "w2"])
def test_a_killed_worker_costs_one_step_at_most_and_its_place_is_taken_again(job: Job, victim: str) -> None:
    job.start(spec_of(workers={"wanted": 3}, checkpoints={"every_steps": None}), wanted=3)
    job.wait_step(7)
    before = job.pids()
    _kill(job, victim)
    recovery = job.wait_event("recovery")["data"]
    lost = job.wait_event("worker_lost")["data"]
    assert (lost["rank"], lost["worker"], lost["budget"]) == (int(victim[1]), victim, "worker")
    assert victim in recovery["cause"]
    # Those that are left are enough, and wait for nobody.
    assert (recovery["old_workers"], recovery["new_workers"]) == (3, 2)
    assert (recovery["source"], recovery["replica_ranks"]) == ("replica", [lost["rank"]])
    assert recovery["steps_repeated"] <= 1
    back = job.wait_event("resize")["data"]
    assert (back["who"], back["cause"], back["source"]) == ("controller", "grown back", "live")
    assert (back["old_workers"], back["new_workers"], back["steps_repeated"]) == (2, 3, 0)
    job.wait_step(back["at_step"] + 3, generation=back["generation"])
    after = job.pids()
    survivors = {name: pid for name, pid in before.items() if name != victim}
    assert survivors.items() <= after.items()
    workers = {r["worker"] for r in job.reports() if r["generation"] == back["generation"]}
    assert workers == {*survivors, "w3"}
    assert_ledger(job, range(1, back["at_step"] + 1))
    assert job.status()["wanted"] == 3


def test_two_neighbours_lost_at_once_cost_the_steps_since_the_checkpoint_and_no_process(job: Job) -> None:
    job.start(
        spec_of(workers={"wanted": 4}, elastic={"grow_back": False}),
        wanted=4,
    )
    job.wait_event("checkpoint")
    survivors = {name: pid for name, pid in job.pids().items() if name in ("w0", "w3")}
    _kill(job, "w1", "w2")
    _assert_from_the_checkpoint(job, survivors)
    assert sorted(e["data"]["worker"] for e in job.events("worker_lost")) == ["w1", "w2"]
    assert all(name in job.events("recovery")[-1]["data"]["cause"] for name in ("w1", "w2"))
    # Nobody grows back where that is not wanted.
    assert job.events("resize") == []
    assert job.status()["world_size"] == 2


def test_without_replicas_a_loss_costs_the_steps_since_the_checkpoint(job: Job) -> None:
    job.start(spec_of(elastic={"replicas": 0, "grow_back": False}, workers={"wanted": 3}), wanted=3)
    job.wait_event("checkpoint")
    survivors = {name: pid for name, pid in job.pids().items() if name != "w1"}
    _kill(job, "w1")
    _assert_from_the_checkpoint(job, survivors)


def test_a_worker_that_hangs_is_replaced(job: Job) -> None:
    """Nothing has died: the others run into the collective's timeout, and the hanging one stays inside."""
    job.start(spec_of(recovery={"collective_timeout_s": 4}))
    job.wait_step(6)
    victim = job.pids()["w1"]
    os.kill(victim, signal.SIGSTOP)
    recovery = job.wait_event("recovery", timeout_s=240)["data"]
    lost = [e["data"] for e in job.events("worker_lost")]
    assert [e["worker"] for e in lost] == [None, "w1"]
    assert "did not come out of its broken group" in lost[1]["cause"]
    assert recovery["new_workers"] == 1
    back = job.wait_event("resize")["data"]
    assert (back["cause"], back["new_workers"]) == ("grown back", 2)
    job.wait_step(back["at_step"] + 2, generation=back["generation"])
    names = {r["worker"] for r in job.reports() if r["generation"] == back["generation"]}
    assert names == {"w0", "w2"}
    assert not runs(victim)


def test_a_lost_place_shrinks_the_group_and_too_many_losses_end_the_job(job: Job) -> None:
    job.start(spec_of(workers={"wanted": 2}, resources={"cpus": 4}, recovery={"max_worker_losses": 1}))
    job.wait_step(6)
    # Somebody else takes the dead worker's place at once: there is no room for a replacement.
    blocker: Any = ray.remote(Blocker).options(num_cpus=4).remote()
    held = blocker.hold.remote()
    os.kill(job.pids()["w0"], signal.SIGKILL)
    recovery = job.wait_event("recovery")["data"]
    assert (recovery["old_workers"], recovery["new_workers"]) == (2, 1)
    job.wait_step(recovery["at_step"] + 1, generation=recovery["generation"])
    survivor = next(r["worker"] for r in reversed(job.reports()))
    os.kill(job.pids()[survivor], signal.SIGKILL)
    failed = job.wait_phase("failed")
    assert "2 workers were lost, more than recovery.max_worker_losses 1" in failed["data"]["reason"]
    ray.kill(blocker)
    with pytest.raises(RayActorError):
        ray.get(held, timeout=60)


def test_a_killed_controller_goes_on_by_itself_and_its_workers_die_with_it(job: Job) -> None:
    job.start(spec_of())
    job.wait_step(7)
    job.command("resize", workers=3)
    job.wait_step(1, world_size=3)
    old, last = job.pids(), len(job.read())
    job.crash_controller()
    wait_for_status(job, "running")
    assert not any(runs(pid) for pid in old.values())
    recovery = job.wait_event("recovery")["data"]
    assert recovery["cause"] == "the controller was restarted"
    assert recovery["new_workers"] == 3, "the resize before the restart is remembered"
    assert len(job.entries) > last, "the numbers go on"
    at = recovery["at_step"]
    job.wait_step(at + 2, generation=recovery["generation"])
    names = {r["worker"] for r in job.reports() if r["generation"] == recovery["generation"]}
    assert not names & set(old), "no name is used twice"


def test_orders_that_change_no_number_leave_the_group_alone(job: Job) -> None:
    """L8 (Ray Train 2.60): a resize above capacity does not end the healthy group first."""
    job.start(spec_of(checkpoints={"every_steps": None}))
    job.wait_step(2)
    job.command("resize", workers=5)
    at = job.status()["step"]
    refused = job.wait_event("resize_refused")["data"]
    assert (refused["who"], refused["wanted"], refused["workers"]) == ("tester", 5, 2)
    assert "places for 2 of 3 more workers" in refused["reason"]
    assert refused["missing"] == {"CPU": 2.0}
    assert "missing: 2 CPU" in refused["reason"]
    job.wait_step(at + 10, world_size=2)
    assert {r["generation"] for r in job.reports()} == {1}
    assert job.phases() == ["starting", "running"]
    wait_for_cpus(4)  # the joiners that were placed are gone again
    # More than the job may ever have is refused at once; the same number changes nothing.
    job.command("resize", workers=7)
    assert "1 to 6" in job.wait(lambda job: job.events("resize_refused")[1:], "refusal")[0]["data"]["reason"]
    job.command("resize", workers=2)
    job.wait_step(job.status()["step"] + 5)
    assert job.phases() == ["starting", "running"]
    assert job.status()["wanted"] == 2
    # A checkpoint on demand does not disturb the group either.
    job.command("checkpoint")
    saved = job.wait_event("checkpoint")["data"]
    assert saved["reason"] == "demand"
    job.wait_step(saved["step"] + 2)
    assert job.phases() == ["starting", "running"]


def test_the_newest_wanted_number_counts(job: Job) -> None:
    job.start(spec_of(recovery={"max_worker_losses": 0}))  # resizes use none of it
    job.wait_step(2)
    job.command("resize", workers=4)
    job.command("resize", workers=3)
    job.wait_step(1, world_size=3)
    assert [e["data"]["new_workers"] for e in job.events("resize")] == [3]
    wait_for_cpus(2)
    # Back to the number that is there already: nothing happens but that the joiners go again.
    job.command("resize", workers=4)
    job.command("resize", workers=3)
    job.wait_step(job.status()["step"] + 5)
    wait_for_cpus(2)
    assert len(job.events("resize")) == 1
    # One that comes while another is under way follows at once.
    job.command("resize", workers=1)
    job.wait(lambda job: job.phases()[-1] == "resizing" or len(job.events("resize")) > 1, "a resize")
    job.command("resize", workers=2)
    job.wait(lambda job: job.events("resize")[-1]["data"]["new_workers"] == 2, "the newest number")
    last = job.status()
    assert (last["wanted"], last["world_size"]) == (2, 2)
    done = [(r["step"], r["rank"]) for r in job.reports()]
    assert len(done) == len(set(done)), "no step was done twice"
    assert_ledger(job, range(1, last["step"] - 1))


def test_the_same_numbers_come_out_of_any_history(job: Job, tmp_path: Path) -> None:
    """2 -> 4 -> 3 -> 1 -> 5 workers with a kill in between: the bits of one worker that nobody disturbed."""
    spec = spec_of(
        steps=400,
        zero={"reproducible": True, "stage": 2},
        optimizer={"lr": 0.05},
        resources={"cpus": 1},
        checkpoints={"every_steps": None},
    )
    job.start(spec)
    job.wait_step(5, world_size=2)
    for workers in (4, 3):
        job.command("resize", workers=workers)
        job.wait_step(1, world_size=workers)
    _kill(job, job.reports()[-1]["worker"])
    recovery = job.wait_event("recovery")["data"]
    assert recovery["source"] == "replica"
    job.wait_step(recovery["at_step"] + 2, generation=recovery["generation"])
    for workers in (1, 5):
        job.command("resize", workers=workers)
        job.wait_step(1, world_size=workers)
    job.wait_phase("succeeded")
    losses = {r["step"]: r["loss"] for r in job.reports()}
    assert sorted(losses) == list(range(1, 401))
    paceless = {**spec, "model": {**spec["model"], "arguments": {"pause_s": 0.0}}}
    (reference,) = run_ranks(1, reference_losses, paceless, tmp_path / "reference")
    assert losses == reference
    mine, theirs = (
        run_ranks(1, _parameters, folder)[0]
        for folder in (job.storage / "jobs" / job.job_id / "checkpoints", tmp_path / "reference")
    )
    assert mine == theirs
    assert_ledger(job, range(1, 401))
