"""Time in steps that count."""

import pytest

from workers.goodput import Goodput, goodput


def test_a_repeated_step_counts_once() -> None:
    counted = Goodput()
    for step in range(1, 6):
        counted.told(step, 1.0)
    assert counted.productive_s == 5
    counted.resume(3)
    assert (counted.step, counted.productive_s) == (3, 3)
    counted.told(4, 2.0)
    assert counted.productive_s == 5
    # Told again without a word about a resume.
    counted.told(2, 0.5)
    assert (counted.step, counted.productive_s) == (2, 1.5)


def test_what_counts_up_to_a_step_that_was_saved_while_training_went_on() -> None:
    counted = Goodput(step=10, productive_s=4.0)
    for step in range(11, 16):
        counted.told(step, 1.0)
    assert [counted.at(step) for step in (9, 10, 12, 15, 20)] == [4.0, 4.0, 6.0, 9.0, 9.0]


def test_an_attempt_that_goes_on_from_a_checkpoint_counts_its_own_steps() -> None:
    counted = Goodput()
    counted.resume(100)
    counted.told(101, 2.0)
    assert counted.productive_s == 2
    counted.resume(100)
    assert counted.productive_s == 0


def test_a_restarted_controller_goes_on_with_what_was_counted_up_to_the_checkpoint() -> None:
    counted = Goodput(step=50, productive_s=25.0)
    counted.resume(50)
    counted.told(51, 1.0)
    assert counted.productive_s == 26


def test_goodput_is_a_share_of_the_wall_time() -> None:
    assert goodput(0.0, 0.0) is None
    assert goodput(3.0, 4.0) == pytest.approx(0.75)
    assert goodput(4.001, 4.0) == 1.0
