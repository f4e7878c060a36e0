"""What befalls hosts, and what becomes of a job on them: real Ray nodes that reach each other by their links.

Collectives have their usual timeout of ten minutes, far beyond the patience of these tests: nothing here is
found out by it.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.multihost.cluster import HEAD_MEMORY_BYTES, Cluster, Node, until
from tests.multihost.conftest import CPUS, STEPS, spec_of
from tests.multihost.served import Job, Service, assert_nothing_left
from zero_core.checkpoint import manifest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

Submit = Callable[[dict[str, Any]], Job]


def test_a_link_is_cut_healed_and_delayed(hosts: Cluster) -> None:
    """The harness itself: what passes between two hosts, and how long it takes."""
    first, second, third = hosts.nodes
    assert hosts.reaches(first, second) is not None
    hosts.cut(second)
    assert hosts.reaches(first, second) is None
    assert hosts.reaches(third, second) is None
    assert hosts.reaches(first, third) is not None
    hosts.heal(second)
    assert hosts.reaches(first, second, timeout_s=10) is not None
    with hosts.delayed(second, 0.05):
        took_s = hosts.reaches(first, second, timeout_s=10)
        assert took_s is not None
        assert took_s >= 0.1  # there and back
    assert hosts.reaches(first, second, timeout_s=10) is not None


def test_a_lost_host_is_done_without_and_one_that_joins_is_used(
    hosts: Cluster, service: Service, submit: Submit, gate: Path, undisturbed: Job
) -> None:
    """L1 (PyTorch 111646): the others re-form in seconds instead of sitting in the collective."""
    job = submit(spec_of(gate, wanted=3))
    job.wait_step(6, world_size=3)
    assert len({node for _, node in job.workers().values()}) == 3
    victim = _expendable(hosts)
    hosts.kill(victim)
    recovery = job.wait_event("recovery")["data"]
    assert (recovery["old_workers"], recovery["new_workers"]) == (3, 2)
    # Its part came from the neighbour that keeps its replica.
    assert recovery["source"] == "replica"
    assert recovery["steps_repeated"] <= 1
    (lost,) = job.events("worker_lost")
    assert lost["data"]["budget"] == "node"
    told_s = recovery_began(job) - lost["time"]
    assert told_s < 60, f"{told_s} s from the notice of the death to training again"
    job.wait_step(recovery["at_step"] + 2, world_size=2)

    hosts.revive([victim])
    back = job.wait_event("resize")["data"]
    assert (back["old_workers"], back["new_workers"], back["cause"]) == (2, 3, "grown back")
    assert back["steps_lost"] == 0
    gate.touch()
    _assert_as(job, undisturbed)
    assert_nothing_left(service, job)


def test_a_host_cut_off_is_done_without_and_may_not_come_back(
    hosts: Cluster, service: Service, submit: Submit, gate: Path, undisturbed: Job
) -> None:
    """No process dies when a link is cut: who is silent is given up, and is fenced off when it is back."""
    job = submit(spec_of(gate, wanted=3))
    job.wait_step(6, world_size=3)
    victim = _expendable(hosts)
    (pid,) = hosts.running("ray::WorkerActor", on=victim)
    hosts.cut(victim)
    recovery = job.wait_event("recovery")
    assert recovery["data"]["new_workers"] == 2
    job.wait_step(recovery["data"]["at_step"] + 2, world_size=2)
    assert _runs(pid), "it was cut off, not ended"
    (lost,) = [worker for worker, (own, _) in job.workers().items() if own == pid]

    _assert_fenced(job, recovery["generation"], lambda: _heal(hosts, victim, pid))
    assert lost not in job.ranks().values()
    gate.touch()
    _assert_as(job, undisturbed)
    assert_nothing_left(service, job)


def test_a_worker_that_needs_no_other_trains_on_behind_a_cut_and_it_counts_for_nothing(
    hosts: Cluster, service: Service, submit: Submit, gate: Path, undisturbed: Job
) -> None:
    """The only worker of a job waits for no peer: it goes on, beside the one that has taken its place."""
    resources = {"cpus": CPUS, "memory_bytes": 2 * HEAD_MEMORY_BYTES}
    spec = spec_of(gate, wanted=1, pause_s=0.2, resources=resources, checkpoints={"every_steps": 3})
    job = submit(spec)
    # The next save is three slow steps away.
    job.wait_event("checkpoint")
    (victim,) = [node for node in hosts.nodes if hosts.running("ray::WorkerActor", on=node)]
    (pid,) = hosts.running("ray::WorkerActor", on=victim)
    hosts.cut(victim)
    recovery = job.wait_event("recovery")
    job.wait_step(recovery["data"]["at_step"] + 2, generation=recovery["generation"])
    _assert_fenced(job, recovery["generation"], lambda: _heal(hosts, victim, pid))
    gate.touch()
    _assert_as(job, undisturbed)
    assert_nothing_left(service, job)


def test_a_drained_host_is_left_before_it_goes(
    hosts: Cluster, service: Service, submit: Submit, gate: Path, undisturbed: Job
) -> None:
    job = submit(spec_of(gate, wanted=2))
    job.wait_step(4, world_size=2)
    victim = _expendable(hosts)
    with service.client() as client:
        drained = client.drain(client.find_node(victim.address).id, reason="maintenance")
    assert drained.draining
    move = job.wait_event("resize")["data"]
    assert (move["cause"], move["nodes"]) == ("drain", [drained.id])
    assert (move["old_workers"], move["new_workers"], move["steps_lost"]) == (2, 2, 0)
    until(lambda: not hosts.running("ray::WorkerActor", on=victim), "the host without workers")
    # Now its owner may switch it off, and nobody notices.
    hosts.kill(victim)
    gate.touch()
    _assert_as(job, undisturbed)
    assert job.events("worker_lost") == job.events("recovery") == []
    done = [(report["step"], report["rank"]) for report in job.reports()]
    assert len(set(done)) == len(done), "no step was done twice"
    assert_nothing_left(service, job)


def test_cancelled_is_shown_when_no_host_has_anything_left(
    hosts: Cluster, service: Service, submit: Submit, gate: Path
) -> None:
    """L10 (Ray 23638, 35773): cancel leaves no process, memory or placement group behind, on any host."""
    job = submit(spec_of(gate, wanted=3))
    job.wait_step(2, world_size=3)
    assert all(hosts.running("ray::WorkerActor", on=node) for node in hosts.nodes)
    with service.client() as client:
        client.cancel(job.id)
    job.wait(lambda job: job.phase == "cancelled", "the end of the cancelled job")
    assert hosts.running("ray::WorkerActor") == []
    assert_nothing_left(service, job)


def test_a_slow_link_changes_the_time_and_no_bit(
    hosts: Cluster, service: Service, submit: Submit, gate: Path, undisturbed: Job
) -> None:
    job = submit(spec_of(gate, wanted=2))
    job.wait_step(4, world_size=2)
    delay_s = 0.05
    victims = [node for node in hosts.nodes if hosts.running("ray::WorkerActor", on=node)]
    with hosts.delayed(victims[0], delay_s):
        at = job.read().step
        gate.touch()
        job.wait_step(at + 8)
    slow = [r["step_s"] for r in job.reports() if at + 3 <= r["step"] <= at + 7]
    # Each step has collectives, and none can be over before a message has crossed the link.
    assert min(slow) >= delay_s
    _assert_as(job, undisturbed)
    assert job.events("recovery") == []
    assert_nothing_left(service, job)


def recovery_began(job: Job) -> float:
    """When the job trained again after its last recovery."""
    running = [e for e in job.events("phase") if e["data"]["phase"] == "running"]
    moment: float = running[-1]["time"]
    return moment


def _expendable(hosts: Cluster) -> Node:
    """A host with a worker that is not the head: there the controllers are."""
    assert hosts.running("ray::JobController", on=hosts.head)
    return next(node for node in hosts.nodes[1:] if hosts.running("ray::WorkerActor", on=node))


def _heal(hosts: Cluster, victim: Node, pid: int) -> None:
    """Connect a host again that was given up; its worker's process ends."""
    hosts.heal(victim)
    until(lambda: not _runs(pid), f"the end of the fenced worker, process {pid}", timeout_s=120)
    # Its Ray node has been declared dead and ends as well; then the host is ready for a new one.
    until(lambda: victim.process.poll() is not None, f"the end of the node on {victim.address}")


def _assert_fenced(job: Job, generation: int, heal: Callable[[], None]) -> None:
    """Nothing that an older generation does from now on, the healing included, leaves a trace."""
    before = {info.path.name: info for info in manifest.scan(job.folder.checkpoints)}
    began = time.time()
    known = len(job.read().entries)
    heal()
    job.wait_step(job.step + 3, generation=generation)
    late = [e for e in job.entries[known:] if e["generation"] < generation]
    assert late == []
    after = manifest.scan(job.folder.checkpoints)
    old = [i for i in after if i.generation < generation and i.path.name not in before]
    assert old == [], f"committed by a generation that was over at {began}"


def _assert_as(job: Job, undisturbed: Job) -> None:
    """The job succeeded, with the losses, parameters and samples of the undisturbed one, to the bit."""
    job.finish()
    assert job.losses() == undisturbed.losses()
    assert len(job.losses()) == STEPS
    masters = undisturbed.masters()
    assert masters
    assert all(torch.equal(tensor, masters[name]) for name, tensor in job.masters().items())
    job.assert_every_sample_once()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
