"""A rank killed anywhere in a step: its part comes back from its replica, one step is repeated at most."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.lives import Act, Diary, play
from tests.distributed.ranks import run_ranks
from tests.distributed.test_reshard import config, curve, first, model, script, train, undisturbed
from zero_core import ZeroEngine
from zero_core.replica import keepers

pytestmark = pytest.mark.distributed

__all__ = ["undisturbed"]  # a fixture


def without(members: int, *dead: int) -> tuple[int, ...]:
    return tuple(worker for worker in range(members) if worker not in dead)


def check(diaries: dict[int, Diary], expected: Any, *, most_repeated: int) -> None:
    losses, digest = expected
    assert curve(diaries) == losses
    for diary in diaries.values():
        assert diary.digest in (digest, ""), "but of processes that left before the end"
        assert all(count <= most_repeated for count in diary.repeated.values())
        assert diary.memory[0] == diary.memory[1]


KILLS = [
    ("forward", 2, "fp32", 3),
    ("reduce", 3, "bf16", 4),
    ("half", 2, "bf16", 3),
    ("half", 3, "fp32", 4),
    ("voted", 0, "fp32", 3),
    ("voted", 1, "bf16", 2),
    ("update", 3, "fp32", 3),
    ("update", 1, "fp32", 4),
    ("gather", 2, "bf16", 4),
    ("gather", 1, "fp32", 2),
    ("replica", 2, "fp32", 4),
    ("replica", 3, "fp16", 2),
]


@pytest.mark.parametrize(("where", "stage", "precision", "members"), KILLS)
def test_a_kill_anywhere_costs_a_step_at_most(
    where: str, stage: int, precision: str, members: int, undisturbed: Any
) -> None:
    acts = [Act(first(members), 99, kills={1: (5, where)}), Act(without(members, 1), 15)]
    diaries = play(members, script(*acts, stage=stage, precision=precision, replicas=1))
    assert set(diaries) == set(without(members, 1))
    check(diaries, undisturbed[precision], most_repeated=1)
    for diary in diaries.values():
        assert diary.taken[1].step in (4, 5)
        assert diary.taken[1].replica_ranks == ((1,) if stage else ())


@pytest.mark.parametrize(("stage", "every"), [(2, 1), (3, 4)])
def test_where_replicas_are_sent(stage: int, every: int, undisturbed: Any) -> None:
    """Over the group instead of through memory; every step, or every few, of which that many are repeated."""
    settings = {"replicas": 1, "replica_every_steps": every, "transport": "network"}
    acts = [Act(first(3), 99, kills={2: (7, "forward")}), Act((0, 1), 15)]
    diaries = play(3, script(*acts, stage=stage, precision="fp32", **settings))
    check(diaries, undisturbed["fp32"], most_repeated=every)
    for diary in diaries.values():
        # Step 6 was finished, but whether its copies had all come is known after the vote on step 7.
        assert diary.taken[1].step == (5 if every == 1 else 4)
        # Of step 15, the last one.
        assert ("replica" in diary.sent) == ("replica" in diary.seconds) == (every == 1)


FIRST_STEPS = [
    (2, 4, 3, "reduce"),  # one that has just joined
    (2, 4, 1, "forward"),  # one that held a part in the group before
    (4, 2, 1, "voted"),
    (4, 2, 0, "replica"),
    (3, 4, 2, "update"),
]


@pytest.mark.parametrize(("old", "new", "killed", "where"), FIRST_STEPS)
def test_the_first_step_of_a_group_is_protected(
    old: int, new: int, killed: int, where: str, undisturbed: Any
) -> None:
    """It has no replicas yet: what the group before held, replicas among it, is kept until it has."""
    acts = [
        Act(first(old), 3),
        Act(first(new), 99, kills={killed: (4, where)}),
        Act(without(max(old, new), killed), 15),
    ]
    diaries = play(max(old, new), script(*acts, stage=2, precision="bf16", replicas=1))
    check(diaries, undisturbed["bf16"], most_repeated=1)


@pytest.mark.parametrize("killed", [0, 3])
def test_so_is_the_second(killed: int, undisturbed: Any) -> None:
    """Its state is copied at the end of the first step, and complete before anybody votes on the second."""
    acts = [
        Act(first(2), 3),
        Act(first(4), 99, kills={killed: (5, "reduce")}),
        Act(without(4, killed), 15),
    ]
    diaries = play(4, script(*acts, stage=2, precision="fp32", replicas=1))
    check(diaries, undisturbed["fp32"], most_repeated=1)


def test_two_neighbours_lost_is_an_error_everywhere() -> None:
    acts = [Act(first(4), 99, kills={1: (3, "forward"), 2: (3, "forward")}), Act((0, 3), 5)]
    diaries = play(4, script(*acts, stage=2, precision="fp32", replicas=1))
    for worker in (0, 3):
        assert "no whole state of step 0 or later" in diaries[worker].errors[1]


def test_two_that_are_no_neighbours_may_be_lost(undisturbed: Any) -> None:
    acts = [Act(first(4), 99, kills={1: (3, "forward"), 3: (3, "forward")}), Act((0, 2), 15)]
    diaries = play(4, script(*acts, stage=3, precision="fp32", replicas=1))
    check(diaries, undisturbed["fp32"], most_repeated=1)
    assert diaries[0].taken[1].replica_ranks == (1, 3)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_kill_in_the_middle_of_a_handover(stage: int, undisturbed: Any) -> None:
    """A survivor is killed while it gives its part away; the next attempt has all from what is still held."""
    acts = [
        Act(first(4), 6),
        Act((0, 1, 2), 99, moving=(1,)),
        Act((0, 2, 3), 15),
    ]
    diaries = play(4, script(*acts, stage=stage, precision="bf16", replicas=1))
    check(diaries, undisturbed["bf16"], most_repeated=0)
    assert diaries[0].taken[2].replica_ranks == (1,)
    assert "PeerLostError" in diaries[0].errors[1]


def test_a_history_of_resizes_and_a_kill_changes_no_bit(undisturbed: Any) -> None:
    acts = [
        Act(first(2), 3),
        Act(first(4), 99, kills={2: (6, "update")}),
        Act((0, 1, 3), 8),
        Act((0,), 10),
        Act((0, 1, 3, 4, 5), 15),
    ]
    for stage, precision in ((2, "bf16"), (3, "fp32")):
        diaries = play(6, script(*acts, stage=stage, precision=precision, replicas=1))
        check(diaries, undisturbed[precision], most_repeated=1)


def memories(rank: int, world: int, cells: list[tuple[int, str, str]]) -> list[tuple[int, int, int]]:
    found = []
    for stage, precision, transport in cells:
        engine = ZeroEngine(model(), config(stage, precision, replicas=1, transport=transport))
        for step in range(2):
            train(engine, step)
            engine.step()
        memory, budget = engine.memory(), engine.budget
        assert engine.replicated_step == 1, "of step 2 nobody has heard yet that all have it"
        found.append((memory.replicas, budget.replicas, budget.optimizer_states))
        engine.detach()
    return found


def test_their_memory_is_what_was_predicted() -> None:
    cells = [(stage, precision, "auto") for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]
    cells += [(2, "fp32", "network"), (3, "bf16", "network")]
    for answers in run_ranks(3, memories, cells):
        for (stage, precision, transport), (measured, predicted, states) in zip(cells, answers, strict=True):
            assert measured == predicted > 0
            masters = 1.5 if precision == "fp32" else 1.0
            slots = 2 if transport == "auto" else 4
            if stage:
                assert measured > slots * masters * states


@given(st.lists(st.integers(0, 4), min_size=2, max_size=12))
def test_no_host_takes_an_owner_and_its_replica_along(hosts: list[int]) -> None:
    names = [f"host-{host}" for host in hosts]
    found = keepers(names)
    assert len(found) == len(hosts)
    several, most = len(set(names)) > 1, max(names.count(name) for name in names)
    for rank, keeper in enumerate(found):
        assert keeper != rank
        assert not several or names[keeper] != names[rank]
    kept = [found.count(rank) for rank in range(len(hosts))]
    if not several or 2 * most <= len(hosts):
        assert kept == [1] * len(hosts)
    else:
        assert max(kept) <= -(-most // (len(hosts) - most))
