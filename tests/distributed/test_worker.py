"""A worker without Ray: alone in its group, in a process of its own."""

import ctypes
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from workers.errors import StaleGenerationError
from workers.naming import JobFolder
from workers.protocol import Activity, Assignment, Fault, Outcome, Poll, Readiness, Source, Wish
from workers.spec import JobSpec
from workers.worker import Worker
from zero_core.checkpoint import manifest
from zero_core.errors import FencedError

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


def _begin(
    worker: Worker,
    generation: int,
    *,
    world_size: int = 1,
    carries: bool = False,
    checkpoint: Path | None = None,
    floor_step: int = 0,
) -> None:
    worker.begin(
        Assignment(
            generation=generation,
            rank=0,
            world_size=world_size,
            participants=world_size,
            store=_ready(worker).store,
            carries=carries,
            checkpoint=str(checkpoint) if checkpoint else None,
            floor_step=floor_step,
        )
    )


def _ready(worker: Worker) -> Readiness:
    """Prepared, once."""
    if worker not in _readiness:
        _readiness[worker] = worker.prepare()
    return _readiness[worker]


_readiness: dict[Worker, Readiness] = {}
_told: dict[Worker, list[dict[str, Any]]] = {}
_upto: dict[Worker, int] = {}


def _checkpoints(folder: Path) -> Path:
    return folder / "jobs" / "job" / "checkpoints"


def _poll(worker: Worker) -> Poll:
    """As the controller asks: for what comes after the last answer. Its `notices` are all that were told."""
    poll = worker.poll(_upto.get(worker, 0))
    _upto[worker] = poll.upto
    _told.setdefault(worker, []).extend(poll.notices)
    return replace(poll, notices=tuple(_told[worker]))


def _until(worker: Worker, done: Callable[[Poll], Any]) -> Poll:
    deadline = time.monotonic() + 60
    while not done(poll := _poll(worker)):
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
        generation=0, activity=Activity.IDLE, step=0, news=0, notices=(), upto=0, begun=None, outcome=None
    )
    readiness = _ready(worker)
    assert readiness.failure is None
    assert readiness.fingerprint["kind"] == "synthetic"
    assert readiness.samples == 48
    manifest.open_generation(_checkpoints(folder), 1)
    _begin(worker, 1)
    with pytest.raises(StaleGenerationError, match="generation 2 cannot begin"):
        _begin(worker, 2)
    begun = _until(worker, lambda poll: poll.step >= 3).begun
    assert begun is not None
    assert (begun.step, begun.source) == (0, Source.START)
    with pytest.raises(StaleGenerationError, match="is in generation 1, not in 7"):
        worker.ask(7, Wish.RESIZE)
    worker.ask(1, Wish.RESIZE)
    poll = _until(worker, lambda poll: poll.outcome)
    assert poll.outcome == Outcome(step=poll.step, reason=Wish.RESIZE)
    assert poll.activity is Activity.IDLE
    # Every step was told, and nothing was saved: the state stays where it is.
    assert [n["type"] for n in poll.notices] == ["report"] * poll.step
    assert [n["step"] for n in poll.notices] == list(range(1, poll.step + 1))
    with pytest.raises(StaleGenerationError):
        _begin(worker, 1)
    manifest.open_generation(_checkpoints(folder), 2)
    _begin(worker, 2, carries=True)
    at = _until(worker, lambda later: later.begun and later.generation == 2).begun
    assert at is not None
    assert (at.step, at.source) == (poll.step, Source.LIVE)
    assert set(at.seconds) == {"form", "start", "move"}
    worker.ask(2, Wish.PAUSE)
    last = _until(worker, lambda later: later.generation == 2 and later.outcome)
    assert last.outcome is not None
    assert last.outcome.reason is Wish.PAUSE
    *reports, saved = last.notices[len(poll.notices) :]
    assert (saved["type"], saved["step"], saved["reason"]) == ("checkpoint", last.step, "pause")
    steps = [n["step"] for n in reports]
    assert steps == list(range(poll.step + 1, last.step + 1)), "no step twice, and none left out"


def _what_is_held_is_gone_on_from_unless_a_checkpoint_is_newer(folder: Path) -> None:
    worker = _worker(folder, steps=1_000_000)
    _ready(worker)
    manifest.open_generation(_checkpoints(folder), 1)
    _begin(worker, 1)
    _until(worker, lambda poll: poll.step >= 2)
    worker.ask(1, Wish.PAUSE)
    paused = _outcome(worker)
    (saved,) = _checkpoints(folder).glob("step-*")
    manifest.open_generation(_checkpoints(folder), 2)
    # Held state that is older than the checkpoint is of no use.
    _begin(worker, 2, carries=True, checkpoint=saved, floor_step=paused.step + 1)
    begun = _until(worker, lambda poll: poll.generation == 2 and poll.begun).begun
    assert begun is not None
    assert (begun.step, begun.source) == (paused.step, Source.CHECKPOINT)
    assert begun.seconds["load"] > 0
    worker.ask(2, Wish.RESIZE)
    stopped = _until(worker, lambda poll: poll.generation == 2 and poll.outcome).outcome
    assert stopped is not None
    # Without a checkpoint: from the seed, in the same process.
    shutil.rmtree(saved)
    _begin(worker, 3, carries=True, floor_step=stopped.step + 1)
    begun = _until(worker, lambda poll: poll.generation == 3 and poll.begun).begun
    assert begun is not None
    assert (begun.step, begun.source) == (0, Source.START)
    losses = [n["loss"] for n in _poll(worker).notices if n["type"] == "report"]
    _until(worker, lambda poll: poll.generation == 3 and poll.step >= 2)
    again = [n["loss"] for n in _poll(worker).notices if n.get("generation") == 3]
    assert again[:2] == losses[:2]


def _a_generation_that_never_forms_costs_nothing(folder: Path) -> None:
    """The others do not come; then the wait is broken off. What was held before is held still."""
    worker = _worker(folder, steps=1_000_000)
    _ready(worker)
    _begin(worker, 1)
    _until(worker, lambda poll: poll.step >= 3)
    worker.ask(1, Wish.RESIZE)
    stopped = _outcome(worker)
    for generation in (2, 3):
        _begin(worker, generation, world_size=2, carries=True)
        time.sleep(0.1)
        worker.abort(generation)
        failed = _until(worker, lambda p, g=generation: p.generation == g and p.outcome).outcome
        assert failed is not None
        assert failed.failure is not None
        assert failed.failure.fault is Fault.ABORTED
    _begin(worker, 4, carries=True)
    begun = _until(worker, lambda poll: poll.generation == 4 and poll.begun).begun
    assert begun is not None
    assert (begun.step, begun.source) == (stopped.step, Source.LIVE)


def _a_group_of_the_past_commits_nothing(folder: Path) -> None:
    worker = _worker(folder, steps=1_000_000)
    _ready(worker)
    manifest.open_generation(_checkpoints(folder), 1)
    _begin(worker, 1)
    _until(worker, lambda poll: poll.step >= 2)
    manifest.open_generation(_checkpoints(folder), 2)
    worker.ask(1, Wish.CHECKPOINT)
    failure = _outcome(worker).failure
    assert failure is not None
    assert failure.message.startswith("FencedError: ")
    assert failure.fault is Fault.ABORTED
    assert manifest.latest(_checkpoints(folder)) is None
    with pytest.raises(FencedError, match="generation 2 has begun"):
        manifest.open_generation(_checkpoints(folder), 1)


def _a_checkpoint_cut_off_by_a_resize_is_owed(folder: Path) -> None:
    """It is dropped with its generation, and the next one takes another at its first step boundary."""
    worker = _worker(folder, steps=1_000_000, checkpoints={"every_steps": 300})
    _ready(worker)
    told = threading.Event()
    worker._outbox.settle = lambda timeout_s: told.wait(60)  # type: ignore[method-assign]
    manifest.open_generation(_checkpoints(folder), 1)
    _begin(worker, 1)
    _until(worker, lambda poll: poll.step >= 300)
    worker.ask(1, Wish.RESIZE)
    stopped = _outcome(worker)
    assert stopped.reason is Wish.RESIZE
    assert 300 <= stopped.step < 600, "training went on while it was written, and did not wait for it"
    manifest.open_generation(_checkpoints(folder), 2)
    told.set()
    _begin(worker, 2, carries=True)
    notices: list[dict[str, Any]] = []

    def saved(poll: Poll) -> bool:
        notices[:] = [n for n in poll.notices if n["type"] != "report"]
        return any(n["type"] == "checkpoint" for n in notices)

    _until(worker, saved)
    worker.ask(2, Wish.RESIZE)
    _until(worker, lambda poll: poll.generation == 2 and poll.outcome)
    dropped, owed = notices[:2]
    assert (dropped["type"], dropped["dropped_step"], dropped["dropped_generation"]) == (
        "checkpoint_dropped",
        300,
        1,
    )
    assert (owed["type"], owed["reason"], owed["generation"]) == ("checkpoint", "owed", 2)
    assert owed["step"] == dropped["step"] > stopped.step
    assert [info.step for info in manifest.scan(_checkpoints(folder))] == [owed["step"]]


def _a_pause_has_its_checkpoint_although_another_is_written(folder: Path) -> None:
    worker = _worker(folder, steps=1_000_000, checkpoints={"every_steps": 100})
    _ready(worker)
    told = threading.Event()
    worker._outbox.settle = lambda timeout_s: told.wait(60)  # type: ignore[method-assign]
    manifest.open_generation(_checkpoints(folder), 1)
    _begin(worker, 1)
    _until(worker, lambda poll: poll.step >= 100)
    worker.ask(1, Wish.PAUSE)
    threading.Timer(0.5, told.set).start()
    paused = _outcome(worker)
    assert paused.reason is Wish.PAUSE
    assert [info.step for info in manifest.scan(_checkpoints(folder))] == [100, paused.step]


def _an_abort_reaches_a_rank_that_waits_for_a_save(folder: Path) -> None:
    worker = _worker(folder, steps=1_000_000, checkpoints={"every_steps": 5})
    _ready(worker)
    told = threading.Event()
    worker._outbox.settle = lambda timeout_s: told.wait(60)  # type: ignore[method-assign]
    manifest.open_generation(_checkpoints(folder), 1)
    _begin(worker, 1)
    _until(worker, lambda poll: poll.step == 10)  # where the next one is due, and waits
    time.sleep(0.2)
    began = time.monotonic()
    worker.abort(1)
    failure = _outcome(worker).failure
    assert failure is not None
    assert failure.fault is Fault.ABORTED
    assert time.monotonic() - began < 5
    told.set()
    manifest.open_generation(_checkpoints(folder), 2)
    _begin(worker, 2, carries=True)
    owed = _until(worker, lambda p: any(n["type"] == "checkpoint_dropped" for n in p.notices))
    (dropped,) = (n for n in owed.notices if n["type"] == "checkpoint_dropped")
    assert dropped["dropped_step"] == 5


def _a_poll_waits_for_news(folder: Path) -> None:
    worker = _worker(folder)
    _ready(worker)
    poll = worker.poll(0, news=-1, wait_s=60)
    began = time.monotonic()
    threading.Timer(0.2, _begin, [worker, 1]).start()
    while poll.outcome is None:
        poll = worker.poll(poll.upto, news=poll.news, wait_s=60)
    assert poll.begun is not None
    assert time.monotonic() - began < 50
    assert worker.poll(poll.upto, news=poll.news, wait_s=0.01).outcome == poll.outcome


def _an_abort_ends_a_rank_that_waits_for_the_others(folder: Path) -> None:
    worker = _worker(folder)
    _ready(worker)
    _begin(worker, 1, world_size=2)
    time.sleep(0.2)
    worker.abort(1)
    worker.abort(1)
    failure = _outcome(worker).failure
    assert failure is not None
    assert failure.fault is Fault.ABORTED
    with pytest.raises(StaleGenerationError):
        worker.abort(2)
    manifest.open_generation(_checkpoints(folder), 2)
    _begin(worker, 2)
    assert _until(worker, lambda poll: poll.generation == 2 and poll.outcome).outcome == Outcome(step=5)


def _a_users_error_is_data(folder: Path) -> None:
    failure = _worker(folder, data={"kind": "text", "paths": ["/no/such/text"]}).prepare().failure
    assert failure is not None
    assert failure.fault is Fault.USER
    assert failure.message.startswith("DataError: data path '/no/such/text'")
    assert _worker(folder, resources={"gpus": 1}).prepare().failure is not None
    worker = _worker(folder, model={"kind": "custom", "factory": "torch.nn:Linear", "arguments": {}})
    failure = worker.prepare().failure
    assert failure is not None
    assert failure.fault is Fault.USER
    assert "building it with arguments [] failed with TypeError" in failure.message
    assert "Traceback" in failure.traceback


def _a_live_process_keeps_nothing_of_earlier_generations(folder: Path) -> None:
    model = {"kind": "gpt", "layers": 4, "hidden": 256, "heads": 2, "vocabulary": 256}
    worker = _worker(folder, model=model, steps=1_000_000)
    _ready(worker)
    sizes = []
    for generation in range(1, 9):
        _begin(worker, generation, carries=generation > 1)
        _until(worker, lambda poll, g=generation: poll.generation == g and poll.begun)
        at = _poll(worker).step
        _until(worker, lambda poll, n=at: poll.step > n + 1)
        ctypes.CDLL(None).malloc_trim(0)
        sizes.append(psutil.Process().memory_full_info().uss)
        worker.ask(generation, Wish.RESIZE)
        _until(worker, lambda poll, g=generation: poll.generation == g and poll.outcome)
    # The model's states are 40 MB: six generations that were kept would add all of that each, where the
    # allocator's own ups and downs stay below.
    assert sizes[-1] - sizes[1] < 6 * 20e6, sizes


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
    assert _poll(worker).heartbeat is None


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
        _what_is_held_is_gone_on_from_unless_a_checkpoint_is_newer,
        _a_generation_that_never_forms_costs_nothing,
        _a_group_of_the_past_commits_nothing,
        _a_checkpoint_cut_off_by_a_resize_is_owed,
        _a_pause_has_its_checkpoint_although_another_is_written,
        _an_abort_reaches_a_rank_that_waits_for_a_save,
        _a_poll_waits_for_news,
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
