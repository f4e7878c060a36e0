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
    ("wanted", "survivors", "joiners", "waited_s", "expected"),
    [
        # At the start: places are asked for, then waited for, then processes.
        (4, 0, Joiners(), 0, Seek(4)),
        (4, 0, Joiners(placing=4), 1, Wait()),
        (4, 0, Joiners(warming=3, ready=1), 1, Wait()),
        (4, 0, Joiners(ready=4), 1, Proceed(4)),
        # Fewer places than wanted: those that are placed are waited for even beyond the time.
        (4, 0, Joiners(placing=1, ready=3), 29, Wait()),
        (4, 0, Joiners(placing=1, warming=1, ready=2), 31, Wait()),
        # A recovery: survivors count, replacements are sought.
        (4, 3, Joiners(), 0, Seek(1)),
        (4, 3, Joiners(placing=1), 10, Wait()),
        (4, 3, Joiners(ready=1), 0, Proceed(4)),
        # Fewer are wanted meanwhile.
        (3, 4, Joiners(), 0, Proceed(3)),
        (2, 2, Joiners(placing=2), 0, Drop(2)),
    ],
)
def test_assemble(wanted: int, survivors: int, joiners: Joiners, waited_s: float, expected: object) -> None:
    decision = policies.assemble(
        wanted=wanted, bounds=BOUNDS, survivors=survivors, joiners=joiners, waited_s=waited_s, patience_s=30
    )
    assert decision == expected


def test_assemble_goes_on_with_fewer_but_not_with_too_few() -> None:
    def decide(ready: int) -> object:
        return policies.assemble(
            wanted=4,
            bounds=BOUNDS,
            survivors=0,
            joiners=Joiners(placing=4 - ready, ready=ready),
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


def test_lost_workers_are_tolerated_up_to_a_number() -> None:
    assert policies.losses_spent(losses=3, most=3) is None
    given_up = policies.losses_spent(losses=4, most=3)
    assert given_up is not None
    assert "4 workers were lost" in given_up.reason


def test_a_number_outside_of_the_bounds_is_named() -> None:
    assert policies.outside(BOUNDS, 2) is None
    assert policies.outside(BOUNDS, 8) is None
    for wanted in (1, 9):
        refusal = policies.outside(BOUNDS, wanted)
        assert refusal is not None
        assert "2 to 8" in refusal
