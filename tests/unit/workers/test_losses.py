"""Budgets by cause, and losses in a row."""

from workers.losses import Losses
from workers.spec import Recovery

RECOVERY = Recovery(max_worker_losses=2, max_node_losses=1, backoff_s=1, backoff_cap_s=60)


def test_each_cause_has_its_budget_and_a_node_counts_once() -> None:
    losses = Losses(RECOVERY)
    for second in range(2):
        losses.lose(None, now=second)
    for _ in range(5):
        losses.lose("node-a", now=3)
    assert losses.spent() is None
    losses.lose("node-b", now=4)
    spent = losses.spent()
    assert spent is not None
    assert "2 nodes" in spent.reason


def test_what_was_lost_before_a_restart_counts() -> None:
    losses = Losses(RECOVERY, workers=2, nodes=frozenset({"node-a"}))
    losses.lose("node-a", now=0)
    assert losses.spent() is None
    losses.lose(None, now=0)
    assert losses.spent() is not None


def test_only_losses_in_a_row_hold_a_replacement_off() -> None:
    losses = Losses(RECOVERY)
    assert losses.hold_off_s(0) <= 0
    losses.lose(None, now=100)
    losses.lose(None, now=100.5)  # two at once are one incident
    assert losses.hold_off_s(100.5) <= 0
    losses.lose(None, now=110)
    assert losses.hold_off_s(110) == 1
    assert losses.hold_off_s(110.75) == 0.25
    losses.lose(None, now=120)
    assert losses.hold_off_s(120) == 2
    losses.lose(None, now=200)  # so long without one: the first again
    assert losses.hold_off_s(200) <= 0
