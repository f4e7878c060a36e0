"""Who is stuck, who is slow: values in, findings out, over an imagined clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from workers.progress import SLOW, STUCK, Finding, Pulse, Vigil
from workers.protocol import Activity, Heartbeat, Outcome, Poll

LIMIT_S = 60.0
TICK_S = 0.5


@dataclass
class Rank:
    """A rank of the imagined group: where it is since when, and whether its process answers."""

    phase: str | None = "forward"
    collective: str = "reduce of layers.0"
    since: float = 0.0
    moves: int = 1
    answers: bool = True
    done: bool = False
    poll: Poll | None = None

    def come_to(self, phase: str, now: float) -> None:
        self.phase, self.since, self.moves = phase, now, self.moves + 1

    def answer(self, now: float, generation: int) -> None:
        beat = None
        if self.phase is not None:
            beat = Heartbeat(
                step=7,
                phase=self.phase,
                collective=self.collective,
                moves=self.moves,
                still_s=now - self.since,
            )
        self.poll = Poll(
            generation=generation,
            activity=Activity.TRAINING,
            step=7,
            notices=(),
            upto=0,
            news=0,
            begun=None,
            outcome=Outcome(step=7) if self.done else None,
            heartbeat=beat,
        )


@dataclass
class World:
    """A group and who watches it."""

    ranks: list[Rank]
    vigil: Vigil = field(default_factory=lambda: Vigil(stuck_after_s=LIMIT_S, slow_share=0.3, slow_steps=3))
    now: float = 0.0
    generation: int = 1

    def run(self, seconds: float) -> list[Finding]:
        """Let so much time pass, with a look at every tick."""
        found = []
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S
            found += self.look()
        return found

    def look(self, reports: Sequence[Mapping[str, Any]] = ()) -> list[Finding]:
        for rank in self.ranks:
            if rank.answers:
                rank.answer(self.now, self.generation)
        pulses = [
            Pulse(
                rank=number,
                worker=f"w{number}",
                node=f"n{number}",
                generation=self.generation,
                poll=rank.poll,
            )
            for number, rank in enumerate(self.ranks)
        ]
        return self.vigil.look(now=self.now, pulses=pulses, reports=reports)


def dead(found: Sequence[Finding]) -> list[str]:
    return [finding.dead for finding in found if finding.dead]


def test_a_rank_that_does_not_move_while_the_others_wait_is_warned_of_then_dead() -> None:
    world = World([Rank("forward"), Rank("reduce"), Rank("control")])
    early = world.run(LIMIT_S / 3 - 2)
    assert early == []
    (warning,) = world.run(4)
    assert (warning.kind, warning.data["rank"], warning.data["dead"]) == (STUCK, 0, False)
    assert warning.data["waiting"] == {"1": "reduce of layers.0", "2": "reduce of layers.0"}
    (end,) = world.run(LIMIT_S)
    assert end.dead == "w0"
    told = {key: end.data[key] for key in ("rank", "worker", "node", "step", "phase", "collective", "dead")}
    assert told == {
        "rank": 0,
        "worker": "w0",
        "node": "n0",
        "step": 7,
        "phase": "forward",
        "collective": "reduce of layers.0",
        "dead": True,
    }
    assert end.data["seconds"] >= LIMIT_S
    assert "has not moved for 60 s in forward" in end.cause
    assert "ranks 1, 2 wait for it" in end.cause
    assert world.run(LIMIT_S) == [], "told once"


def test_a_long_forward_on_every_rank_is_no_hang() -> None:
    assert World([Rank("forward"), Rank("backward"), Rank("data")]).run(LIMIT_S * 3) == []


def test_the_limit_runs_from_when_the_last_of_the_others_began_to_wait() -> None:
    world = World([Rank("forward"), Rank("reduce"), Rank("forward")])
    world.run(LIMIT_S - 1)
    world.ranks[2].come_to("reduce", world.now)
    found = world.run(LIMIT_S - 2)
    assert dead(found) == []
    world.ranks[0].come_to("reduce", world.now)
    assert dead(world.run(LIMIT_S * 2)) == []


def test_a_warning_is_repeated_only_after_the_rank_has_moved() -> None:
    world = World([Rank("forward"), Rank("reduce")])
    assert len(world.run(LIMIT_S / 2)) == 1
    for rank in world.ranks:
        rank.come_to("control", world.now)
    world.run(1)
    world.ranks[1].come_to("optimizer", world.now)
    (again,) = world.run(LIMIT_S / 2)
    assert again.data["rank"] == 1


def test_a_rank_whose_process_does_not_answer_is_named_also_within_a_collective() -> None:
    world = World([Rank("reduce"), Rank("reduce"), Rank("control")])
    world.look()
    world.ranks[1].answers = False
    found = world.run(LIMIT_S * 1.5)
    assert dead(found) == ["w1"]
    assert "its process does not answer" in found[-1].cause
    alone = World([Rank("forward")])
    alone.look()
    assert alone.run(LIMIT_S * 2) == []
    alone.ranks[0].answers = False
    assert dead(alone.run(LIMIT_S * 1.5)) == ["w0"]


def test_where_all_wait_nobody_is_named_but_it_is_told_once() -> None:
    world = World([Rank("reduce"), Rank("control", "control"), Rank("gather", "gather of head")])
    (told,) = world.run(LIMIT_S * 3)
    assert (told.kind, told.data["rank"], told.dead) == (STUCK, None, None)
    assert told.data["waiting"] == {"0": "reduce of layers.0", "1": "control", "2": "gather of head"}
    assert "all ranks wait" in told.data["said"]
    for rank in world.ranks:
        rank.come_to("control", world.now)
    assert len(world.run(LIMIT_S)) == 1, "another spell is told again"


def test_where_nobody_answers_nobody_is_named() -> None:
    """Then it is the controller that is cut off."""
    world = World([Rank("reduce"), Rank("forward")])
    world.look()
    for rank in world.ranks:
        rank.answers = False
    assert dead(world.run(LIMIT_S * 3)) == []


def test_a_look_that_comes_late_is_no_silence() -> None:
    world = World([Rank("reduce"), Rank("reduce")])
    world.look()
    world.ranks[0].answers = False
    world.now += 1000
    assert dead(world.look()) == []


def test_those_that_are_done_wait_for_the_last() -> None:
    world = World([Rank("forward"), Rank("forward", done=True)])
    assert dead(world.run(LIMIT_S * 1.5)) == ["w0"]
    assert World([Rank(done=True), Rank(done=True)]).run(LIMIT_S * 2) == []


def test_while_engines_are_built_only_silence_counts() -> None:
    world = World([Rank(None), Rank(None), Rank("control")])
    assert world.run(LIMIT_S * 2) == []
    world.ranks[0].answers = False
    assert dead(world.run(LIMIT_S * 1.5)) == ["w0"]


def test_a_long_checkpoint_is_named_late_and_not_ended() -> None:
    world = World([Rank("checkpoint"), Rank("control")])
    assert world.run(LIMIT_S - 2) == []
    (told,) = world.run(LIMIT_S * 2)
    assert (told.data["rank"], told.data["phase"], told.dead) == (0, "checkpoint", None)
    world.ranks[0].answers = False
    assert dead(world.run(LIMIT_S * 1.5)) == ["w0"]


def test_without_a_limit_there_are_warnings_only() -> None:
    vigil = Vigil(stuck_after_s=None, slow_share=None, slow_steps=3)
    found = World([Rank("forward"), Rank("reduce")], vigil).run(1000)
    assert [finding.dead for finding in found] == [None]


def test_a_new_generation_starts_afresh() -> None:
    world = World([Rank("forward"), Rank("reduce")])
    assert len(world.run(LIMIT_S - 2)) == 1
    world.generation = 2
    for rank in world.ranks:
        rank.phase = None
    assert dead(world.run(LIMIT_S / 2)) == []


ranks = st.builds(
    Rank,
    phase=st.sampled_from(
        [None, "forward", "backward", "data", "checkpoint", "reduce", "control", "training"]
    ),
    answers=st.booleans(),
    done=st.booleans(),
)


@given(st.lists(ranks, min_size=1, max_size=5))
def test_whoever_is_ended_held_up_somebody(group: list[Rank]) -> None:
    """The dead are never all of several, and never one that answers and waits."""
    world = World(group)
    for number, rank in enumerate(group):
        rank.answer(0.0, 1)
        assert rank.poll is not None
        group[number].since = 0.0
    found = world.run(LIMIT_S * 2)
    ended = {int(name[1:]) for name in dead(found)}
    for number in ended:
        rank = group[number]
        assert not rank.answers or (
            not rank.done and rank.phase not in ("reduce", "control", None, "checkpoint")
        )
    if len(group) > 1:
        assert len(ended) < len(group)
    if all(rank.answers and rank.phase in ("reduce", "control") for rank in group):
        assert not ended


@given(st.lists(st.sampled_from(["forward", "backward", "reduce", "control", None]), min_size=2, max_size=5))
def test_nobody_is_named_while_one_moves(phases: list[str | None]) -> None:
    world = World([Rank(phase) for phase in phases])
    found = []
    for _ in range(100):
        world.ranks[0].come_to("forward", world.now)
        found += world.run(2)
    assert found == []


# Slow ranks


def reports(
    step: int,
    own: Sequence[float],
    *,
    tokens: Sequence[int] | None = None,
    generation: int = 1,
    wait: float = 0.1,
) -> list[dict[str, Any]]:
    """Of one step: each rank's seconds of its own; all wait for the last."""
    whole = max(own) + wait
    return [
        {
            "type": "report",
            "generation": generation,
            "rank": rank,
            "world_size": len(own),
            "worker": f"w{rank}",
            "step": step,
            "step_s": whole,
            "tokens": tokens[rank] if tokens else 64,
            "seconds": {
                "forward": seconds,
                "reduce": (whole - seconds) / 2,
                "control": (whole - seconds) / 2,
            },
        }
        for rank, seconds in enumerate(own)
    ]


def test_a_slow_rank_is_named_once_with_its_share_and_its_end_is_told() -> None:
    world = World([Rank(), Rank(), Rank()])
    found = [finding for step in range(1, 20) for finding in world.look(reports(step, [1.0, 2.0, 1.1]))]
    (named,) = found
    assert (named.kind, named.data["rank"], named.data["worker"], named.data["node"]) == (SLOW, 1, "w1", "n1")
    assert (named.data["step"], named.data["over"], named.dead) == (3, False, None)
    assert abs(named.data["share"] - (2.0 - 1.05) / 2.1) < 1e-9
    assert abs(named.data["seconds"] - 0.95) < 1e-9
    found = [finding for step in range(20, 40) for finding in world.look(reports(step, [1.0, 1.05, 1.1]))]
    (over,) = found
    assert (over.data["rank"], over.data["step"], over.data["over"]) == (1, 22, True)


def test_a_step_now_and_then_is_no_slow_rank() -> None:
    world = World([Rank(), Rank()])
    for step in range(1, 60):
        assert world.look(reports(step, [1.0, 9.0 if step % 3 == 0 else 1.0])) == []


def test_unequal_numbers_of_micro_batches_are_no_slow_rank() -> None:
    """Three micro-batches on two ranks: the one with two takes twice as long, as it should."""
    world = World([Rank(), Rank()])
    for step in range(1, 20):
        assert world.look(reports(step, [2.0, 1.0], tokens=[128, 64])) == []
        assert world.look(reports(step, [2.0, 1.6], tokens=[128, 64], generation=2)) == []


def test_reports_may_come_in_any_order_and_some_never() -> None:
    world = World([Rank(), Rank()])
    found: list[Finding] = []
    for step in range(1, 10):
        first, second = reports(step, [1.0, 3.0])
        found += world.look([second])
        if step != 4:  # its reporter was killed
            found += world.look([first, {"type": "checkpoint", "step": step}])
    assert [finding.data["rank"] for finding in found] == [1]


@given(
    st.lists(st.floats(0.01, 10), min_size=2, max_size=5),
    st.integers(0, 4),
)
def test_a_share_is_a_share_and_equal_ranks_are_not_slow(own: list[float], step: int) -> None:
    world = World([Rank() for _ in own])
    found = [f for s in range(1, 8) for f in world.look(reports(s, own))]
    for finding in found:
        assert 0.3 <= finding.data["share"] <= 1.0
        assert own[finding.data["rank"]] > min(own)
    assert World([Rank() for _ in own]).look(reports(1, [own[0]] * len(own))) == []
