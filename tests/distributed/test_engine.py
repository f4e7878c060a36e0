"""The engine against a plain single-process loop: every stage, N = 1 to 4, fp32 and bf16."""

import functools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as checkpoint_fn

from tests.distributed.odd_model import batch, build, plain_loop
from tests.distributed.ranks import RankFailedError, run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.errors import NonFiniteError, UsageError

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
    memory, budget = engine.memory(), engine.budget
    with engine.full_parameters():
        parameters = {
            n: p.detach().clone().numpy() if p.dtype != torch.bfloat16 else p.detach().float().numpy()
            for n, p in engine.module.named_parameters()
        }
    return {
        "losses": losses,
        "norms": norms,
        "parameters": parameters,
        "memory": memory,
        "budget": budget,
        "sent": reports[-1].bytes_sent,
        "psi": engine.layout.numel(trainable=True),
        "frozen_bytes": sum(u.numel * u.dtype.itemsize for u in engine.units if not u.unit.trainable),
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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ledger_is_two_psi_or_three(stage: int) -> None:
    """Over all ranks, one micro-batch each: exactly (N - 1) psi elements for each time the model moves."""
    results = run_ranks(3, train, stage, "fp32", 3, None, 2)
    psi, frozen_bytes = results[0]["psi"], results[0]["frozen_bytes"]
    kinds = ("reduce", "gather", "gather_backward")
    sent = {kind: sum(r["sent"].get(kind, 0) for r in results) for kind in kinds}
    assert sent["reduce"] == 2 * psi * 4
    if stage < 3:
        assert sent["gather"] == 2 * psi * 4
        assert sent["gather_backward"] == 0
    else:
        # Frozen units move as well, in both directions.
        assert sent["gather"] == sent["gather_backward"] == 2 * (psi * 4 + frozen_bytes)


def misuse(rank: int, world: int) -> list[str]:
    engine = ZeroEngine(build(), ZeroConfig(micro_batches=3, tile=64))
    messages = []

    def refused(call: Any) -> None:
        with pytest.raises(UsageError) as caught:
            call()
        messages.append(str(caught.value))

    refused(engine.step)
    refused(lambda: engine.backward(torch.zeros(2)))
    for number in (3.0, None):
        refused(lambda number=number: engine.backward(number))
    for index in engine.micro_batches:
        engine.backward(engine(*batch(0, index)))
    refused(lambda: engine(*batch(0, 0)))
    refused(lambda: engine.backward(torch.zeros(1)))
    with torch.no_grad():  # an evaluation between backward and step changes nothing (DeepSpeed issue 3599)
        engine(*batch(0, 0))
    assert engine.step().step == 1
    return messages


def test_misuse_is_a_clear_error_and_the_engine_goes_on() -> None:
    first, second = run_ranks(2, misuse)
    assert "has 2 micro-batches in this step, but backward was called 0 times" in first[0]
    assert "has 1 micro-batches" in second[0]
    assert "scalar loss" in first[1]
    assert "the loss as a tensor, got float" in first[2]
    assert "the loss as a tensor, got NoneType" in first[3]


def evaluate_anywhere(rank: int, world: int, stage: int, evaluating: bool) -> list[float]:
    """M = 3 on two ranks, so that one is idle in the last round; evaluations at every place of a step."""
    config = ZeroConfig(stage=stage, micro_batches=3, tile=64, optimizer=AdamWConfig(lr=1e-2))
    engine, losses = ZeroEngine(build(), config), []
    for step in range(3):
        for index in engine.micro_batches:
            loss = engine(*batch(step, index))
            if evaluating and index < world:  # a round that every rank computes
                with torch.no_grad():
                    engine(*batch(99, 0))
            engine.backward(loss)
        if evaluating:
            with torch.no_grad():
                engine(*batch(99, 1))
        losses.append(engine.step().loss)
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_an_evaluation_anywhere_in_a_step_changes_nothing(stage: int) -> None:
    plain = run_ranks(2, evaluate_anywhere, stage, False)
    assert run_ranks(2, evaluate_anywhere, stage, True) == plain
    assert len(set(plain[0])) == 3


def too_many_ranks(rank: int, world: int) -> None:
    ZeroEngine(build(), ZeroConfig(micro_batches=1))


def test_more_ranks_than_micro_batches_is_refused() -> None:
    with pytest.raises(RankFailedError, match="world size 2 exceeds the 1 micro-batches"):
        run_ranks(2, too_many_ranks)


def blow_up(rank: int, world: int) -> bool:
    """A gradient that is not finite on one rank only: an error on both, and nothing is updated."""
    engine = ZeroEngine(build(), ZeroConfig(stage=2, tile=64))
    before = [p.detach().clone() for p in engine.module.parameters()]
    loss = engine(*batch(0, rank))
    engine.backward(loss * float("inf") if rank == 1 else loss)
    with pytest.raises(NonFiniteError, match="gradient norm"):
        engine.step()
    unchanged = all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    engine.backward(engine(*batch(0, rank)))
    return unchanged and engine.step().step == 1


def test_a_non_finite_gradient_is_an_error_on_every_rank() -> None:
    assert run_ranks(2, blow_up) == [True, True]


def checkpointed(rank: int, world: int, stage: int) -> tuple[list[float], list[float]]:
    """Activation checkpointing, a block used twice, and a frozen block (DeepSpeed issues 8130, 2103)."""

    def losses(recompute: bool) -> list[float]:
        model = build()
        if recompute:
            for block in model.blocks:
                block.forward = functools.partial(checkpoint_fn, block.forward, use_reentrant=False)
        model.blocks.append(model.blocks[0])
        engine = ZeroEngine(model, ZeroConfig(stage=stage, tile=64, optimizer=AdamWConfig(lr=1e-2)))
        found = []
        for step in range(4):
            engine.backward(engine(*batch(step, rank)))
            found.append(engine.step().loss)
        return found

    return losses(False), losses(True)


@pytest.mark.parametrize("stage", [2, 3])
def test_activation_checkpointing_changes_nothing(stage: int) -> None:
    for plain, recomputed in run_ranks(2, checkpointed, stage):
        assert plain == recomputed
        assert plain[-1] < plain[0]
