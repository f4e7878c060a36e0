"""The main job from beginning to end on this machine, as a user would run it: `elastic-zero demo`.

Starts the service as a process of its own in a folder that is removed at the end, trains a small GPT on the
sources that ship with Python, resizes it 2 -> 4 -> 3 while it learns, and shows what came of it. All of it is
asked over HTTP. Whatever happens, nothing is left behind; where something is not as it should be, it fails.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from api import render, server_file
from api.client import Client, ClientError
from api.connection import connect
from api.narrator import Narrator
from api.schemas import EventOut, JobOut, ReportOut
from service.jobs import JobState
from service.local_ray import LocalRay
from service.settings import Settings
from workers.spec import JobSpec

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0
WHOLE_TIMEOUT_S = 600
LOCAL_CPUS = 2
LEARNED_RATIO = 0.7
"""The loss at the end must be below this part of the first step's, or nothing was learned."""

_POLL_S = 0.2
_LOG_LINES = 30
_AVERAGED_STEPS = 10

SPEC = JobSpec.model_validate(
    {
        "name": "demo",
        "model": {"kind": "gpt", "layers": 3, "hidden": 96, "heads": 4},
        "data": {"kind": "text", "paths": ["python:"], "max_bytes": 8_000_000},
        "steps": 210,
        "global_batch": 12,
        "micro_batch": 2,
        "sequence_length": 64,
        "seed": 1,
        "optimizer": {"lr": 2e-3},
        "schedule": {"kind": "cosine", "warmup_steps": 20},
        "zero": {"stage": 3},
        "workers": {"wanted": 2, "min": 1, "max": 4},
        # Half a CPU each, so that four workers fit on a machine with two cores.
        "resources": {"cpus": 0.5},
        "checkpoints": {"every_steps": 100, "keep": 2},
    }
)

RESIZES = ((SPEC.steps // 3, 4), (2 * SPEC.steps // 3, 3))
"""After so many steps, so many workers are asked for."""


class DemoFailed(Exception):  # noqa: N818 - named for the outcome
    """Something was not as it should be."""


@dataclass(slots=True)
class _Seen:
    """What the demo keeps of the stream."""

    losses: list[float] = field(default_factory=list)
    """Of each step in order; a step that was done again after a recovery counts once."""
    resizes: list[EventOut] = field(default_factory=list)
    job: JobOut | None = None


def run(console: Console) -> None:
    """Run the demo. Raises DemoFailed, after it has shown the ends of the logs."""
    started_s = time.monotonic()
    with (
        _bounded(WHOLE_TIMEOUT_S),
        tempfile.TemporaryDirectory(prefix="ez-", ignore_cleanup_errors=True) as folder,
    ):
        data_dir = Path(folder)
        try:
            with _service(data_dir, console) as client:
                seen = _train(client, console)
                _show(client, seen, console)
        except (DemoFailed, ClientError) as error:
            _show_logs(data_dir, console)
            raise DemoFailed(str(error)) from error
    took_s = time.monotonic() - started_s
    console.print(f"\ndone in {took_s:.0f} s, and nothing is left behind", style="green")


@contextmanager
def _bounded(timeout_s: int) -> Iterator[None]:
    """Fail after so long, and clean up on SIGTERM as on Ctrl-C."""

    def too_long(_number: int, _frame: FrameType | None) -> None:
        raise DemoFailed(f"not done after {timeout_s} s")

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGALRM, too_long), signal.signal(signal.SIGTERM, end)
    signal.alarm(timeout_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGTERM, before[1])


@contextmanager
def _service(data_dir: Path, console: Console) -> Iterator[Client]:
    """A service of our own, and a client of it; both are gone afterwards, with the Ray they used."""
    console.print("starting the service and a local Ray ...")
    settings = Settings(data_dir=data_dir)
    command = [sys.executable, "-m", "api.cli", "--data-dir", str(data_dir), "serve", "--port", "0"]
    with (data_dir / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--local-cpus", str(LOCAL_CPUS)],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for the demo, which then ends the service in good order.
            start_new_session=True,
        )
    try:
        _wait_until_serving(process, data_dir)
        with connect(settings) as client:
            console.print(f"serving at {client.url}")
            try:
                yield client
            finally:
                _cancel_all(client)
    finally:
        _end(process, settings)


def _wait_until_serving(process: subprocess.Popen[bytes], data_dir: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise DemoFailed(f"the service ended at once, with exit code {process.returncode}")
        record = server_file.read(data_dir)
        if record is not None:
            with suppress(ClientError), connect(Settings(data_dir=data_dir)) as client:
                if client.ready().ok:
                    return
        time.sleep(_POLL_S)
    raise DemoFailed(f"the service was not ready after {START_TIMEOUT_S:.0f} s")


def _cancel_all(client: Client) -> None:
    """Stop what an interrupted demo has running, so that the service takes its Ray down with it."""
    with suppress(ClientError):
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while (live := [job for job in client.jobs() if not job.over]) and time.monotonic() < deadline_s:
            for job in live:
                client.cancel(job.id)
            time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes], settings: Settings) -> None:
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # The service has done so already, unless it was killed.
    LocalRay(settings.data_dir).stop()


def _train(client: Client, console: Console) -> _Seen:
    """Submit the job and follow it to its end; ask for each resize when its step has come."""
    job = client.submit(SPEC)
    plan = client.plan(SPEC)
    console.print(
        f"submitted job {job.id}: a GPT with {plan.parameters:,} parameters, ZeRO stage {SPEC.zero.stage}, "
        f"on {job.workers.wanted} workers; it learns the Python sources of this machine\n",
        soft_wrap=True,
    )
    seen = _Seen(job=job)
    due = list(RESIZES)
    with Narrator(console) as narrator:
        for streamed in client.follow(job.id):
            narrator.tell(streamed.item)
            _keep(seen, streamed.item)
            asked = len(RESIZES) - len(due)
            if due and len(seen.losses) >= due[0][0] and len(seen.resizes) == asked:
                _, workers = due.pop(0)
                client.resize(job.id, workers)
                console.print(Text(f"            asking for {workers} workers", style="cyan"))
    _judge(seen)
    return seen


def _keep(seen: _Seen, item: JobOut | EventOut | ReportOut) -> None:
    match item:
        case JobOut():
            seen.job = item
        case ReportOut(rank=0, loss=float() as loss):
            del seen.losses[item.step - 1 :]
            seen.losses.append(loss)
        case EventOut(kind="resize"):
            seen.resizes.append(item)
        case EventOut(kind="resize_refused"):
            raise DemoFailed(f"a resize was refused: {item.data}")


def _judge(seen: _Seen) -> None:
    """Raise DemoFailed unless all went as it should."""
    job = seen.job
    if job is None or job.state is not JobState.SUCCEEDED:
        raise DemoFailed(f"the job ended as {job and job.state}: {job and job.reason}")
    if len(seen.losses) != SPEC.steps:
        raise DemoFailed(f"{len(seen.losses)} steps were reported, not {SPEC.steps}")
    sizes = [(event.data["old_workers"], event.data["new_workers"]) for event in seen.resizes]
    if sizes != [(2, 4), (4, 3)]:
        raise DemoFailed(f"the resizes were {sizes}, not 2 -> 4 -> 3")
    if lost := sum(event.data["steps_lost"] for event in seen.resizes):
        raise DemoFailed(f"the resizes lost {lost} steps")
    before, after = seen.losses[0], _final(seen)
    if not after < LEARNED_RATIO * before:
        raise DemoFailed(f"the loss went from {before:.3f} to {after:.3f} only: nothing was learned")


def _final(seen: _Seen) -> float:
    last = seen.losses[-_AVERAGED_STEPS:]
    return sum(last) / len(last)


def _show(client: Client, seen: _Seen, console: Console) -> None:
    assert seen.job is not None
    ranks = client.ranks(seen.job.id)
    if len(ranks) != RESIZES[-1][1]:
        raise DemoFailed(f"{len(ranks)} ranks have reported last, not {RESIZES[-1][1]}")
    console.print()
    console.print(render.MEMORY_HEADING, soft_wrap=True)
    console.print(render.memory_table(ranks))
    console.print()
    console.print("what each resize cost; training paused from the end of a step until it went on:")
    console.print(_resizes_table(seen.resizes))
    console.print(
        f"\nloss in nats a byte: {seen.losses[0]:.3f} at the first step, {_final(seen):.3f} at the end "
        f"(mean of the last {_AVERAGED_STEPS} of {SPEC.steps} steps)",
        soft_wrap=True,
    )


def _resizes_table(resizes: list[EventOut]) -> Table:
    """What each resize cost, and parts of it: forming the group, building the engine, loading its state."""
    phases = ("form", "start", "load")
    table = Table(
        "workers",
        *(Column(name, justify="right") for name in ("at step", "steps lost", "pause", *phases)),
        box=None,
        pad_edge=False,
    )
    for event in resizes:
        data = event.data
        table.add_row(
            f"{data['old_workers']} -> {data['new_workers']}",
            str(data["at_step"]),
            str(data["steps_lost"]),
            render.seconds(data["pause_s"]),
            *(render.seconds(data["seconds"][phase]) for phase in phases),
        )
    return table


def _show_logs(data_dir: Path, console: Console) -> None:
    """The ends of the service's, Ray's and the workers' logs: the folder is about to go."""
    for path in sorted([*data_dir.glob("*.log"), *data_dir.glob("jobs/*/logs/*.log")]):
        console.print(Text(f"\n== {path.relative_to(data_dir)}", style="bold"))
        lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        console.print(Text(os.linesep.join(lines)))
