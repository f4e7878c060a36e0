"""One job through all that a seed has in store for it, and at the end nobody can tell.

`--chaos-seconds` and `--chaos-seed` say how long and what; the header of the run and a failure name the seed.
"""

import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from api.client import Refused
from tests.chaos import grounds
from tests.chaos.conftest import Ground
from tests.chaos.decisions import Action, Kind, decide
from tests.multihost.cluster import Cluster, Node, until
from tests.multihost.served import Job, Service, assert_nothing_left

pytestmark = pytest.mark.integration

MOST_WORKERS = 5
NOTICE_S = 20.0
"""How long before a host is switched off that is told."""

STEPS_PER_S = 2
"""More than are done in a second of chaos, so that it ends before the job does."""

OVER = ("succeeded", "failed", "cancelled")


def spec_of(gate: Path, *, steps: int, wanted: int) -> dict[str, Any]:
    """A job whose bits do not depend on what happens to it; slow until `gate` exists."""
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "sequence_length": 16}
    return {
        "name": "chaos",
        "model": {
            "kind": "custom",
            "factory": "tests.integration.gated_model:GatedGPT",
            "arguments": {"gate": str(gate), "pause_s": 0.15, **sizes},
        },
        "data": {"kind": "synthetic", "samples": 6 * steps},
        "steps": steps,
        "global_batch": 6,
        "micro_batch": 1,
        "sequence_length": 16,
        "seed": 11,
        "optimizer": {"lr": 3e-3},
        "zero": {"stage": 2, "reproducible": True},
        "workers": {"wanted": wanted, "max": MOST_WORKERS},
        "checkpoints": {"every_steps": 5},
        # Chaos loses more than a job is given up for, and waits for no backoff.
        "recovery": {"max_worker_losses": 10_000, "max_node_losses": 10_000, "backoff_cap_s": 2},
        "sample_ledger": True,
    }


def test_nobody_can_tell_at_the_end(ground: Ground, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds, seed = (request.config.getoption(f"--chaos-{name}") for name in ("seconds", "seed"))
    steps = 60 + int(seconds * STEPS_PER_S)
    gate = tmp_path / "gate"
    job = ground.service.submit(spec_of(gate, steps=steps, wanted=3))
    chaos = Chaos(ground.service, ground.hosts, job)
    began, told = time.monotonic(), [f"--chaos-seed={seed}"]
    try:
        for number, action in zip(
            count(1), decide(seed, kinds=ground.kinds, most_workers=MOST_WORKERS), strict=False
        ):
            if not chaos.wait(action.after_steps):
                break
            told.append(f"step {job.step}: {action}: {chaos.act(action)}")
            if number >= len(ground.kinds) and time.monotonic() - began >= seconds:
                break
        gate.touch()
        job.finish()
    except Exception as error:
        error.add_note("\n".join([*told, job.read().story()]))
        raise

    calm = tmp_path / "calm"
    calm.touch()
    undisturbed = ground.service.submit(spec_of(calm, steps=steps, wanted=1))
    undisturbed.finish()
    assert job.losses() == undisturbed.losses(), told
    masters = undisturbed.masters()
    assert all(torch.equal(tensor, masters[name]) for name, tensor in job.masters().items()), told
    job.assert_every_sample_once()
    assert_nothing_left(ground.service, job, undisturbed)


class Chaos:
    """Carries out actions on a running job."""

    def __init__(self, service: Service, hosts: Cluster | None, job: Job) -> None:
        self._service = service
        self._hosts = hosts
        self._job = job
        self._seen = 0

    def wait(self, steps: int) -> bool:
        """Wait until so many more steps were done, the same ones or others; False if the job is over."""

        def done(job: Job) -> int:
            return len({(r["generation"], r["step"]) for r in job.reports()})

        self._job.wait(
            lambda job: job.phase in OVER or done(job) >= self._seen + steps, f"{steps} more steps"
        )
        self._seen = done(self._job)
        return self._job.phase not in OVER

    def act(self, action: Action) -> str:
        """Make it happen; returns what came of it, for people."""
        place = self._service.place
        match action.kind:
            case Kind.KILL_WORKER:
                return "killed" if grounds.kill(place, grounds.WORKER, action.whom) else "there was none"
            case Kind.KILL_CONTROLLER:
                return "killed" if grounds.kill(place, grounds.CONTROLLER, action.whom) else "there was none"
            case Kind.RESIZE:
                return self._resize(action.workers)
            case Kind.PAUSE:
                return self._pause()
            case Kind.RESTART_SERVICE:
                self._service.kill()
                time.sleep(action.hold_s)
                self._service.start()
                return "it answers"
        assert self._hosts is not None
        victim = grounds.host(self._hosts, action.whom)
        match action.kind:
            case Kind.CUT_LINK:
                self._hosts.cut(victim)
                time.sleep(action.hold_s)
                self._hosts.heal(victim)
            case Kind.LOSE_HOST:
                self._hosts.cut(victim)
                self._hosts.wait_until_given_up(victim)
                self._hosts.heal(victim)
                until(lambda: victim.process.poll() is not None, f"the end of the node on {victim.address}")
                self._hosts.revive([victim])
            case Kind.KILL_HOST | Kind.DRAIN_HOST:
                if action.kind is Kind.DRAIN_HOST:
                    self._drain(victim)
                self._hosts.kill(victim)
                self._hosts.wait_until_given_up(victim)
                self._hosts.revive([victim])
        return victim.address

    def _resize(self, workers: int) -> str:
        try:
            with self._service.client() as client:
                client.resize(self._job.id, workers)
        except Refused as refused:
            return f"refused: {refused.code}"
        return "asked"

    def _drain(self, victim: Node) -> None:
        """Drain a host and give the job the time that was promised, as far as it needs it."""
        with self._service.client() as client:
            client.drain(client.find_node(victim.address).id, deadline_s=NOTICE_S)
        deadline = time.monotonic() + NOTICE_S
        while self._hosts.running(grounds.WORKER, on=victim) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _pause(self) -> str:
        """Pause, wait for it, resume. A job that ends first has nothing to resume."""
        with self._service.client() as client:
            try:
                client.pause(self._job.id)
            except Refused as refused:
                return f"refused: {refused.code}"

            def stopped() -> bool:
                return client.job(self._job.id).state in ("paused", *OVER)

            until(stopped, f"the pause of job {self._job.id}", told=lambda: self._job.read().story())
            if client.job(self._job.id).state == "paused":
                client.resume(self._job.id)
        return "paused and resumed"
