"""Faults that other engines had in scaling, adding up and measuring gradients, each with what is right."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.odd_model import batch, build
from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, SGDConfig, ZeroConfig, ZeroEngine

pytestmark = pytest.mark.distributed


def bf16_steps(rank: int, world: int) -> list[tuple[list[float], list[float], dict[str, bytes]]]:
    found = []
    for stage in (0, 1):
        config = ZeroConfig(
            stage=stage, precision="bf16", micro_batches=4, tile=64, optimizer=AdamWConfig(lr=5e-3)
        )
        engine = ZeroEngine(build(), config)
        reports = []
        for step in range(5):
            for index in engine.micro_batches:
                engine.backward(engine(*batch(step, index)))
            reports.append(engine.step())
        parameters = {n: p.detach().float().numpy().tobytes() for n, p in engine.module.named_parameters()}
        found.append(([r.grad_norm for r in reports], [r.loss for r in reports], parameters))
    return found


def test_stage_0_equals_stage_1_in_bf16() -> None:
    """E1 (DeepSpeed issue 7837): stage 0 scaled its gradients wrongly and did not clear them."""
    for zero, one in run_ranks(2, bf16_steps):
        assert zero == one
        assert max(zero[0]) < 10 * min(zero[0]), "gradients of past steps are not in the norm"


class Linear(nn.Module):
    """A mean loss over samples that are all of one size, so that micro-batches add up to a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def samples(step: int) -> torch.Tensor:
    """[8 micro-batches, 2 samples, 7]"""
    return torch.randn(8, 2, 7, generator=torch.Generator().manual_seed(step))


def accumulate_four(rank: int, world: int) -> list[Any]:
    found = []
    for stage in (0, 1, 2, 3):
        optimizer = SGDConfig(lr=0.5, momentum=0.9)
        engine = ZeroEngine(Linear(), ZeroConfig(stage=stage, micro_batches=8, tile=64, optimizer=optimizer))
        norms = []
        for step in range(3):
            for index in engine.micro_batches:
                engine.backward(engine(samples(step)[index]))
            norms.append(engine.step().grad_norm)
        with engine.full_parameters():
            found.append((norms, [p.detach().clone().numpy() for p in engine.module.parameters()]))
    return found


def test_four_accumulated_micro_batches_are_one_big_batch() -> None:
    """E3 (open-instruct issue 1498): stage 2 kept only the last of several backward calls before a step.

    E4 (DeepSpeed issue 6550): the index of the accumulation was off by one from the second step on.
    """
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    wanted = []
    for step in range(3):
        model(samples(step).flatten(0, 1)).backward()
        wanted.append(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
        optimizer.step()
        optimizer.zero_grad()
    for stages in run_ranks(2, accumulate_four):
        for norms, parameters in stages:
            assert norms == pytest.approx(wanted, rel=1e-5)
            for got, want in zip(parameters, model.parameters(), strict=True):
                torch.testing.assert_close(torch.from_numpy(got), want.detach(), rtol=1e-5, atol=1e-6)


class Ones(nn.Module):
    """The gradient of every one of its 120 elements is 1; on several ranks they have different owners."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(10, 8))
        self.rows = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in (1, 9, 30))

    def forward(self) -> torch.Tensor:
        total: torch.Tensor = self.matrix.sum() + sum(row.sum() for row in self.rows)
        return total.float()


def norms_of_ones(rank: int, world: int) -> set[float]:
    return {
        _norm(ZeroConfig(stage=stage, reproducible=mode, tile=64, micro_batches=micro_batches))
        for stage in (0, 1, 2, 3)
        for mode in (False, True)
        for micro_batches in (world, 2 * world)
    }


def _norm(config: ZeroConfig) -> float:
    engine = ZeroEngine(Ones(), config)
    engine.steps_done = 4  # past the steps in which each micro-batch also measures the process
    for _ in engine.micro_batches:
        engine.backward(engine())
    return engine.step().grad_norm


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_norm_counts_every_element_once(world: int) -> None:
    """E5 (PyTorch issue 88955), E6 (VeOmni issue 184): replicated parameters were counted once for each rank.

    E7 (DeepSpeed issue 8475): norms were averaged over ranks that own different parameters, which made 7.2
    of the square root of 120.
    """
    for norms in run_ranks(world, norms_of_ones):
        assert list(norms) == [pytest.approx(math.sqrt(120), rel=1e-7)]


def many_ones(rank: int, world: int) -> list[float]:
    found = []
    for stage, reproducible in ((0, False), (2, True)):
        config = ZeroConfig(
            stage=stage, precision="bf16", micro_batches=512, tile=64, reproducible=reproducible
        )
        found.append(_norm(config))
    return found


def test_many_ones_add_up_in_bf16() -> None:
    """E17 (DeepSpeed issue 1800, PyTorch issue 106395): a thousand ones summed in bf16 stop at 256.

    Each of 512 micro-batches has a gradient of 1 / 512, so the mean gradient is exactly 1, and not a half.
    """
    (norms,) = run_ranks(1, many_ones)
    assert norms == [pytest.approx(math.sqrt(120), rel=1e-7)] * 2
