"""How ranks exchange: by memory or network, overlapped or not, the same bits; ranks that differ: an error."""

import gc
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.odd_model import batch, build
from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.budget import wire_elements
from zero_core.errors import DivergenceError, PeerLostError

pytestmark = pytest.mark.distributed

SETTINGS: list[dict[str, Any]] = [
    {},
    {"overlap": False},
    {"transport": "network"},
    {"transport": "network", "overlap": False, "divergence_check": "off"},
    {"transport": "network", "staging_bytes": 1 << 20, "divergence_check": "first"},
    {"staging_bytes": 1 << 20, "prefetch_units": 0},
]


def trained(settings: dict[str, Any], micro_batches: int) -> tuple[Any, ...]:
    config = ZeroConfig(
        **{"micro_batches": micro_batches, "tile": 64, "staging_bytes": 4096, "clip_norm": 0.5, **settings},
        optimizer=AdamWConfig(lr=1e-2),
    )
    engine = ZeroEngine(build(), config)
    steps = []
    for step in range(4):
        for index in engine.micro_batches:
            engine.backward(engine(*batch(step, index)))
        report = engine.step()
        steps.append((report.loss, report.grad_norm))
    memory, budget = engine.memory(), engine.budget
    assert memory.communication_buffers == budget.communication_buffers
    # All that was reserved was needed, and no more; but what is there for a unit that a branch leaves out.
    gradients, parameters = engine._pools
    spare = 1 if config.transport == "network" and config.stage >= 2 else 0
    largest = max(engine.layout.capacities()) * engine.units[0].dtype.itemsize
    assert gradients.allocated_bytes - gradients.most_lent_bytes <= spare * largest
    assert parameters.most_lent_bytes == parameters.allocated_bytes
    with engine.full_parameters():
        found = [p.detach().float().flatten().tolist() for p in engine.module.parameters()]
    engine.detach()
    return steps, found, report.bytes_sent, report.bytes_by_transport


def settings_compared(rank: int, world: int, stage: int, precision: str) -> dict[str, int]:
    runs = [trained({"stage": stage, "precision": precision, **settings}, 5) for settings in SETTINGS]
    if stage == 3:
        runs.append(trained({"stage": 3, "precision": precision, "keep_gathered_bytes": 1 << 20}, 5))
    for run in runs[1:]:
        assert run[:2] == runs[0][:2]
    for run in runs[1 : len(SETTINGS)]:
        # But for what ranks of different hosts tell each other, the volume does not depend on how it travels.
        assert {k: v for k, v in run[2].items() if k != "control"} == {
            k: v for k, v in runs[0][2].items() if k != "control"
        }
    return {"near": runs[0][3].get("network", 0), "far": runs[2][3].get("shared", 0)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_way_of_exchange_changes_no_bit(stage: int) -> None:
    """E18 (DeepSpeed 5545): overlapped or not, pieces of any size, memory or network, gathered ahead."""
    for precision in ("fp32", "bf16"):
        for counted in run_ranks(3, settings_compared, stage, precision, timeout_s=120):
            assert counted == {"near": 0, "far": 0}


def alone(rank: int, world: int) -> int:
    return len(
        [trained({"stage": stage, **more}, 2) for stage in (0, 1, 2, 3) for more in ({}, {"overlap": False})]
    )


def test_one_rank_holds_what_the_budget_says() -> None:
    assert run_ranks(1, alone) == [8]


def kept(rank: int, world: int, micro_batches: int) -> list[tuple[dict[str, int], dict[str, float]]]:
    """Bytes of each kind that this rank sent, and the elements predicted, for growing budgets."""
    found = []
    for budget_bytes in (0, 7000, 14000, 1 << 20):
        config = ZeroConfig(
            stage=3,
            tile=64,
            staging_bytes=4096,
            micro_batches=micro_batches,
            keep_gathered_bytes=budget_bytes,
        )
        torch.manual_seed(3)
        engine = ZeroEngine(nn.Sequential(*(nn.Linear(n, n + 9) for n in (7, 16, 25, 34))), config)
        for _ in range(2):
            for index in engine.micro_batches:
                engine.backward(engine(torch.ones(2, 7) * index).square().mean())
            report = engine.step()
        assert engine.memory().communication_buffers == engine.budget.communication_buffers
        assert engine._pools[1].most_lent_bytes == engine._pools[1].allocated_bytes
        found.append((dict(report.bytes_sent), wire_elements(engine.layout, config)))
        engine.detach()
    return found


@pytest.mark.parametrize(("world", "micro_batches"), [(2, 2), (3, 4), (3, 5), (4, 6)])
def test_a_memory_budget_chooses_the_volume_between_two_and_three_psi(world: int, micro_batches: int) -> None:
    """To the byte as predicted, also where the last round leaves ranks without a micro-batch."""
    volumes = []
    for of_ranks in zip(*run_ranks(world, kept, micro_batches), strict=True):
        predicted = of_ranks[0][1]
        for kind, elements in predicted.items():
            assert sum(sent.get(kind, 0) for sent, _ in of_ranks) == round(4 * world * elements), kind
        volumes.append(predicted["gather_backward"])
    assert volumes == sorted(volumes, reverse=True)
    assert len(set(volumes)) == 4
    assert volumes[-1] == 0


class Branching(nn.Module):
    """Two branches of equal size; `turns` says how often each is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, turns: list[int]) -> torch.Tensor:
        for branch in turns:
            x = self.branches[branch](x)
        return x.square().mean()


def diverging(rank: int, world: int, transport: str, turns: list[list[int]]) -> str:
    torch.manual_seed(0)
    engine = ZeroEngine(Branching(), ZeroConfig(stage=3, transport=transport, tile=64, prefetch_units=0))
    engine.backward(engine(torch.ones(2, 8), [0, 1, 2]))
    engine.step()
    try:
        engine.backward(engine(torch.ones(2, 8), turns[rank]))
        engine.step()
    except (DivergenceError, PeerLostError) as error:
        message = f"{type(error).__name__}: {error}"
        engine.detach()
        return message
    return "no error"


@pytest.mark.parametrize("transport", ["auto", "network"])
@pytest.mark.parametrize("turns", [[[0, 1], [0, 2]], [[0], [0, 1, 0, 2]], [[0, 1, 2], [2, 1, 0]]])
def test_ranks_that_differ_get_an_error_that_names_rank_and_unit(
    transport: str, turns: list[list[int]]
) -> None:
    """E11 (PyTorch 170667, 171355): other branches. E12 (DeepSpeed 7998, 8262): other numbers of calls."""
    messages = run_ranks(2, diverging, transport, turns, timeout_s=30)
    named = [m for m in messages if m.startswith("DivergenceError")]
    assert named, messages
    assert any("branches." in m and "rank 1" in m and "rank 0" in m for m in named)


def absent(rank: int, world: int, stage: int) -> list[float]:
    """Below stage 3 nothing is gathered: a branch that a rank does not take has zeros from it."""
    torch.manual_seed(0)
    engine = ZeroEngine(Branching(), ZeroConfig(stage=stage, tile=64, optimizer=AdamWConfig(lr=0.1)))
    engine.backward(engine(torch.ones(2, 8), [0, 1 + rank]))
    report = engine.step()
    return [report.grad_norm, *engine.module.branches[1].weight.flatten().tolist()]


def test_a_branch_that_only_one_rank_takes_counts_as_zeros_elsewhere() -> None:
    torch.manual_seed(0)
    model = Branching()
    (sum(model(torch.ones(2, 8), [0, 1 + rank]) for rank in (0, 1)) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    results = [run_ranks(2, absent, stage)[0] for stage in (0, 1, 2)]
    assert results[0] == results[1] == results[2]
    assert results[0][0] == pytest.approx(norm, rel=1e-6)


def lost(rank: int, world: int, how: str) -> tuple[str, float]:
    engine = ZeroEngine(build(), ZeroConfig(stage=2, tile=64))
    engine.backward(engine(*batch(0, rank)))
    engine.step()
    if rank == 1:
        if how == "killed":
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "closed":
            engine.detach()
            return "", 0.0
    if how == "aborted":
        if rank == 1:
            time.sleep(1.0)
            return "", 0.0
        threading.Timer(0.2, engine.abort).start()
    began = time.perf_counter()
    with pytest.raises(PeerLostError) as caught:
        engine.backward(engine(*batch(1, rank)))
    return str(caught.value), time.perf_counter() - began


@pytest.mark.parametrize("how", ["closed", "aborted"])
def test_a_rank_that_leaves_or_an_abort_ends_the_wait_of_others(how: str) -> None:
    message, waited_s = run_ranks(2, lost, how, timeout_s=30)[0]
    assert "rank 1 has left the group of rank 0" in message
    assert waited_s < 20  # not the collective's timeout of 600 s


def test_a_killed_rank_ends_the_wait_of_others() -> None:
    message, waited_s = run_ranks(2, lost, "killed", timeout_s=30, killed=[1])[0]
    assert "rank 1 has left the group of rank 0" in message
    assert waited_s < 20  # not the collective's timeout of 600 s


def in_one_block(rank: int, world: int, stage: int, transport: str) -> list[int]:
    """How far apart the first and the last byte lie of what other ranks may read, and the prediction."""
    from zero_core.budget import aligned, exchange_bytes, optimizer_arena_bytes

    engine = ZeroEngine(build(), ZeroConfig(stage=stage, transport=transport, tile=64))
    parts = [t for u in engine.units for t in (u.full, u.shard) if t is not None]
    parts += [g.kept for g in engine._reducer.gradients if g.kept is not None]
    buffers = [b for free in engine._pools[0]._free.values() for b in free]
    predicted = exchange_bytes(engine.layout, engine.config, rank)
    if transport == "auto" and world > 1:  # a later group on this host may read the optimizer's states
        buffers.append(engine._states_arena._block)
        predicted += aligned(optimizer_arena_bytes(engine.layout, engine.config, rank))
    spans = [
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in parts + buffers if t.numel()
    ]
    spans.sort()
    for (_, end), (begin, _) in itertools.pairwise(spans):
        assert 0 <= begin - end < 64, "one behind the other, aligned"
    return [spans[-1][1] - spans[0][0], predicted]


@pytest.mark.parametrize("transport", ["auto", "network"])
def test_model_states_lie_in_one_pre_allocated_block(transport: str) -> None:
    for world, stage in ((1, 2), (2, 0), (2, 1), (2, 2), (3, 3)):
        for span, predicted in run_ranks(world, in_one_block, stage, transport):
            assert predicted - 64 < span <= predicted


def litter(rank: int, world: int) -> int:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        engine = ZeroEngine(build(), ZeroConfig(stage=2, tile=64))
        engine.backward(engine(*batch(0, rank)))
        engine.step()
        engine.detach()
        del engine
        gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())) - before


def test_an_engine_that_is_detached_keeps_no_descriptor() -> None:
    for left in run_ranks(3, litter):
        assert left == 0


def test_settings_that_cannot_work_are_refused() -> None:
    from zero_core.errors import ConfigError

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"transport": "pigeon"}, "'auto' or 'network'"),
        ({"divergence_check": "maybe"}, "'always', 'first' or 'off'"),
        ({"prefetch_units": 2}, "must be 0 or 1"),
        ({"keep_gathered_bytes": 1, "stage": 2}, "at stage 3 only"),
        ({"keep_gathered_bytes": -1, "stage": 3}, "must not be negative"),
        ({"collective_timeout_s": 0}, "must be positive"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            ZeroConfig(**settings)
