"""A worker without Ray: alone in its group, in a process of its own."""

import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from workers.errors import StaleGenerationError
from workers.naming import JobFolder
from workers.protocol import Activity, Assignment, Fault, Outcome, Poll, Readiness, Wish
from workers.spec import JobSpec
from workers.worker import Worker

pytestmark = pytest.mark.distributed


def _spec(**changes: Any) -> JobSpec:
    fields = {
        "data": {"kind": "synthetic", "samples": 48},
        "model": {"kind": "gpt", "layers": 1, "hidden": 16, "heads": 2, "vocabulary": 31},
        "steps": 5,
        "global_batch": 2,
        "micro_batch": 1,
        "sequence_length": 8,
        "checkpoints": {"every_steps": None},
    }
    return JobSpec.model_validate(fields | changes)


def _worker(folder: Path, **changes: Any) -> Worker:
    return Worker(
        name="w0",
        spec=_spec(**changes),
        folder=JobFolder(folder, "job"),
        node="node",
        address="127.0.0.1",
        log=structlog.get_logger(),
    )


def _begin(worker: Worker, generation: int, *, world_size: int = 1, checkpoint: str | None = None) -> None:
    worker.begin(
        Assignment(
            generation=generation,
            rank=0,
            world_size=world_size,
            store=worker.host(),
            checkpoint=checkpoint,
        )
    )


def _until(worker: Worker, done: Callable[[Poll], Any], after: int = 0) -> Poll:
    deadline = time.monotonic() + 60
    while not done(poll := worker.poll(after)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return poll


def _outcome(worker: Worker) -> Outcome:
    outcome = _until(worker, lambda poll: poll.outcome).outcome
    assert outcome is not None
    return outcome


# Each body runs in a process of its own: the default process group belongs to the whole process.


def _generations_follow_each_other(folder: Path) -> None:
    worker = _worker(folder, steps=1_000_000)
    assert worker.poll(0) == Poll(
        generation=0, activity=Activity.IDLE, step=0, notices=(), upto=0, begun=None, outcome=None
    )
    readiness = worker.prepare()
    assert readiness.failure is None
    assert readiness.fingerprint["kind"] == "synthetic"
    _begin(worker, 1)
    with pytest.raises(StaleGenerationError, match="generation 2 cannot begin"):
        _begin(worker, 2)
    _until(worker, lambda poll: poll.step >= 3)
    with pytest.raises(StaleGenerationError, match="is in generation 1, not in 7"):
        worker.ask(7, Wish.RESIZE)
    worker.ask(1, Wish.RESIZE)
    poll = _until(worker, lambda poll: poll.outcome)
    assert poll.outcome is not None
    assert poll.outcome == Outcome(step=poll.step, reason=Wish.RESIZE)
    assert poll.activity is Activity.IDLE
    steps = [notice["step"] for notice in poll.notices if notice["type"] == "report"]
    assert steps == list(range(1, poll.step + 1))
    saved = poll.notices[-1]
    assert (saved["type"], saved["step"], saved["reason"]) == ("checkpoint", poll.step, "resize")
    with pytest.raises(StaleGenerationError):
        _begin(worker, 1)
    (folder_of_step,) = (folder / "jobs" / "job" / "checkpoints").iterdir()
    _begin(worker, 2, checkpoint=str(folder_of_step))
    at = _until(worker, lambda later: later.begun and later.generation == 2).begun
    assert at is not None
    assert at.step == poll.step
    assert set(at.seconds) == {"form", "start", "load"}
    worker.ask(2, Wish.PAUSE)
    assert _outcome(worker).reason is Wish.PAUSE


def _an_abort_ends_a_rank_that_waits_for_the_others(folder: Path) -> None:
    worker = _worker(folder)
    worker.prepare()
    _begin(worker, 1, world_size=2)
    time.sleep(0.2)
    worker.abort(1)
    worker.abort(1)
    failure = _outcome(worker).failure
    assert failure is not None
    assert failure.fault is Fault.ABORTED
    with pytest.raises(StaleGenerationError):
        worker.abort(2)
    _begin(worker, 2)
    assert _until(worker, lambda poll: poll.generation == 2 and poll.outcome).outcome == Outcome(step=5)


def _a_users_error_is_data(folder: Path) -> None:
    failure = _worker(folder, data={"kind": "text", "paths": ["/no/such/text"]}).prepare().failure
    assert failure is not None
    assert failure.fault is Fault.USER
    assert failure.message.startswith("DataError: data path '/no/such/text'")
    assert _worker(folder, resources={"gpus": 1}).prepare().failure is not None
    worker = _worker(folder, model={"kind": "custom", "factory": "torch.nn:Linear", "arguments": {}})
    assert worker.prepare() == Readiness(
        pid=psutil.Process().pid, node="node", fingerprint=worker.prepare().fingerprint
    )
    _begin(worker, 1)
    failure = _outcome(worker).failure
    assert failure is not None
    assert failure.fault is Fault.USER
    assert "building it with arguments [] failed with TypeError" in failure.message
    assert "Traceback" in failure.traceback


def _a_live_process_keeps_nothing_of_earlier_generations(folder: Path) -> None:
    model = {"kind": "gpt", "layers": 4, "hidden": 256, "heads": 2, "vocabulary": 256}
    worker = _worker(folder, model=model, steps=1)
    worker.prepare()
    sizes = []
    for generation in range(1, 7):
        _begin(worker, generation)
        _until(worker, lambda poll, g=generation: poll.generation == g and poll.outcome)
        sizes.append(psutil.Process().memory_full_info().uss)
    # The model's states are 50 MB; a generation that was kept would add all of that.
    assert sizes[-1] - sizes[1] < 25e6, sizes


def _heartbeats_say_where_the_training_thread_is(folder: Path) -> None:
    worker = _worker(folder, steps=1_000_000)
    assert worker.prepare().failure is None
    assert worker.poll(0).heartbeat is None
    _begin(worker, 1)
    first = _until(worker, lambda poll: poll.heartbeat).heartbeat
    assert first is not None
    known = {"forward", "backward", "optimizer", "data", "training", "control", "reduce", "gather"}
    assert first.phase in known
    later = _until(worker, lambda poll: poll.heartbeat and poll.heartbeat.moves > first.moves + 20).heartbeat
    assert later is not None
    assert later.step >= first.step
    assert later.still_s >= 0
    worker.ask(1, Wish.PAUSE)
    _outcome(worker)
    assert worker.poll(10**9).heartbeat is None


def _main(pipe: Connection, body: Callable[[Path], None], folder: Path) -> None:
    import traceback

    try:
        body(folder)
        pipe.send(None)
    except BaseException:
        pipe.send(traceback.format_exc())


@pytest.mark.parametrize(
    "body",
    [
        _generations_follow_each_other,
        _an_abort_ends_a_rank_that_waits_for_the_others,
        _a_users_error_is_data,
        _a_live_process_keeps_nothing_of_earlier_generations,
        _heartbeats_say_where_the_training_thread_is,
    ],
)
def test_worker(body: Callable[[Path], None], tmp_path: Path) -> None:
    context = get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(theirs, body, tmp_path))
    process.start()
    theirs.close()
    try:
        assert mine.poll(90), "no answer"
        failure = mine.recv()
        assert failure is None, failure
    finally:
        process.kill()
        process.join()
        process.close()
        mine.close()
