"""Resizes, recoveries and replicas beside Ray Train's elastic restart, in interleaved rounds.

    python -m benchmarks.elastic                        # everything; about a quarter of an hour on 2 cores
    python -m benchmarks.elastic --quick                # a few minutes: does it run?
    python -m benchmarks.elastic --only large --no-peer # this repository's 50M job alone

Writes a dated table to benchmarks/results/, anew after every contestant's round, and ends with a line for
each bar. Starts a local Ray cluster of its own and ends it. Exits with 1 if a contestant failed; a bar that
is short is a result, not a failure.
"""

import argparse
import os
import shlex
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import ray
from ray.exceptions import RayError

from benchmarks import elastic_report
from benchmarks.elastic_bytes import bytes_needed, gpt_layout
from benchmarks.elastic_contestants import FEWEST, MOST, ContestantError, Job
from benchmarks.elastic_model import SCALAR
from benchmarks.elastic_replicas import measure_replicas
from benchmarks.elastic_results import OURS, PEER, ReplicaResult, Round, SizeResult
from benchmarks.elastic_round import run_round
from benchmarks.elastic_timeline import GROW, KILL, SHRINK
from benchmarks.first_touch import Touched, touch_memory
from benchmarks.measure import preload
from benchmarks.probes import wait_until_quiet
from tests.distributed.ranks import RankFailedError
from workers import naming
from workers.spec import Zero

RESULTS = Path(__file__).parent / "results"
LARGE, QUICK_LARGE = "50M", "1M"
PARTS = ("scalar", "large", "replicas")

_CPUS = 8
"""Logical CPUs of the cluster, so that a joiner always finds a place; the machine may have fewer."""
_QUIET_LIMIT_S = 8.0


@dataclass(slots=True, kw_only=True)
class Session:
    """What a run of the benchmark has found so far, and where it writes it."""

    path: Path
    when: str
    touched: Touched
    large: str
    absent: dict[str, str] = field(default_factory=dict)
    sizes: list[SizeResult] = field(default_factory=list)
    replicas: ReplicaResult | None = None

    def write(self) -> str:
        text = elastic_report.render(
            self.sizes,
            self.replicas,
            large=self.large,
            when=self.when,
            command=f"python -m benchmarks.elastic {shlex.join(sys.argv[1:])}".strip(),
            touched=self.touched,
            absent=self.absent,
        )
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(text, encoding="utf-8")
        return text


def main() -> int:
    options = _options()
    now = datetime.now(UTC)
    session = Session(
        path=options.out or RESULTS / f"elastic-{now:%Y-%m-%d-%H%M}.md",
        when=f"{now:%Y-%m-%d %H:%M} UTC",
        touched=touch_memory(),
        large=QUICK_LARGE if options.quick else LARGE,
    )
    print(session.touched, flush=True)
    rounds = 1 if options.quick else options.rounds
    if options.no_peer:
        session.absent[PEER] = "--no-peer"
    if "replicas" in options.only:
        _replicas(session, turns=2 * rounds, steps=4)
    jobs = _jobs(session.large, options.only)
    if jobs:
        _connect()
        try:
            _rounds(session, jobs, rounds, [OURS] if options.no_peer else [OURS, PEER])
        finally:
            ray.shutdown()
    print(session.write())
    failed = any(result.failures for result in session.sizes)
    return int(failed or ("replicas" in options.only and session.replicas is None))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each contestant on each model")
    parser.add_argument("--quick", action="store_true", help="one round, and a small model for the large one")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--no-peer", action="store_true", help="leave out Ray Train")
    parser.add_argument("--out", type=Path, default=None, help="the table's file")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    return options


def _jobs(large: str, parts: list[str]) -> list[Job]:
    """Ray Train's checkpoints are far enough apart that it takes each before the next is made."""
    jobs = []
    if "scalar" in parts:
        jobs.append(Job(size=SCALAR, peer_checkpoint_every=120, settled_steps=20))
    if "large" in parts:
        every = 20 if large == LARGE else 120
        jobs.append(Job(size=large, peer_checkpoint_every=every, settled_steps=3))
    return jobs


def _connect() -> None:
    """A local Ray cluster of our own, whose workers can import this repository's modules."""
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    ray.init(
        address="local",
        num_cpus=_CPUS,
        include_dashboard=False,
        namespace=naming.RAY_NAMESPACE,
        log_to_driver=False,
        object_store_memory=100 << 20,
    )


def _rounds(session: Session, jobs: list[Job], rounds: int, names: list[str]) -> None:
    for job in jobs:
        session.sizes.append(SizeResult(job.size, bytes_needed=_bytes_needed(job)))
    for number in range(1, rounds + 1):
        for job, result in zip(jobs, session.sizes, strict=True):
            order = names if number % 2 else names[::-1]
            for name in order:
                if name not in result.failures:
                    _one(result, job, name, number)
                    session.write()


def _one(result: SizeResult, job: Job, name: str, number: int) -> None:
    busy = wait_until_quiet(_QUIET_LIMIT_S)
    before = result.changes(OURS, KILL)
    began = time.monotonic()
    try:
        changes = run_round(
            name,
            job,
            victim=(number - 1) % MOST,
            after_loss=before[-1].new_workers if before else None,  # the same as ours had last
        )
    except (ContestantError, RayError) as error:
        result.failures[name] = str(error).strip().splitlines()[-1][:200].replace("|", "/")
        print(f"{result.size} round {number}: {name} failed: {error}", flush=True)
        return
    result.rounds.setdefault(name, []).append(Round(changes=changes, busy_cores=busy))
    times = ", ".join(f"{kind} {change.seconds:.2f} s" for kind, change in changes.items())
    print(
        f"{result.size} round {number}: {name}: {times}; {time.monotonic() - began:.0f} s in all", flush=True
    )


def _bytes_needed(job: Job) -> dict[str, int]:
    if job.size == SCALAR:
        return {}
    layout = gpt_layout(job.size, tile=Zero().tile)
    return {
        kind: bytes_needed(layout, stage=job.stage, old_workers=old, new_workers=new)
        for kind, old, new in ((GROW, FEWEST, MOST), (SHRINK, MOST, FEWEST))
    }


def _replicas(session: Session, *, turns: int, steps: int) -> None:
    preload()
    wait_until_quiet(_QUIET_LIMIT_S)
    began = time.monotonic()
    try:
        session.replicas = measure_replicas(session.large, turns=turns, steps=steps)
    except RankFailedError as error:
        session.absent["replicas"] = str(error).strip().splitlines()[-1][:200].replace("|", "/")
        print(f"replicas failed: {error}", flush=True)
    else:
        print(f"replicas, {session.large}: {time.monotonic() - began:.0f} s in all", flush=True)
    session.write()


if __name__ == "__main__":
    sys.exit(main())
