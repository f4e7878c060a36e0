"""What passes between threads: a worker's notices outwards, the owner's orders inwards."""

import threading
import time

import pytest
from pydantic import ValidationError

from workers.commands import Cancel, Pause, Resize, SaveCheckpoint, parse_command
from workers.orders import Orders
from workers.outbox import PAGE, Outbox


def _put(outbox: Outbox, *numbers: int) -> None:
    for number in numbers:
        outbox.put({"n": number})


def test_notices_stay_until_the_reader_asks_for_what_comes_after() -> None:
    outbox = Outbox()
    assert outbox.take(0) == ((), 0, True)
    _put(outbox, 1, 2, 3)
    assert outbox.take(0) == outbox.take(0) == (({"n": 1}, {"n": 2}, {"n": 3}), 3, True)
    assert outbox.take(2) == (({"n": 3},), 3, True)
    assert outbox.take(3) == ((), 3, True)
    _put(outbox, 4)
    assert outbox.take(3) == (({"n": 4},), 4, True)


def test_a_long_backlog_comes_in_pages_that_miss_nothing() -> None:
    outbox = Outbox()
    _put(outbox, *range(1, 2 * PAGE + 6))
    seen: list[int] = []
    complete = False
    while not complete:
        notices, upto, complete = outbox.take(len(seen))
        seen += [notice["n"] for notice in notices]
        assert upto == len(seen)
    assert seen == list(range(1, 2 * PAGE + 6))


@pytest.mark.parametrize("release", ["take", "close"])
def test_a_full_box_holds_the_writer_up_until_it_is_emptied_or_closed(release: str) -> None:
    outbox = Outbox(capacity=2)
    writer = threading.Thread(target=_put, args=(outbox, 1, 2, 3))
    writer.start()
    writer.join(0.1)
    assert writer.is_alive()
    assert outbox.take(0)[1] == 2
    if release == "take":
        outbox.take(2)
    else:
        outbox.close()
    writer.join(5)
    assert not writer.is_alive()
    assert outbox.take(2) == (({"n": 3},), 3, True)


def test_the_newest_wanted_number_counts() -> None:
    orders = Orders(2)
    first, second = Resize(workers=4, who="a"), Resize(workers=3, who="b")
    orders.give(first)
    orders.give(second)
    assert (orders.wanted, orders.resize) == (3, second)
    orders.resized(first)
    assert (orders.wanted, orders.resize) == (3, second), "an older order's end changes nothing"
    orders.resized(second)
    assert (orders.wanted, orders.resize) == (3, None)


def test_what_cannot_be_had_leaves_what_was_wanted_before() -> None:
    orders = Orders(4)
    first, second, third = (Resize(workers=n, who="a") for n in (8, 9, 3))
    orders.give(first)
    orders.give(second)
    assert orders.refused(first) == 9, "there is a newer one"
    assert orders.refused(second) == 4
    assert (orders.wanted, orders.resize) == (4, None)
    orders.give(third)
    orders.resized(third)
    orders.give(first)
    assert orders.refused(first) == 3


def test_orders_wake_whoever_waits_for_them() -> None:
    orders = Orders(2)
    threading.Timer(0.05, orders.give, [Cancel(who="me")]).start()
    began = time.monotonic()
    orders.wait(60)
    assert time.monotonic() - began < 60
    assert (orders.cancel, orders.pause) == ("me", None)
    orders.give(Pause(who="you"))
    orders.give(SaveCheckpoint(who="you"))
    assert orders.pause == "you"
    assert (orders.take_checkpoint(), orders.take_checkpoint()) == (True, False)


def test_an_outbox_is_settled_once_everything_was_taken_in() -> None:
    box = Outbox()
    assert box.settle(0)
    box.put({"n": 1})
    assert not box.settle(0.01)
    box.take(0)
    assert not box.settle(0.01), "the answer may have been lost"
    threading.Timer(0.05, box.take, [1]).start()
    assert box.settle(60)
    box.put({"n": 2})
    box.close()
    assert box.settle(0), "a group that is being aborted does not wait"


def test_what_is_put_while_an_outbox_settles_is_not_waited_for() -> None:
    """Training goes on meanwhile, so that there is always something new."""
    box = Outbox()
    box.put({"n": 1})

    def take_in_and_add() -> None:
        box.put({"n": 2})
        assert box.take(1)[1] == 2
        box.put({"n": 3})

    threading.Timer(0.05, take_in_and_add).start()
    assert box.settle(60)


@pytest.mark.parametrize(
    "command",
    [
        {"kind": "resize", "workers": 0, "who": "me"},
        {"kind": "resize", "who": "me"},
        {"kind": "cancel"},
        {"kind": "destroy", "who": "me"},
        {"kind": "pause", "who": "me", "workers": 3},
    ],
)
def test_malformed_commands_are_refused(command: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        parse_command.validate_python(command)
