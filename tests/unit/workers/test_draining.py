"""Moving off drained nodes: what is decided, and what the mover does about it."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from workers.draining import Departure, Leaving, Nodes, Relocation, Stay, leaving, move_off
from workers.mover import Mover
from workers.policies import Drop, Joiners, Proceed, Seek, Wait

USUAL: dict[str, Any] = {
    "staying": 2,
    "target": 4,
    "least": 1,
    "joiners": Joiners(),
    "joiner_fault": None,
    "waited_s": 0.0,
    "patience_s": 30.0,
    "left_s": None,
}


def decide(**changes: Any) -> object:
    return move_off(**USUAL | changes)


def test_who_is_on_drained_nodes() -> None:
    places = [("w0", "a"), ("w1", "b"), ("w2", "b"), ("w3", None)]
    assert leaving(places, {"b": 9.0, "c": None}) == [
        Leaving(node="b", deadline=9.0, workers=("w1", "w2"), ranks=(1, 2))
    ]


def test_replacements_are_sought_first_and_the_group_is_stopped_when_they_are_ready() -> None:
    assert decide() == Seek(2)
    assert decide(joiners=Joiners(placing=2)) == Wait()
    assert decide(joiners=Joiners(warming=1, ready=1), waited_s=99) == Wait()
    assert decide(joiners=Joiners(ready=2)) == Proceed(4)
    assert decide(joiners=Joiners(ready=3)) == Drop(1)
    assert decide(target=2) == Proceed(2), "a smaller group is wanted: nobody need be sought"


def test_without_room_the_group_shrinks_off_the_node() -> None:
    decision = decide(joiners=Joiners(placing=1, ready=1), waited_s=30)
    assert decision == Proceed(3, "the other nodes had room for 1 of 2 replacements")
    assert decide(joiners=Joiners(placing=2), waited_s=29) == Wait()


def test_without_room_for_its_minimum_it_stays_and_says_so() -> None:
    decision = decide(least=4, joiners=Joiners(placing=1, ready=1), waited_s=30)
    assert isinstance(decision, Stay)
    assert "3 workers are fewer than the job's minimum of 4" in decision.reason
    assert isinstance(decide(staying=0, target=2, joiners=Joiners(placing=2), waited_s=30), Stay)
    # Room may still appear.
    assert decide(least=4, joiners=Joiners(ready=2), waited_s=900) == Proceed(4)


def test_half_of_the_time_that_is_left_is_the_longest_wait() -> None:
    assert decide(joiners=Joiners(placing=2), waited_s=5, left_s=11) == Wait()
    assert isinstance(decide(joiners=Joiners(placing=2), waited_s=5, left_s=9), Proceed)
    assert isinstance(decide(joiners=Joiners(placing=2), waited_s=0.1, left_s=-3), Proceed)


def test_a_replacement_that_cannot_work_is_no_room() -> None:
    assert decide(joiners=Joiners(warming=2), joiner_fault="it sees other data") == Proceed(
        2, "it sees other data"
    )


@given(
    st.integers(0, 6),
    st.integers(1, 6),
    st.integers(1, 6),
    st.builds(Joiners, placing=st.integers(0, 4), warming=st.integers(0, 4), ready=st.integers(0, 4)),
    st.floats(0, 100),
    st.none() | st.floats(-10, 100),
)
def test_nobody_goes_on_with_fewer_than_the_minimum_or_more_than_there_are(
    staying: int, target: int, least: int, joiners: Joiners, waited_s: float, left_s: float | None
) -> None:
    decision = move_off(
        staying=staying,
        target=target,
        least=min(least, target),
        joiners=joiners,
        joiner_fault=None,
        waited_s=waited_s,
        patience_s=30,
        left_s=left_s,
    )
    match decision:
        case Proceed(workers=workers):
            assert min(least, target) <= workers <= staying + joiners.ready
            assert workers >= 1
        case Drop(count=count):
            assert 0 < count <= joiners.total
        case Seek(count=count):
            assert count + joiners.total + staying == target


@dataclass
class Group:
    """A group in memory: what was sought and let go."""

    members: list[tuple[str, str | None]]
    node: str = "head"
    joiners: list[str] = field(default_factory=list)
    """How far each is: "placing", "warming" or "ready"."""
    left: list[frozenset[str]] = field(default_factory=list)

    def places(self) -> list[tuple[str, str | None]]:
        return self.members

    def counts(self) -> Joiners:
        return Joiners(**{stage: self.joiners.count(stage) for stage in ("placing", "warming", "ready")})

    def seek(self, count: int) -> None:
        self.joiners += ["placing"] * count

    def drop(self, count: int) -> None:
        del self.joiners[len(self.joiners) - count :]

    def drop_from(self, nodes: frozenset[str]) -> None:
        self.left.append(nodes)


@dataclass
class Scene:
    """A mover over a group in memory, and what it told."""

    group: Group
    least: int = 1
    relocates: bool = True
    nodes: Nodes = field(default_factory=Nodes)
    now: float = 100.0
    told: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mover = Mover(
            group=self.group,
            least=self.least,
            nodes=lambda: self.nodes,
            tell=self.told.append,
            clock=lambda: self.now,
            wall=lambda: self.now,
            patience_s=30,
            relocates=self.relocates,
        )

    def look(self, target: int | None = None) -> Departure | Relocation | Wait | None:
        return self.mover.look(target=target or len(self.group.members), joiner_fault=None)


def test_nothing_is_done_where_no_member_is_concerned() -> None:
    scene = Scene(Group([("w0", "a")]))
    assert scene.look() is None
    scene.nodes = Nodes(drained={"b": None}, taking=frozenset({"a"}))
    assert scene.look() is None
    assert scene.told == []


def test_a_drained_member_is_replaced_and_told_of_once() -> None:
    scene = Scene(Group([("w0", "a"), ("w1", "b"), ("w2", "b")]))
    scene.nodes = Nodes(drained={"b": 400.0}, taking=frozenset({"a"}))
    assert scene.look() == Wait()
    assert scene.group.joiners == ["placing"] * 2
    assert scene.look() == Wait()
    scene.group.joiners = ["ready"] * 2
    assert scene.look() == Departure(workers=3, without=frozenset({"w1", "w2"}), nodes=["b"])
    assert scene.told == [
        {
            "node": "b",
            "workers": ["w1", "w2"],
            "ranks": [1, 2],
            "deadline": 400.0,
            "said": "its workers are moved to other nodes",
        }
    ]
    assert set(scene.group.left) == {frozenset({"b"})}, "a joiner that came to be there is let go"


def test_a_group_that_cannot_move_says_so_once_and_keeps_trying() -> None:
    scene = Scene(Group([("w0", "a"), ("w1", "b")]), least=2)
    scene.nodes = Nodes(drained={"b": None}, taking=frozenset({"a"}))
    scene.look()
    scene.now += 31
    assert scene.look() == scene.look() == Wait()
    assert ["cannot be moved" in event["said"] for event in scene.told] == [False, True]
    scene.group.joiners = ["ready"]
    assert scene.look() == Departure(workers=2, without=frozenset({"w1"}), nodes=["b"])


def test_the_controller_itself_moves_last_and_once() -> None:
    scene = Scene(Group([("w0", "a"), ("w1", "head")]))
    scene.nodes = Nodes(drained={"head": None}, taking=frozenset({"a"}))
    assert scene.look() == Wait()
    scene.group.members = [("w0", "a"), ("w2", "a")]
    moved = scene.look()
    assert isinstance(moved, Relocation)
    assert "controller is on node head" in moved.reason
    assert scene.look() is None
    assert len(scene.told) == 2


def test_the_controller_stays_where_nothing_else_takes_work() -> None:
    drained = Nodes(drained={"head": None}, taking=frozenset())
    assert Scene(Group([("w0", "a")]), nodes=drained).look() is None
    able = Nodes(drained={"head": None}, taking=frozenset({"a"}))
    assert Scene(Group([("w0", "a")]), nodes=able, relocates=False).look() is None
