"""What a job takes, and whether it fits: arithmetic."""

from typing import Any

import pytest

from service.cluster import ClusterView, NodeView
from service.errors import ImpossibleResize
from service.planner import PROCESS_BYTES, check_resize, plan
from tests.unit.service.makers import spec_of


def view(*, cpus: float = 8, memory_bytes: int = 8 << 30, gpus: float = 0, nodes: int = 1) -> ClusterView:
    one = NodeView("n", "h", True, cpus, cpus, gpus, gpus, memory_bytes, memory_bytes)
    return ClusterView((one,) * nodes)


def test_a_small_gpt_fits_and_its_parts_are_told() -> None:
    found = plan(spec_of(), view())
    assert found.fits
    assert found.known
    assert found.reasons == found.notes == ()
    block = 12 * 32 * 32 + 13 * 32
    assert found.parameters == 2 * block + (256 + 16) * 32 + 2 * 32
    assert found.per_rank is not None
    assert found.per_rank.parameters == 4 * found.parameters


def test_more_workers_hold_less_each() -> None:
    few, many = plan(spec_of(), view(), workers=1), plan(spec_of(), view(), workers=4)
    assert few.per_rank is not None
    assert many.per_rank is not None
    assert many.per_rank.optimizer_states < few.per_rank.optimizer_states


def test_too_little_reserved_memory_is_told_with_the_numbers() -> None:
    spec = spec_of(resources={"memory_bytes": 1000})
    (reason,) = plan(spec, view()).reasons
    assert "reserves 1,000" in reason
    assert f"process {PROCESS_BYTES:,}" in reason


def test_more_workers_than_places_is_told_with_the_numbers() -> None:
    found = plan(spec_of(resources={"cpus": 3}), view(cpus=5))
    assert not found.fits
    assert "2 workers with 3 CPUs each" in found.reasons[0]
    assert "place for 1" in found.reasons[0]


def test_a_model_larger_than_the_nodes_memory_does_not_fit() -> None:
    large = spec_of(model={"kind": "gpt", "layers": 48, "hidden": 4096, "heads": 32})
    found = plan(large, view())
    assert not found.fits
    assert "memory for 0" in found.reasons[0]


def test_the_memory_of_one_node_is_shared_by_its_workers() -> None:
    one = plan(spec_of(), view())
    needed = one.process_bytes + one.per_rank.total  # type: ignore[union-attr]
    assert plan(spec_of(), view(memory_bytes=2 * needed)).fits
    assert not plan(spec_of(), view(memory_bytes=2 * needed - 1)).fits
    assert plan(spec_of(), view(memory_bytes=needed, nodes=2)).fits


def test_a_users_own_model_is_unknown_and_the_plan_says_so() -> None:
    found = plan(spec_of(model={"kind": "custom", "factory": "m:C"}), view())
    assert (found.known, found.per_rank, found.fits) == (False, None, True)
    assert "known only once it runs" in found.notes[0]


def test_gpu_memory_is_not_claimed_to_be_checked() -> None:
    large = spec_of(
        model={"kind": "gpt", "layers": 48, "hidden": 4096, "heads": 32},
        resources={"gpus": 1},
        checkpoints={"asynchronous": False},
        elastic={"replicas": 0},
    )
    found = plan(large, view(gpus=2))
    assert found.fits
    assert "GPUs" in found.notes[0]
    assert "2 workers with 1 CPUs and 1 GPU each" in plan(large, view(gpus=1)).reasons[0]


def test_without_a_cluster_only_the_job_is_looked_at() -> None:
    found = plan(spec_of(), None)
    assert found.fits
    assert "could not be asked" in found.notes[0]


def test_a_resize_beyond_the_cluster_is_impossible() -> None:
    check_resize(spec_of(), 4, view(cpus=4))
    with pytest.raises(ImpossibleResize, match="place for 4"):
        check_resize(spec_of(), 5, view(cpus=4))


def test_where_the_cluster_grows_its_nodes_are_a_note_and_the_jobs_own_bounds_stand() -> None:
    found = plan(spec_of(), view(cpus=4), workers=5, grows=True)
    assert found.fits
    assert "would have to grow" in found.notes[0]
    assert "place for 4" in found.notes[0]
    assert plan(spec_of(), view(cpus=4), workers=4, grows=True).notes == ()
    large = spec_of(model={"kind": "gpt", "layers": 48, "hidden": 4096, "heads": 32})
    assert "memory for 0" in plan(large, view(), grows=True).notes[0]
    check_resize(spec_of(), 5, view(cpus=4), grows=True)
    with pytest.raises(ImpossibleResize, match="micro-batches"):
        check_resize(spec_of(), 9, view(cpus=4), grows=True)
    with pytest.raises(ImpossibleResize, match="reserves 1,000"):
        check_resize(spec_of(resources={"memory_bytes": 1000}), 5, view(cpus=4), grows=True)


def test_a_resize_to_too_few_for_the_model_is_impossible() -> None:
    spec = spec_of(
        model={"kind": "gpt", "layers": 8, "hidden": 512, "heads": 8},
        zero={"stage": 3},
        resources={"cpus": 1},
    )
    one = plan(spec, None, workers=1).per_rank
    assert one is not None
    small = view(cpus=1, memory_bytes=PROCESS_BYTES + one.total - 1, nodes=4)
    check_resize(spec, 4, small)
    with pytest.raises(ImpossibleResize, match="memory for 0"):
        check_resize(spec, 1, small)


def test_the_copy_that_checkpoints_are_written_from_counts() -> None:
    often: dict[str, Any] = {"checkpoints": {"every_steps": 10}}

    def copied(workers: int = 1, **changes: Any) -> int:
        budget = plan(spec_of(**often | changes), view(), workers=workers).per_rank
        assert budget is not None
        return budget.save_copy

    found = plan(spec_of(), view(), workers=1)
    psi = found.parameters
    assert psi is not None
    assert found.process_bytes == PROCESS_BYTES
    assert copied() == 3 * 4 * psi
    assert copied(zero={"stage": 0}, precision="bf16") == 3 * 4 * psi
    assert 0 < copied(2) < copied()
    assert copied(optimizer={"kind": "sgd"}) == 2 * 4 * psi
    for checkpoints in ({"asynchronous": False}, {"every_steps": None}, {"every_steps": spec_of().steps}):
        assert copied(checkpoints=checkpoints) == 0, "no save leaves training alone"
    small = spec_of(**often, resources={"memory_bytes": 1000})
    assert f"copy for checkpoints {copied(2):,}" in plan(small, view()).reasons[0]


def test_copies_in_host_memory_count_there_on_gpus_too() -> None:
    spec = spec_of(resources={"gpus": 1}, checkpoints={"every_steps": 10})
    budget = plan(spec, view(gpus=2)).per_rank
    assert budget is not None
    assert budget.host_bytes == budget.replicas + budget.save_copy > budget.save_copy > 0
    needed = PROCESS_BYTES + budget.host_bytes
    assert plan(spec, view(gpus=2, memory_bytes=2 * needed)).fits
    assert not plan(spec, view(gpus=2, memory_bytes=2 * needed - 1)).fits
