"""The pure decisions, as tables."""

import pytest

from workers import policies
from workers.policies import (
    Bounds,
    Broken,
    Drop,
    Finished,
    Joiners,
    Lost,
    Member,
    Proceed,
    Refuse,
    Seek,
    Stopped,
    Wait,
)
from workers.protocol import Failure, Fault, Outcome, Wish

BOUNDS = Bounds(least=2, most=8)


@pytest.mark.parametrize(
    ("wanted", "survivors", "joiners", "hold_off_s", "waited_s", "expected"),
    [
        # At the start: places are asked for, then waited for, then processes.
        (4, 0, Joiners(), 0, 0, Seek(4)),
        (4, 0, Joiners(placing=4), 0, 1, Wait()),
        (4, 0, Joiners(warming=3, ready=1), 0, 1, Wait()),
        (4, 0, Joiners(ready=4), 0, 1, Proceed(4)),
        # Fewer places than wanted: those that are placed are waited for even beyond the time.
        (4, 0, Joiners(placing=1, ready=3), 0, 29, Wait()),
        (4, 0, Joiners(placing=1, warming=1, ready=2), 0, 31, Wait()),
        # A loss: survivors that are enough wait for nobody.
        (4, 3, Joiners(), 0, 0, Proceed(3, "3 of 4 workers are there")),
        (4, 2, Joiners(warming=2), 0, 0, Proceed(2, "2 of 4 workers are there")),
        (4, 3, Joiners(ready=1), 0, 0, Proceed(4)),
        # Too few are left: others are sought, but not too hastily, and taken as soon as they are enough.
        (4, 1, Joiners(), 0, 0, Seek(3)),
        (4, 1, Joiners(), 0.1, 0, Wait()),
        (4, 1, Joiners(placing=3), 0, 10, Wait()),
        (4, 1, Joiners(placing=2, ready=1), 0, 10, Proceed(2, "2 of 4 workers are there")),
        # A resize that was agreed on: a joiner that was lost meanwhile is not waited for.
        (4, 2, Joiners(ready=2), 0, 0, Proceed(4)),
        (4, 2, Joiners(ready=1), 0, 0, Proceed(3, "3 of 4 workers are there")),
        (2, 4, Joiners(), 0, 0, Proceed(2)),
        # More than are wanted by now: they are let go when the group trains.
        (2, 2, Joiners(placing=2), 0, 0, Proceed(2)),
    ],
)
def test_assemble(
    *,
    wanted: int,
    survivors: int,
    joiners: Joiners,
    hold_off_s: float,
    waited_s: float,
    expected: object,
) -> None:
    decision = policies.assemble(
        wanted=wanted,
        bounds=BOUNDS,
        survivors=survivors,
        joiners=joiners,
        hold_off_s=hold_off_s,
        waited_s=waited_s,
        patience_s=30,
    )
    assert decision == expected


def test_assemble_goes_on_with_fewer_but_not_with_too_few() -> None:
    def decide(ready: int) -> object:
        return policies.assemble(
            wanted=4,
            bounds=BOUNDS,
            survivors=0,
            joiners=Joiners(placing=4 - ready, ready=ready),
            hold_off_s=0,
            waited_s=31,
            patience_s=30,
        )

    enough = decide(2)
    assert isinstance(enough, Proceed)
    assert enough.workers == 2
    assert enough.reason == "the cluster had places for 2 of 4 workers within 30 s"
    too_few = decide(1)
    assert isinstance(too_few, Wait)
    assert too_few.reason
    assert "at least 2 are needed" in too_few.reason


@pytest.mark.parametrize(
    ("current", "wanted", "joiners", "fault", "waited_s", "expected"),
    [
        # The same number: nothing happens; joiners of a resize that was taken back leave.
        (2, 2, Joiners(), None, 0, None),
        (2, 2, Joiners(placing=1, ready=1), None, 0, Drop(2)),
        # Growing: capacity first, and the group is only stopped when every joiner is ready.
        (2, 4, Joiners(), None, 0, Seek(2)),
        (2, 4, Joiners(placing=1, warming=1), None, 29, Wait()),
        (2, 4, Joiners(warming=1, ready=1), None, 300, Wait()),
        (2, 4, Joiners(ready=2), None, 0, Proceed(4)),
        (2, 4, Joiners(ready=1, warming=1), "no such file", 0, Refuse("no such file")),
        # The newest wanted number counts.
        (2, 5, Joiners(ready=2), None, 0, Seek(1)),
        (2, 3, Joiners(placing=1, ready=1), None, 0, Drop(1)),
        # Shrinking needs nobody.
        (4, 2, Joiners(), None, 0, Proceed(2)),
        (4, 2, Joiners(ready=1), None, 0, Drop(1)),
    ],
)
def test_resize(
    *, current: int, wanted: int, joiners: Joiners, fault: str | None, waited_s: float, expected: object
) -> None:
    decision = policies.resize(
        current=current,
        wanted=wanted,
        joiners=joiners,
        joiner_fault=fault,
        waited_s=waited_s,
        patience_s=30,
    )
    assert decision == expected


def test_resize_without_room_is_refused_with_the_numbers() -> None:
    decision = policies.resize(
        current=2,
        wanted=5,
        joiners=Joiners(placing=2, ready=1),
        joiner_fault=None,
        waited_s=30,
        patience_s=30,
    )
    assert isinstance(decision, Refuse)
    assert "1 of 3 more workers within 30 s" in decision.reason


def _failure(fault: Fault) -> Failure:
    return Failure(fault=fault, message=f"{fault} trouble", traceback="")


def _members(*states: str) -> tuple[Member, ...]:
    outcomes = {
        "training": None,
        "finished": Outcome(step=9),
        "resize": Outcome(step=5, reason=Wish.RESIZE),
        "pause": Outcome(step=5, reason=Wish.PAUSE),
        "user": Outcome(step=5, failure=_failure(Fault.USER)),
        "collective": Outcome(step=5, failure=_failure(Fault.COLLECTIVE)),
        "aborted": Outcome(step=5, failure=_failure(Fault.ABORTED)),
    }
    return tuple(
        Member(rank=rank, worker=f"w{rank}", death="died", outcome=None)
        if state == "dead"
        else Member(rank=rank, worker=f"w{rank}", outcome=outcomes[state])
        for rank, state in enumerate(states)
    )


@pytest.mark.parametrize(
    ("states", "failing_s", "expected"),
    [
        (("training", "training"), 0, None),
        (("finished", "training"), 0, None),
        (("finished", "finished"), 0, Finished()),
        (("resize", "resize"), 0, Stopped(Wish.RESIZE, 5)),
        (("pause", "training"), 0, None),
        (("pause", "pause"), 0, Stopped(Wish.PAUSE, 5)),
        # A death explains everything around it.
        (("training", "dead"), 0, Lost((1,), "rank 1 (w1): died")),
        (("collective", "dead", "user", "dead"), 0, Lost((1, 3), "rank 1 (w1): died; rank 3 (w3): died")),
        # The job's own fault, whatever it did to the others.
        (("collective", "user"), 0, Broken(1, _failure(Fault.USER))),
        (("training", "user"), 0, Broken(1, _failure(Fault.USER))),
        # A broken collective alone is a symptom, for a while.
        (("collective", "training"), 4, None),
        (("collective", "collective"), 5, Lost((), "rank 0: collective trouble")),
        (("training", "aborted"), 6, Lost((), "rank 1: aborted trouble")),
    ],
)
def test_judge(states: tuple[str, ...], failing_s: float, expected: object) -> None:
    assert policies.judge(_members(*states), failing_s=failing_s, grace_s=5) == expected


def test_one_that_has_left_is_needed_no_more_and_before_that_it_is() -> None:
    training = Member(rank=0, worker="w0")
    left = Outcome(step=0, left=True)
    for gone in (None, "killed"):
        leaver = Member(rank=1, worker="w1", death=gone, outcome=left, leaves=True)
        assert policies.judge([training, leaver], failing_s=0, grace_s=5) is None
    leaver = Member(rank=1, worker="w1", death="killed", leaves=True)
    assert policies.judge([training, leaver], failing_s=0, grace_s=5) == Lost((1,), "rank 1 (w1): killed")


@pytest.mark.parametrize(
    ("current", "wanted", "joiners", "hold_off_s", "waited_s", "expected"),
    [
        (3, 3, Joiners(), 0, 0, None),
        (3, 3, Joiners(warming=1), 0, 0, Drop(1)),
        (2, 4, Joiners(), 0, 0, Seek(2)),
        # Not too hastily after losses in a row.
        (2, 4, Joiners(), 3, 0, Wait()),
        # Places are waited for however long it takes; nothing is refused.
        (2, 4, Joiners(placing=2), 0, 9999, Wait()),
        (2, 4, Joiners(ready=2), 0, 0, Proceed(4)),
        # Some of them, if the others have no place in sight; those that are placed are waited for.
        (2, 4, Joiners(placing=1, ready=1), 0, 29, Wait()),
        (2, 4, Joiners(placing=1, ready=1), 0, 30, Proceed(3)),
        (2, 4, Joiners(warming=1, ready=1), 0, 99, Wait()),
        (2, 3, Joiners(placing=1, ready=1), 0, 0, Drop(1)),
        # More than are wanted: nothing to be got back.
        (4, 3, Joiners(), 0, 0, None),
    ],
)
def test_grow_back(
    *,
    current: int,
    wanted: int,
    joiners: Joiners,
    hold_off_s: float,
    waited_s: float,
    expected: object,
) -> None:
    decision = policies.grow_back(
        current=current,
        wanted=wanted,
        joiners=joiners,
        hold_off_s=hold_off_s,
        waited_s=waited_s,
        patience_s=30,
    )
    assert decision == expected


def test_lost_workers_and_lost_nodes_are_tolerated_up_to_a_number_each() -> None:
    def spent(workers: int, nodes: int) -> policies.GivenUp | None:
        return policies.losses_spent(workers=workers, most_workers=3, nodes=nodes, most_nodes=1)

    assert spent(3, 1) is None
    too_many = spent(4, 0)
    assert too_many is not None
    assert "4 workers were lost, more than recovery.max_worker_losses 3" in too_many.reason
    too_many = spent(0, 2)
    assert too_many is not None
    assert "2 nodes were lost, more than recovery.max_node_losses 1" in too_many.reason


def test_nobody_is_sought_for_longer_and_longer_up_to_a_cap() -> None:
    waits = [policies.hold_off_s(losses, first_s=1, cap_s=10) for losses in (0, 1, 2, 3, 4, 5, 6, 5000)]
    assert waits == [0, 0, 1, 2, 4, 8, 10, 10]


def test_a_number_outside_of_the_bounds_is_named() -> None:
    assert policies.outside(BOUNDS, 2) is None
    assert policies.outside(BOUNDS, 8) is None
    for wanted in (1, 9):
        refusal = policies.outside(BOUNDS, wanted)
        assert refusal is not None
        assert "2 to 8" in refusal
