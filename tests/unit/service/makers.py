"""Specs, jobs and log entries for the service's tests."""

import time
from collections.abc import Callable
from typing import Any

from service.jobs import Job, JobState
from workers.reports import Event, RankReport
from workers.spec import JobSpec

NOW = 1_700_000_000.0


def spec_of(**changes: Any) -> JobSpec:
    """A small job of 8 micro-batches that wants 2 workers."""
    fields: dict[str, Any] = {
        "name": "test",
        "data": {"kind": "synthetic", "samples": 64},
        "steps": 100,
        "global_batch": 8,
        "micro_batch": 1,
        "sequence_length": 16,
        "model": {"kind": "gpt", "layers": 2, "hidden": 32, "heads": 2},
        "workers": {"wanted": 2},
    }
    return JobSpec.model_validate(fields | changes)


def job_of(state: JobState = JobState.RUNNING, **changes: Any) -> Job:
    spec = changes.pop("spec", None) or spec_of()
    fields: dict[str, Any] = {
        "id": "job-1",
        "spec": spec,
        "submitted_by": "ann",
        "created_at": NOW,
        "updated_at": NOW,
        "queued_at": NOW,
        "wanted_workers": spec.workers.wanted,
        "state": state,
        "attempt": 0 if state is JobState.QUEUED else 1,
    }
    return Job(**fields | changes)


def event(kind: str, data: dict[str, Any], *, seq: int = 1, generation: int = 1) -> Event:
    fields = {"seq": seq, "time": NOW + seq, "generation": generation, "kind": kind, "data": data}
    return Event.model_validate(fields)


def phase(name: str, *, seq: int = 1, generation: int = 1, attempt: int = 1, reason: str = "") -> Event:
    data = {"phase": name, "reason": reason, "attempt": attempt, "wanted": 2, "workers": 2}
    return event("phase", data, seq=seq, generation=generation)


def report(
    *, seq: int = 1, generation: int = 1, rank: int = 0, step: int = 1, world_size: int = 2
) -> RankReport:
    memory = dict.fromkeys(
        ("parameters", "gradients", "optimizer_states", "communication_buffers", "activations"), 10
    )
    return RankReport.model_validate(
        {
            "seq": seq,
            "time": NOW + seq,
            "generation": generation,
            "rank": rank,
            "world_size": world_size,
            "worker": f"w{rank}",
            "step": step,
            "loss": 1.0 / step,
            "lr": 0.1,
            "grad_norm": 1.0,
            "tokens": 64,
            "step_s": 0.1,
            "seconds": {"forward": 0.1},
            "bytes_sent": {"reduce": 10},
            "memory": memory,
            "predicted": memory,
            "resident_bytes": 100,
        }
    )


def wait_until(found: Callable[[], object], *, timeout_s: float = 10.0) -> None:
    """Look again and again until something is found."""
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
