"""The queue's decisions, over values."""

from typing import Any

from service.cluster import ClusterView, NodeView
from service.jobs import Job, JobState
from service.scheduler import decide
from tests.unit.service.makers import job_of, spec_of


def node(cpus: float = 4, *, free: float | None = None, gpus: float = 0, alive: bool = True) -> NodeView:
    left = cpus if free is None else free
    return NodeView("n", "h", alive, cpus, left, gpus, gpus, 1 << 30, 1 << 30)


def queued(job_id: str, wanted: int, **resources: Any) -> Job:
    spec = spec_of(workers={"wanted": wanted}, resources=resources)
    return job_of(JobState.QUEUED, id=job_id, spec=spec)


def view(*nodes: NodeView) -> ClusterView:
    return ClusterView(nodes)


def test_jobs_start_in_order_while_there_is_place() -> None:
    decision = decide([queued("a", 2), queued("b", 2), queued("c", 1)], [], view(node(4)))
    assert decision.start == ("a", "b")
    assert "place for 0 now" in decision.waiting["c"]


def test_a_job_does_not_overtake() -> None:
    decision = decide([queued("a", 4), queued("b", 1)], [], view(node(4, free=3)))
    assert decision.start == ()
    assert decision.waiting["b"] == "waiting behind job a"


def test_a_job_larger_than_the_cluster_holds_no_one_back() -> None:
    decision = decide([queued("a", 8), queued("b", 1)], [], view(node(4)))
    assert decision.start == ("b",)
    assert "waiting for the cluster to grow" in decision.waiting["a"]


def test_where_the_cluster_grows_the_first_job_without_room_asks_for_it() -> None:
    larger, behind = queued("a", 8), queued("b", 1)
    decision = decide([larger, behind], [], view(node(4)), grows=True)
    assert decision.start == ("a",)
    assert decision.waiting["b"] == "waiting behind job a"
    assert decide([queued("a", 2)], [], view(node(4, free=1)), grows=True).start == ("a",), "a full one too"
    assert decide([larger], [], view(), grows=True).start == ("a",), "one without nodes too"


def test_one_job_at_a_time_has_the_cluster_grow() -> None:
    starting = job_of(JobState.STARTING, wanted_workers=8)
    decision = decide([queued("a", 8), queued("b", 1)], [starting], view(node(4)), grows=True)
    assert decision.start == ()
    assert "place for 0 now" in decision.waiting["a"]
    running = job_of(JobState.RUNNING, workers=4, wanted_workers=8)
    assert decide([queued("a", 8)], [running], view(node(4, free=0)), grows=True).start == ("a",)


def test_what_a_starting_job_has_not_taken_yet_counts_as_taken() -> None:
    live = job_of(JobState.STARTING, wanted_workers=3)
    assert decide([queued("a", 2)], [live], view(node(4))).start == ()
    assert decide([queued("a", 1)], [live], view(node(4))).start == ("a",)


def test_a_growing_job_holds_what_it_grows_to() -> None:
    live = job_of(JobState.RESIZING, workers=1, wanted_workers=4)
    assert decide([queued("a", 1)], [live], view(node(4, free=3))).start == ()


def test_a_worker_is_not_split_over_nodes() -> None:
    assert decide([queued("a", 1, cpus=3)], [], view(node(2), node(2))).start == ()
    assert decide([queued("a", 2, cpus=2)], [], view(node(2), node(2))).start == ("a",)


def test_gpus_and_memory_are_looked_at_too() -> None:
    assert decide([queued("a", 1, gpus=1)], [], view(node(4))).start == ()
    assert decide([queued("a", 2, gpus=1)], [], view(node(4, gpus=2))).start == ("a",)
    half = (1 << 30) // 2
    assert decide([queued("a", 3, memory_bytes=half)], [], view(node(4))).start == ()
    assert decide([queued("a", 2, memory_bytes=half)], [], view(node(4))).start == ("a",)


def test_dead_nodes_give_nothing() -> None:
    assert decide([queued("a", 1)], [], view(node(4, alive=False))).start == ()


def test_fractions_of_cpus_add_up() -> None:
    assert decide([queued("a", 8, cpus=0.1)], [], view(node(0.8))).start == ("a",)
