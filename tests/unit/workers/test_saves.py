"""What becomes of a process's checkpoints, with a writer that does as it is told."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from workers import saves
from workers.errors import UntoldError
from workers.saves import Order, Saves
from zero_core.checkpoint import Outcome, SavedCheckpoint, manifest
from zero_core.errors import CheckpointError, FencedError, PeerLostError

ENGINE: Any = object()


class Writer:
    """Stands in for the Saver: each save ends when the test says how, from another thread."""

    def __init__(self) -> None:
        self.on_done: Callable[[Outcome], None] = lambda _: None
        self.refusal: Exception | None = None
        self.begun: list[dict[str, Any]] = []

    def __call__(self, on_done: Callable[[Outcome], None]) -> "Writer":
        self.on_done = on_done
        return self

    def begin(self, engine: Any, root: Any, **said: Any) -> int:
        if self.refusal:
            raise self.refusal
        self.begun.append(said)
        return 0

    def end(self, step: int, error: CheckpointError | None = None) -> None:
        saved = None if error else SavedCheckpoint(f"/r/{step}", step, 9, 0.5)
        done = threading.Thread(target=self.on_done, args=(Outcome(step, 1, saved, error),))
        done.start()
        done.join(10)
        assert not done.is_alive()

    def close(self) -> None:
        pass


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    writer = Writer()
    monkeypatch.setattr(saves, "Saver", writer)
    monkeypatch.setattr(saves.manifest, "prune", lambda root, **_: [])
    return writer


def _order(step: int, *, generation: int = 1, **changes: Any) -> Order:
    fields: dict[str, Any] = {
        "root": Path("/r"),
        "fenced": True,
        "generation": generation,
        "rank": 0,
        "step": step,
        "reason": "interval",
        "extra": {},
        "seed": 7,
        "keep": 3,
        "keep_every": None,
        "behind": True,
        "must": False,
    }
    return Order(**fields | changes)


def _kinds(told: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(notice["type"], notice["step"]) for notice in told]


def test_a_commit_is_told_by_rank_0_alone(writer: Writer) -> None:
    for rank, expected in ((0, [("checkpoint", 5)]), (1, [])):
        told: list[dict[str, Any]] = []
        own = Saves(sink=told.append)
        own.save(ENGINE, _order(5, rank=rank))
        assert own.busy
        assert told == []
        writer.end(5)
        assert not own.busy
        assert _kinds(told) == expected
    assert told == []


def test_older_ones_go_after_the_commit_and_their_trouble_is_no_failure(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    pruned: list[tuple[int, int | None, str]] = []

    def prune(root: Path, *, keep: int, keep_every: int | None, sound: str) -> None:
        pruned.append((keep, keep_every, sound))
        raise OSError("read-only")

    monkeypatch.setattr(saves.manifest, "prune", prune)
    own = Saves(sink=told.append)
    own.save(ENGINE, _order(5, keep=2, keep_every=10))
    assert pruned == []
    writer.end(5)
    assert pruned == [(2, 10, manifest.folder_name(5, 1))]
    assert _kinds(told) == [("checkpoint", 5)]
    assert told[0]["not_removed"] == "older checkpoints stay: read-only"


def test_a_failure_behind_the_training_is_told_and_nothing_is_owed(writer: Writer) -> None:
    told: list[dict[str, Any]] = []
    own = Saves(sink=told.append)
    own.save(ENGINE, _order(5))
    writer.end(5, CheckpointError("no space"))
    assert _kinds(told) == [("checkpoint_failed", 5)]
    assert told[0]["error"] == "no space"
    own.check(1)
    assert own.owed(2) is None
    writer.refusal = CheckpointError("no space at all")
    own.save(ENGINE, _order(10))
    assert _kinds(told[1:]) == [("checkpoint_failed", 10)]
    with pytest.raises(CheckpointError, match="no space at all"):
        own.save(ENGINE, _order(15, must=True))
    assert not own.busy


def test_a_group_of_the_past_hears_of_it_and_its_save_is_owed_to_the_next(writer: Writer) -> None:
    told: list[dict[str, Any]] = []
    own = Saves(sink=told.append)
    own.save(ENGINE, _order(5))
    writer.end(5, FencedError("a newer generation has begun"))
    assert told == []
    with pytest.raises(FencedError):
        own.check(1)
    owed = own.owed(2)
    assert owed is not None
    assert owed.step == 5
    own.check(2)
    own.save(ENGINE, _order(8, generation=2, owed=True))
    assert _kinds(told) == [("checkpoint_dropped", 8)]
    assert (told[0]["dropped_step"], told[0]["dropped_generation"]) == (5, 1)
    assert own.owed(2) is None
    writer.end(8)
    assert _kinds(told[1:]) == [("checkpoint", 8)]
    own.check(2)


def test_the_next_periodic_save_makes_up_for_it_as_well(writer: Writer) -> None:
    told: list[dict[str, Any]] = []
    own = Saves(sink=told.append)
    own.save(ENGINE, _order(5))
    writer.end(5, FencedError("a newer generation has begun"))
    own.save(ENGINE, _order(10, generation=2))
    assert _kinds(told) == [("checkpoint_dropped", 10)]


def test_a_rank_0_that_was_not_there_tells_for_the_others(writer: Writer) -> None:
    told: list[dict[str, Any]] = []
    Saves(sink=told.append).save(ENGINE, _order(8, generation=2, owed=True))
    assert _kinds(told) == [("checkpoint_dropped", 8)]
    assert told[0]["dropped_step"] is None


def test_a_failure_in_an_aborted_group_is_no_failure_but_owed(writer: Writer) -> None:
    told: list[dict[str, Any]] = []
    own = Saves(sink=told.append, broken_off=lambda generation: generation == 1)
    own.save(ENGINE, _order(5))
    writer.end(5, CheckpointError("rank 1 does not write"))
    assert told == []
    assert own.owed(2) is not None


@pytest.mark.parametrize("behind", [True, False])
def test_a_save_whose_group_breaks_under_it_is_owed(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise PeerLostError("rank 1 is gone")

    writer.refusal = PeerLostError("rank 1 is gone")
    monkeypatch.setattr(saves.checkpoint, "save", breaks, raising=False)
    own = Saves(sink=lambda _: None)
    with pytest.raises(PeerLostError):
        own.save(ENGINE, _order(5, behind=behind))
    assert not own.busy
    assert own.owed(2) is not None


def test_reports_that_nobody_collects_stop_the_save_and_then_the_group(writer: Writer) -> None:
    told: list[dict[str, Any]] = []
    own = Saves(sink=told.append, settle=lambda: False)
    own.save(ENGINE, _order(5))
    with pytest.raises(UntoldError, match="rank 0 does not save step 5"):
        writer.begun[0]["first"]()
    writer.end(5, CheckpointError("rank 0: UntoldError"))
    with pytest.raises(UntoldError):
        own.check(1)
    with pytest.raises(UntoldError):
        own.save(ENGINE, _order(10))


def test_a_save_that_is_due_waits_for_the_one_before(writer: Writer) -> None:
    told: list[dict[str, Any]] = []
    own = Saves(sink=told.append)
    own.save(ENGINE, _order(5))
    next_one = threading.Thread(target=own.save, args=(ENGINE, _order(10)))
    next_one.start()
    next_one.join(0.3)
    assert next_one.is_alive()
    assert len(writer.begun) == 1
    writer.end(5)
    next_one.join(10)
    assert not next_one.is_alive()
    assert len(writer.begun) == 2
    writer.end(10)
    assert [notice["stall_s"] > 0.2 for notice in told] == [False, True]
