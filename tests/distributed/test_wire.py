"""Bytes on the wire, as the interfaces of ranks on separate hosts count them, against formula and ledger."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed import namespaces
from tests.distributed.odd_model import batch, build
from tests.distributed.ranks import run_ranks
from zero_core import ZeroConfig, ZeroEngine

WIDTH, LAYERS, STEPS = 512, 6, 2
PSI = LAYERS * (WIDTH * WIDTH + WIDTH)  # 1,575,936
VOLUMES = {0: 2, 1: 2, 2: 2, 3: 3}
"""In psi (N - 1) / N elements a rank and step (ZeRO, arXiv 1910.02054, section 7)."""


@pytest.fixture(scope="module")
def _namespaces_allowed() -> None:
    reason = namespaces.refusal()
    if reason is not None:
        pytest.skip(reason)


def _steps(rank: int, world_size: int, stages: list[int], interface: str) -> dict[int, dict[str, Any]]:
    """For each stage: what this rank's interface sent in STEPS steps, and its ledger."""
    found = {}
    for stage in stages:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        engine = ZeroEngine(model, ZeroConfig(stage=stage))
        inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))
        ledger: dict[str, int] = {}
        for step in range(1 + STEPS):
            if step == 1:  # after a first step that opens connections
                dist.barrier()
                before = namespaces.sent(interface)
            engine.backward(engine(inputs).square().mean())
            report = engine.step()
            if step:
                for kind, count in report.bytes_sent.items():
                    ledger[kind] = ledger.get(kind, 0) + count
        dist.barrier()  # it follows the data through the same sockets, so the data has left
        found[stage] = {"wire": namespaces.sent(interface).since(before), "ledger": ledger}
        engine.detach()
    return found


@pytest.mark.distributed
@pytest.mark.usefixtures("_namespaces_allowed")
@pytest.mark.parametrize(("world_size", "stages"), [(2, [0, 1, 2, 3]), (3, [2, 3])])
def test_interfaces_count_what_the_paper_and_the_ledger_say(world_size: int, stages: list[int]) -> None:
    with namespaces.separate_hosts(world_size) as hosts:
        answers = run_ranks(world_size, _steps, stages, hosts[0].interface, hosts=hosts)
    for stage in stages:
        expected = STEPS * VOLUMES[stage] * PSI * (world_size - 1) * 4  # all ranks, fp32
        wire = sum(answer[stage]["wire"].bytes for answer in answers)
        assert expected < wire < 1.02 * expected, f"stage {stage}: {wire} bytes sent, {expected} expected"
        kinds = [answer[stage]["ledger"] for answer in answers]
        data = sum(count for ledger in kinds for kind, count in ledger.items() if kind != "control")
        assert data == expected, f"stage {stage}: the ledger has {data} bytes, {expected} expected"
        for rank, answer in enumerate(answers):
            ledger, payload = sum(answer[stage]["ledger"].values()), answer[stage]["wire"].payload
            # Beyond the ledger: what gloo puts before a message, and the two barriers.
            assert ledger < payload < 1.01 * ledger, f"stage {stage}, rank {rank}: {payload} for {ledger}"


def _two_and_two(rank: int, world_size: int, stage: int) -> tuple[list[float], dict[str, int]]:
    config = ZeroConfig(stage=stage, micro_batches=6, tile=64, staging_bytes=4096, clip_norm=0.5)  # type: ignore[arg-type]
    engine, found = ZeroEngine(build(), config), []
    for step in range(3):
        for index in engine.micro_batches:
            engine.backward(engine(*batch(step, index)))
        report = engine.step()
        found += [report.loss, report.grad_norm]
    engine.detach()
    return found, report.bytes_by_transport


@pytest.mark.distributed
@pytest.mark.usefixtures("_namespaces_allowed")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_who_sits_where_changes_no_bit(stage: int) -> None:
    """Two hosts of two ranks: within a host by memory, between them by network, idle ranks included."""
    together = run_ranks(4, _two_and_two, stage)
    with namespaces.separate_hosts(2) as (first, second):
        apart = run_ranks(4, _two_and_two, stage, hosts=[first, second, first, second])
    for (want, near), (got, mixed) in zip(together, apart, strict=True):
        assert got == want
        assert near.get("network", 0) == 0
        assert mixed["shared"] > 0
        assert mixed["network"] > 0


@pytest.mark.usefixtures("_namespaces_allowed")
def test_hosts_are_removed_even_after_a_failure() -> None:
    made: list[Path] = []

    def fail() -> None:
        with namespaces.separate_hosts(3) as hosts:
            made.extend(Path("/run/netns", host.namespace) for host in hosts)
            assert all(path.exists() for path in made)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert len(made) == 3
    assert not any(path.exists() for path in made)
