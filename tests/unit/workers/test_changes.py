"""What the event of a change says."""

import pytest

from workers.changes import Change
from workers.protocol import Begun, Source


def _begun(time: float, **seconds: float) -> Begun:
    return Begun(
        step=41,
        time=time,
        seconds=seconds,
        source=Source.REPLICA,
        bytes_moved=100,
        bytes_needed=90,
        replica_ranks=(2,),
    )


def test_the_pause_is_from_the_last_step_to_the_moment_the_last_rank_goes_on() -> None:
    change = Change(
        event="resize",
        details={"who": "me"},
        old_workers=3,
        asked_at=99.0,
        trained_until=100.0,
        last_step=42,
        met_at=100.25,
    )
    data = change.data([_begun(100.75, form=0.1, start=0.2, move=0.1), _begun(100.5, form=0.125, start=0.05)])
    assert data["pause_s"] == 0.75
    assert data["seconds"] == {
        "wait": 1.0,
        "stop": 0.25,
        "form": 0.125,
        "start": 0.2,
        "move": 0.1,
        "load": 0.0,
    }
    assert (data["old_workers"], data["new_workers"], data["who"]) == (3, 2, "me")
    assert (data["at_step"], data["steps_repeated"], data["steps_lost"]) == (41, 1, 1)
    assert (data["source"], data["bytes_moved"], data["bytes_needed"]) == ("replica", 100, 90)
    assert data["replica_ranks"] == [2]


def test_all_that_had_part_in_a_loss_is_named_once() -> None:
    change = Change(event="recovery", details={"cause": "rank 1 (w1): killed"})
    change.add_cause("rank 1 (w1): killed")
    change.add_cause("rank 2 (w2): killed")
    assert change.details["cause"] == "rank 1 (w1): killed; rank 2 (w2): killed"


def test_clocks_that_disagree_make_no_negative_times() -> None:
    change = Change(asked_at=101.0, trained_until=100.0, last_step=3, met_at=99.0)
    data = change.data([_begun(99.5)])
    assert data["pause_s"] == data["seconds"]["stop"] == data["seconds"]["wait"] == 0.0
    assert data["steps_repeated"] == pytest.approx(0)
