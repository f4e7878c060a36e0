"""What a controller knows of the newest checkpoint."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from workers.latest import Latest


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What the folder holds, newest last."""
    found: list[SimpleNamespace] = []
    monkeypatch.setattr("workers.latest.manifest.latest", lambda root: found[-1] if found else None)
    return found


def test_a_damaged_one_does_not_make_states_of_older_steps_too_old(listed: list[SimpleNamespace]) -> None:
    """Else every resize would go back to the older checkpoint, until the damaged one's step is passed."""
    listed.append(SimpleNamespace(step=100, location="/r/100"))
    latest = Latest(Path("/r"))
    assert (latest.location, latest.floor_step) == ("/r/100", 100)
    latest.began(50)
    latest.look()
    assert (latest.location, latest.floor_step) == ("/r/100", 50)
    latest.saved(60, "/r/60")
    assert latest.floor_step == 60


def test_a_commit_that_was_not_told_counts(listed: list[SimpleNamespace]) -> None:
    latest = Latest(Path("/r"))
    assert (latest.location, latest.floor_step) == (None, 0)
    latest.began(0)
    listed.append(SimpleNamespace(step=5, location="/r/5"))
    latest.look()
    assert (latest.location, latest.floor_step) == ("/r/5", 5)
    listed.clear()
    latest.look()
    assert (latest.location, latest.floor_step) == (None, 0)


def test_a_generation_that_begins_later_changes_nothing(listed: list[SimpleNamespace]) -> None:
    latest = Latest(Path("/r"))
    latest.saved(5, "/r/5")
    latest.began(8)
    assert latest.floor_step == 5
    latest.saved(3, "/r/3")
    assert (latest.location, latest.floor_step) == ("/r/5", 5)


def test_a_place_that_cannot_be_read_for_now_changes_nothing(
    listed: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed.append(SimpleNamespace(step=5, location="/r/5"))
    latest = Latest(Path("/r"))

    def out(root: Path) -> None:
        raise OSError(5, "the store is out")

    monkeypatch.setattr("workers.latest.manifest.latest", out)
    latest.look()
    assert (latest.location, latest.floor_step) == ("/r/5", 5)
    with pytest.raises(OSError, match="the store is out"):
        Latest(Path("/r"))  # nothing is known: to begin at step 0 would be wrong
