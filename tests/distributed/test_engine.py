"""The engine against a plain single-process loop: every stage, N = 1 to 4, fp32 and bf16."""

from typing import Any

import pytest
import torch

from tests.distributed.odd_model import batch, build, plain_loop
from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine

pytestmark = pytest.mark.distributed

STEPS = 20
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def train(
    rank: int, world: int, stage: int, precision: str, micro_batches: int, clip: float | None, steps: int
) -> Any:
    config = ZeroConfig(
        stage=stage,
        precision=precision,
        micro_batches=micro_batches,
        clip_norm=clip,
        optimizer=AdamWConfig(**ADAMW),
        tile=64,
        staging_bytes=4096,
    )
    engine = ZeroEngine(build(), config)
    losses, norms, reports = [], [], []
    for step in range(steps):
        for index in engine.micro_batches:
            engine.backward(engine(*batch(step, index)))
        report = engine.step()
        losses.append(report.loss)
        norms.append(report.grad_norm)
        reports.append(report)
    with engine.full_parameters():
        parameters = {
            n: p.detach().clone().numpy() if p.dtype != torch.bfloat16 else p.detach().float().numpy()
            for n, p in engine.module.named_parameters()
        }
    memory, budget = engine.memory(), engine.budget
    return {
        "losses": losses,
        "norms": norms,
        "parameters": parameters,
        "memory": memory,
        "budget": budget,
        "sent": reports[-1].bytes_sent,
    }


@pytest.fixture(scope="module")
def references() -> dict[int, Any]:
    return {m: plain_loop(STEPS, m, clip_norm=0.5, **dict(ADAMW)) for m in (4, 5)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "micro_batches"), [(1, 4), (2, 5), (3, 5), (4, 4)])
def test_fp32_equals_plain_loop(
    stage: int, world: int, micro_batches: int, references: dict[int, Any]
) -> None:
    want = references[micro_batches]
    results = run_ranks(world, train, stage, "fp32", micro_batches, 0.5, STEPS)
    for got in results:
        torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-5, atol=0)
        torch.testing.assert_close(got["norms"], want["norms"], rtol=1e-5, atol=0)
        for name, tensor in want["parameters"].items():
            torch.testing.assert_close(
                torch.from_numpy(got["parameters"][name]), tensor, rtol=1e-5, atol=1e-6, msg=name
            )


def test_stages_agree_to_the_bit() -> None:
    for precision in ("fp32", "bf16"):
        runs = [run_ranks(3, train, stage, precision, 5, 0.5, 8)[0] for stage in (0, 1, 2, 3)]
        for other in runs[1:]:
            assert other["losses"] == runs[0]["losses"]
            assert other["norms"] == runs[0]["norms"]
            for name, array in runs[0]["parameters"].items():
                assert (other["parameters"][name] == array).all(), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batches", [3, 7])
def test_memory_is_what_the_budget_predicts(stage: int, precision: str, micro_batches: int) -> None:
    for got in run_ranks(3, train, stage, precision, micro_batches, None, 2):
        memory, budget = got["memory"], got["budget"]
        for category in ("parameters", "gradients", "optimizer_states", "padding", "communication_buffers"):
            assert getattr(memory, category) == getattr(budget, category), category
        assert memory.activations > 0
