"""Where a rank is, as another thread sees it."""

from zero_core.ledger import Ledger


def test_the_innermost_phase_shows_and_the_last_collective_stays() -> None:
    ledger = Ledger()
    now = ledger.whereabouts
    assert (now.phase, now.collective, now.moves) == ("", "", 0)
    with ledger.within("forward"):
        assert now.phase == "forward"
        began, moves = now.moved_at, now.moves
        with ledger.timed("gather", 3):
            assert (now.phase, now.collective, now.unit) == ("gather", "gather", 3)
            assert now.moves > moves
        with ledger.timed("gather"):  # the end of the same one
            assert (now.collective, now.unit) == ("gather", 3)
        assert now.phase == "forward"
        assert now.moved_at >= began
    with ledger.timed("control"):
        assert (now.phase, now.collective, now.unit) == ("control", "control", -1)
    assert (now.phase, now.collective) == ("", "control")


def test_a_phase_that_fails_is_left_and_its_time_counts() -> None:
    ledger = Ledger()
    try:
        with ledger.timed("reduce", 0):
            raise ValueError
    except ValueError:
        pass
    assert ledger.whereabouts.phase == ""
    assert set(ledger.take()[2]) == {"reduce"}
    with ledger.within("data"):
        pass
    assert ledger.take()[2] == {}, "being in a phase alone takes none of the step's time"
