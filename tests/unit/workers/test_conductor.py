"""The conductor over scripted workers: what it does next, without processes and without waiting."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workers.commands import Cancel, Pause, Resize
from workers.conductor import Conductor, Limits
from workers.log import JobLog
from workers.orders import Orders
from workers.policies import Joiners, Member
from workers.progress import Pulse
from workers.protocol import Begun, Failure, Outcome, Readiness, Source, Wish
from workers.spec import JobSpec
from zero_core.checkpoint import manifest

MEMORY = dict.fromkeys(
    ("parameters", "gradients", "optimizer_states", "communication_buffers", "activations"), 0
)


@dataclass(eq=False)
class Worker:
    """One that is ready as soon as it has a place."""

    name: str
    placed: bool = False
    death: str | None = None
    fault: Failure | None = None
    node_died: bool = False
    outcome: Outcome | None = None

    @property
    def ready(self) -> bool:
        return self.placed and self.death is None and self.fault is None

    @property
    def readiness(self) -> Readiness:
        return Readiness(pid=1, node=f"node-of-{self.name}", store="here:1", samples=64)


@dataclass
class Workers:
    """Stands in for the group: every round the members finish a step, unless something stands against it."""

    room: int
    """Places that the cluster has, those taken included."""
    script: dict[int, Callable[["Workers"], None]] = field(default_factory=dict)
    """What happens after a step, once."""
    members: list[Worker] = field(default_factory=list)
    leavers: list[Worker] = field(default_factory=list)
    joiners: list[Worker] = field(default_factory=list)
    meetings: list[tuple[list[str], list[str], int]] = field(default_factory=list)
    floors: list[int] = field(default_factory=list)
    """Of each meeting: no older state may be gone on from."""
    asked: list[Wish] = field(default_factory=list)
    step: int = 0
    untold: set[str] = field(default_factory=set)
    """Workers whose reports do not come any more."""
    lingering: list[str] = field(default_factory=list)
    """Workers that are not seen to be gone at the end."""
    started: int = 0
    before_meeting: Callable[["Workers"], None] = lambda _: None
    _forming: bool = False
    _stopping: Wish | None = None

    @property
    def node(self) -> str:
        return "head"

    def places(self) -> list[tuple[str, str | None]]:
        return [(w.name, "head") for w in self.members]

    def pulses(self) -> list[Pulse]:
        return []

    @property
    def participants(self) -> list[Worker]:
        return [*self.members, *self.leavers]

    def counts(self) -> Joiners:
        ready = sum(w.ready for w in self.joiners)
        placing = sum(not w.placed for w in self.joiners)
        return Joiners(placing=placing, warming=len(self.joiners) - ready - placing, ready=ready)

    def view(self) -> tuple[Member, ...]:
        return tuple(
            Member(rank=rank, worker=w.name, death=w.death, outcome=w.outcome, leaves=w in self.leavers)
            for rank, w in enumerate(self.participants)
        )

    def seek(self, count: int) -> None:
        for _ in range(count):
            self.joiners.append(Worker(f"w{self.started}"))
            self.started += 1

    def drop(self, count: int) -> None:
        self.retire(self.joiners[-count:] if count else [])

    def retire(self, workers: list[Worker]) -> None:
        for worker in list(workers):
            for held in (self.members, self.leavers, self.joiners):
                if worker in held:
                    held.remove(worker)

    def missing(self) -> dict[str, float]:
        return {"CPU": float(self.counts().placing)}

    def enrol(self, count: int, *, without: Collection[str] = ()) -> None:
        before = self.participants
        inside = [w for w in before if w.name not in without]
        self.members = [*inside, *(w for w in self.joiners if w.ready)][:count]
        self.leavers = [w for w in before if w not in self.members]
        self.joiners = [w for w in self.joiners if w not in self.members]

    def dismiss_leavers(self) -> None:
        self.retire(self.leavers)

    def meet(self, generation: int, *, checkpoint: str | None, floor_step: int) -> None:
        names = [w.name for w in self.members], [w.name for w in self.leavers]
        self.meetings.append((*names, generation))
        self.floors.append(floor_step)
        self._forming, self._stopping = True, None
        for worker in self.participants:
            worker.outcome = None

    def begun(self) -> tuple[Begun, ...] | None:
        if self._forming:
            return None
        source = Source.LIVE if len(self.meetings) > 1 else Source.START
        return tuple(Begun(step=self.step, time=50.0, seconds={}, source=source) for _ in self.members)

    def ask(self, wish: Wish) -> None:
        self.asked.append(wish)
        self._stopping = wish

    def abort(self) -> bool:
        return True

    def give_up_on_the_stuck(self, cause: str) -> None:
        raise AssertionError("nobody is stuck")

    def release(self, timeout_s: float) -> list[str]:
        self.retire([*self.participants, *self.joiners])
        return self.lingering

    def round(self) -> list[dict[str, Any]]:
        taken = len(self.participants) + sum(w.placed for w in self.joiners)
        for joiner in self.joiners:
            if not joiner.placed and taken < self.room:
                joiner.placed = True
                taken += 1
        if self._forming:
            self.before_meeting(self)
            self._forming = any(w.death for w in self.participants)
            return []
        if not self.members or any(w.death or w.outcome for w in self.participants):
            return []
        self.step += 1
        reports = [self._report(rank) for rank, w in enumerate(self.members) if w.name not in self.untold]
        if self._stopping:
            for worker in self.members:
                worker.outcome = Outcome(step=self.step, reason=self._stopping)
        if happens := self.script.pop(self.step, None):
            happens(self)
        return reports

    def _report(self, rank: int) -> dict[str, Any]:
        return {
            "type": "report",
            "time": 10.0 + self.step,
            "generation": self.meetings[-1][2],
            "rank": rank,
            "world_size": len(self.members),
            "worker": self.members[rank].name,
            "step": self.step,
            "loss": 1.0,
            "lr": 0.1,
            "grad_norm": 1.0,
            "tokens": 8,
            "step_s": 1.0,
            "seconds": {},
            "bytes_sent": {},
            "memory": MEMORY,
            "predicted": MEMORY,
            "resident_bytes": 0,
            "samples": None,
        }


class Attempt:
    """A conductor, its workers and what it has logged."""

    def __init__(self, folder: Path, *, wanted: int = 2, room: int = 8, **changes: Any) -> None:
        fields = {
            "data": {"kind": "synthetic", "samples": 64},
            "steps": 10_000,
            "global_batch": 8,
            "micro_batch": 1,
            "elastic": {"capacity_wait_s": 5},
        }
        self.orders = Orders(wanted)
        self.workers = Workers(room)
        self.log = JobLog(folder / "log.jsonl")
        self.checkpoints = folder / "checkpoints"
        self.now = 0.0
        self.conductor = Conductor(
            spec=JobSpec.model_validate(fields | changes),
            attempt=1,
            log=self.log,
            orders=self.orders,
            group=self.workers,  # type: ignore[arg-type]
            checkpoints=self.checkpoints,
            limits=Limits(tick_s=0.0, placing_tick_s=0.0, start_patience_s=5),
            clock=self._tick,
        )

    def _tick(self) -> float:
        self.now += 0.01
        return self.now

    def at(self, step: int, happens: Callable[[], None]) -> None:
        self.workers.script[step] = lambda _: happens()

    def resize(self, workers: int) -> None:
        self.orders.give(Resize(workers=workers, who="tester"))

    def run(self, until: int) -> None:
        """Until a pause that is asked for after so many steps."""
        self.at(until, lambda: self.orders.give(Pause(who="tester")))
        self.conductor.run()
        assert self.conductor.phase == "paused", self.events("phase")[-1]
        assert self.workers.asked[-1] is Wish.PAUSE, "the pause was agreed on by a training group"

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e["data"] for e in self.log.read(0, 10_000) if e.get("kind") == kind]

    def groups(self) -> list[int]:
        return [len(members) for members, _, _ in self.workers.meetings]


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


def test_the_group_is_stopped_when_all_joiners_are_there_and_leavers_hand_over(attempt: Attempt) -> None:
    attempt.at(5, lambda: attempt.resize(4))
    attempt.at(15, lambda: attempt.resize(1))
    attempt.run(25)
    assert attempt.workers.meetings == [
        (["w0", "w1"], [], 1),
        (["w0", "w1", "w2", "w3"], [], 2),
        (["w0"], ["w1", "w2", "w3"], 3),
    ]
    grown, shrunk = attempt.events("resize")
    assert (grown["who"], grown["cause"], grown["source"]) == ("tester", "asked for", "live")
    assert grown["at_step"] > 6, "places and processes came first"
    assert grown["steps_repeated"] == shrunk["steps_repeated"] == 0
    assert grown["productive_s"] == grown["at_step"]
    assert attempt.conductor.world_size == 0


def test_the_newest_number_counts_whenever_it_comes(attempt: Attempt) -> None:
    def twice() -> None:
        attempt.resize(6)
        attempt.resize(3)

    attempt.at(5, twice)
    attempt.at(15, lambda: attempt.resize(3))  # there already
    # While the group is on its way to 5, 2 are wanted: that follows at once.
    attempt.at(20, lambda: attempt.resize(5))
    attempt.workers.before_meeting = lambda workers: attempt.resize(2) if len(workers.members) == 5 else None
    attempt.run(40)
    assert attempt.groups() == [2, 3, 5, 2]
    assert attempt.orders.wanted == 2
    assert attempt.orders.resize is None
    third = attempt.events("resize")[-1]
    assert third["at_step"] <= attempt.events("resize")[-2]["at_step"] + 3


def test_a_resize_beyond_capacity_names_what_is_missing_and_touches_nothing(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, room=3)
    attempt.at(5, lambda: attempt.resize(5))
    attempt.run(2000)
    (refused,) = attempt.events("resize_refused")
    assert refused["missing"] == {"CPU": 2.0}
    assert "places for 1 of 3 more workers within 5 s" in refused["reason"]
    assert "missing: 2 CPU" in refused["reason"]
    assert attempt.groups() == [2]
    assert attempt.events("phase")[1]["phase"] == "running"
    assert attempt.orders.wanted == 2


def test_a_place_where_nothing_can_be_kept_ends_the_job_with_its_name(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    attempt.checkpoints.write_text("a file, and no folder")
    attempt.conductor.run()
    assert attempt.conductor.phase == "failed"
    reason = attempt.events("phase")[-1]["reason"]
    assert reason.startswith(f"no checkpoints can be kept in {attempt.checkpoints} (")
    assert reason.endswith("give another checkpoints.location")
    assert not attempt.events("error"), "no failure of the controller's"


@pytest.mark.parametrize("change", ["resize", "recovery"])
def test_a_store_that_is_out_for_a_while_loses_nothing(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """At a resize and at a recovery: the workers wait with what they hold, and it is said once."""
    own, tries = manifest.open_generation, list[float]()

    def full(root: Path, generation: int) -> None:
        if generation > 1 and len(tries) < 4:
            tries.append(attempt.now)
            raise OSError(28, "No space left on device")
        own(root, generation)

    def happens() -> None:
        if change == "resize":
            attempt.resize(3)
        else:
            attempt.workers.members[1].death = "killed"

    monkeypatch.setattr("workers.opening.manifest.open_generation", full)
    attempt.at(5, happens)
    attempt.run(20)
    assert len(attempt.events(change)) == 1
    assert attempt.workers.meetings[1][2] == 2, "no number is skipped"
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert gaps == pytest.approx([1, 2, 4], abs=0.2), "less and less often"
    (said,) = [e["reason"] for e in attempt.events("phase") if "No space left" in (e["reason"] or "")]
    assert said.startswith(f"no checkpoints can be kept in {attempt.checkpoints} (")


def test_survivors_go_on_at_once_and_grow_back_when_there_is_room(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, wanted=3, room=3)

    def lose() -> None:
        attempt.workers.members[1].death = "killed"
        attempt.workers.room = 2

    attempt.at(5, lose)
    attempt.at(300, lambda: setattr(attempt.workers, "room", 3))
    attempt.run(320)
    assert [m[:2] for m in attempt.workers.meetings] == [
        (["w0", "w1", "w2"], []),
        (["w0", "w2"], []),
        (["w0", "w2", "w3"], []),
    ]
    (recovery,) = attempt.events("recovery")
    assert (recovery["old_workers"], recovery["new_workers"]) == (3, 2)
    assert recovery["who"] == "controller", "every pause says whose it was"
    (back,) = attempt.events("resize")
    assert (back["who"], back["cause"], back["new_workers"]) == ("controller", "grown back", 3)
    assert back["at_step"] >= 300
    (lost,) = attempt.events("worker_lost")
    assert (lost["rank"], lost["worker"], lost["budget"]) == (1, "w1", "worker")


def test_nobody_grows_back_where_that_is_off(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, wanted=3, elastic={"grow_back": False})
    attempt.at(5, lambda: setattr(attempt.workers.members[0], "death", "killed"))
    attempt.run(100)
    assert attempt.groups() == [3, 2]
    assert attempt.workers.started == 3


def test_too_few_survivors_wait_for_room(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, wanted=3, workers={"wanted": 3, "min": 3})
    attempt.at(5, lambda: setattr(attempt.workers.members[0], "death", "killed"))
    attempt.run(20)
    assert [m[0] for m in attempt.workers.meetings] == [["w0", "w1", "w2"], ["w1", "w2", "w3"]]


def test_a_joiner_that_is_lost_after_the_stop_is_not_waited_for(attempt: Attempt) -> None:
    """Those that are there go on; what is missing is sought while they train."""

    def lose_a_joiner(workers: Workers) -> None:
        if Wish.RESIZE in workers.asked and len(workers.joiners) == 2:
            workers.joiners[0].death = "killed"

    attempt.at(5, lambda: attempt.resize(4))
    for step in range(6, 30):
        attempt.workers.script[step] = lose_a_joiner
    attempt.run(60)
    assert attempt.groups() == [2, 3, 4]
    assert attempt.events("worker_lost") == [], "the job lost nothing"


def test_a_leaver_that_is_lost_in_the_handover_is_a_loss_and_the_others_still_have_their_parts(
    attempt: Attempt,
) -> None:
    def lose_a_leaver(workers: Workers) -> None:
        if len(workers.leavers) == 3:
            workers.leavers[0].death = "killed"

    attempt.workers.before_meeting = lose_a_leaver
    attempt.at(5, lambda: attempt.resize(4))
    attempt.at(15, lambda: attempt.resize(1))
    attempt.run(30)
    assert [m[:2] for m in attempt.workers.meetings][2:] == [
        (["w0"], ["w1", "w2", "w3"]),
        (["w0"], ["w2", "w3"]),
    ]
    (recovery,) = attempt.events("recovery")
    assert "rank 1 (w1): killed" in recovery["cause"]


def test_a_lost_node_is_no_lost_worker_and_has_a_budget_of_its_own(tmp_path: Path) -> None:
    attempt = Attempt(
        tmp_path, wanted=3, recovery={"max_worker_losses": 0, "max_node_losses": 1, "backoff_s": 0.01}
    )

    def lose_the_node() -> None:
        worker = attempt.workers.members[0]
        worker.death, worker.node_died = "its node has died", True

    attempt.at(5, lose_the_node)
    attempt.at(50, lose_the_node)
    attempt.conductor.run()
    last = attempt.events("phase")[-1]
    assert last["phase"] == "failed"
    assert "2 nodes were lost, more than recovery.max_node_losses 1" in last["reason"]
    assert [e["budget"] for e in attempt.events("worker_lost")] == ["node", "node"]


def test_what_a_lost_rank_did_not_tell_and_nobody_repeats_is_told_for_it(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, wanted=3)
    attempt.at(4, lambda: attempt.workers.untold.add("w1"))
    attempt.at(6, lambda: setattr(attempt.workers.members[1], "death", "killed"))
    attempt.run(20)
    reports = [e for e in attempt.log.read(0, 10_000) if e["type"] == "report"]
    rebuilt = [(r["step"], r["rank"], r["worker"]) for r in reports if r["rebuilt"]]
    assert rebuilt == [(5, 1, "w1"), (6, 1, "w1")]
    assert all(len([r for r in reports if r["step"] == step]) == 3 for step in range(1, 7))
    assert attempt.events("recovery")[0]["steps_repeated"] == 0


def test_after_a_damaged_checkpoint_a_resize_goes_on_from_what_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest that is listed does not verify: the group has begun from an older one."""
    newest = SimpleNamespace(step=100, location="/r/step-00000100.g0001")
    monkeypatch.setattr("workers.latest.manifest.latest", lambda root: newest)
    attempt = Attempt(tmp_path)
    attempt.at(5, lambda: attempt.resize(3))
    attempt.run(20)
    assert attempt.groups() == [2, 3]
    assert attempt.workers.floors == [100, 0]


def test_what_becomes_of_checkpoints_is_logged_as_events(attempt: Attempt) -> None:
    """A commit comes steps after its step; what counted up to there is noted with it, for a restart."""
    own = attempt.workers.round

    def also(notices: list[dict[str, Any]]) -> None:
        attempt.workers.round = lambda: [*own(), *(notices.pop(0) for _ in notices[:1])]  # type: ignore[method-assign]

    saved = {"type": "checkpoint", "generation": 1, "step": 4, "bytes": 9, "seconds": 0.5, "stall_s": 0.1}
    saved["location"] = "/r/step-00000004.g0001"
    failed = {"type": "checkpoint_failed", "generation": 1, "step": 6, "reason": "interval", "error": "full"}
    attempt.at(8, lambda: also([{**saved, "reason": "interval"}, failed]))
    attempt.run(20)
    (event,) = attempt.events("checkpoint")
    assert (event["step"], event["seconds"], event["stall_s"], event["reason"]) == (4, 0.5, 0.1, "interval")
    assert event["saved_productive_s"] == 4.0
    assert event["productive_s"] > 7
    (event,) = attempt.events("checkpoint_failed")
    assert event == {"generation": 1, "step": 6, "reason": "interval", "error": "full"}
    history = JobLog(attempt.log._path).history
    assert (history.saved_step, history.saved_productive_s) == (4, 4.0)


@pytest.mark.parametrize("lingering", [[], ["w1"]])
def test_what_a_save_in_its_middle_left_goes_with_the_job(attempt: Attempt, lingering: list[str]) -> None:
    """Unless a worker is not seen to be gone: it may be writing still."""
    root = attempt.checkpoints
    left = manifest.staging(root, 1) / ".saving-step-00000004.g0001-0123456789ab"

    def cancel() -> None:
        left.mkdir()
        (left / manifest.shard_name(1)).write_bytes(b"half of it")
        attempt.orders.give(Cancel(who="tester"))

    attempt.workers.lingering = lingering
    attempt.at(5, cancel)
    attempt.conductor.run()
    assert attempt.conductor.phase == "cancelled"
    assert left.exists() == bool(lingering)
    assert [path.name for path in root.iterdir()] == [".generation-0001"]
    if not lingering:
        assert list(manifest.staging(root, 1).iterdir()) == []


def test_a_save_is_left_alone_while_its_generation_is_the_current_one(attempt: Attempt) -> None:
    """A resize closes the old generation's folder; the new one's stays, whatever is in it."""
    root = attempt.checkpoints
    first, second = (manifest.staging(root, generation) / ".saving-x" for generation in (1, 2))
    there = []
    attempt.at(3, first.mkdir)
    attempt.at(5, lambda: attempt.resize(3))
    attempt.at(15, second.mkdir)
    attempt.at(16, lambda: there.extend([first.exists(), second.exists()]))
    attempt.run(20)
    assert attempt.groups() == [2, 3]
    assert there == [False, True]
    assert not second.exists(), "the job is over"
