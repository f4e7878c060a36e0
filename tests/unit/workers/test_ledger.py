"""Reports of ranks that were lost before they had told what they had done."""

from typing import Any

from workers.ledger import Ledger
from workers.order import Origin, SampleOrder
from workers.reports import RankReport
from workers.spec import JobSpec

SAMPLES = 40
SPEC = JobSpec.model_validate(
    {
        "data": {"kind": "synthetic", "samples": SAMPLES},
        "steps": 100,
        "global_batch": 10,
        "micro_batch": 2,
        "sequence_length": 8,
        "seed": 3,
        "sample_ledger": True,
    }
)


def _read(step: int, rank: int, ranks: int) -> list[int]:
    order = SampleOrder(SAMPLES, SPEC.seed)
    places = [m for m in range(5) if m % ranks == rank]
    return [int(i) for m in places for i in order.ids((step - 1) * 10 + 2 * m, 2)]


def _report(step: int, rank: int, ranks: int) -> dict[str, Any]:
    memory = dict.fromkeys(
        ("parameters", "gradients", "optimizer_states", "communication_buffers", "activations"), 7
    )
    samples = _read(step, rank, ranks)
    return {
        "type": "report",
        "time": 9.0 + step,
        "generation": 4,
        "rank": rank,
        "world_size": ranks,
        "worker": f"w{rank}",
        "step": step,
        "loss": 1.0 / step,
        "lr": 0.1,
        "grad_norm": 2.0,
        "tokens": len(samples) * 8,
        "step_s": 0.5,
        "seconds": {"forward": 0.1},
        "bytes_sent": {"reduce": 5},
        "bytes_by_transport": {"shared": 5},
        "memory": memory,
        "predicted": memory,
        "resident_bytes": 3,
        "samples": samples,
    }


def test_what_a_lost_rank_had_not_told_is_rebuilt_as_far_as_it_counts() -> None:
    ledger = Ledger(SPEC)
    ledger.begin(["w0", "w1", "w2"])
    told = {1: (0, 1, 2), 2: (0, 2), 3: (2,), 4: (0, 2)}
    for step, ranks in told.items():
        for rank in ranks:
            ledger.told(_report(step, rank, 3))
    rebuilt = ledger.rebuild(3, samples=SAMPLES)
    assert [(r["step"], r["rank"], r["worker"]) for r in rebuilt] == [
        (2, 1, "w1"),
        (3, 0, "w0"),
        (3, 1, "w1"),
    ]
    for report in rebuilt:
        checked = RankReport.model_validate({**report, "seq": 1})
        assert checked.rebuilt
        assert checked.samples == _read(checked.step, checked.rank, 3)
        assert checked.tokens == len(checked.samples) * 8
        assert (checked.loss, checked.generation, checked.world_size) == (1.0 / checked.step, 4, 3)
        assert (checked.step_s, checked.seconds, checked.resident_bytes) == (0.0, {}, 0)
        assert checked.bytes_sent == checked.bytes_by_transport == {}
        assert checked.memory.parameters == 0


def test_the_next_generation_begins_with_a_clean_sheet() -> None:
    ledger = Ledger(SPEC)
    ledger.begin(["w0", "w1"])
    ledger.told(_report(1, 0, 2))
    ledger.begin(["w0"])
    ledger.told(_report(2, 0, 1))
    assert ledger.rebuild(9, samples=SAMPLES) == []


def test_the_samples_of_a_job_that_goes_on_from_anothers_are_counted_from_its_origin() -> None:
    ledger = Ledger(SPEC)
    ledger.begin(["w0", "w1"])
    ledger.told(_report(8, 0, 2))
    (rebuilt,) = ledger.rebuild(8, samples=SAMPLES, origin=Origin(step=5, samples=13))
    order = SampleOrder(SAMPLES, SPEC.seed)
    start = 13 + (7 - 5) * 10
    assert rebuilt["samples"] == [int(i) for m in (1, 3) for i in order.ids(start + 2 * m, 2)]
