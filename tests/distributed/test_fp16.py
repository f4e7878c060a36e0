"""fp16 with dynamic loss scaling: growth, skipped steps, the floor, equal bits at every stage, resume."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.odd_model import batch, build
from tests.distributed.ranks import run_ranks
from zero_core import (
    AdamWConfig,
    LossScale,
    ScheduleConfig,
    SGDConfig,
    ZeroConfig,
    ZeroEngine,
    checkpoint,
)
from zero_core.checkpoint import manifest
from zero_core.errors import LossScaleError, NonFiniteError

pytestmark = pytest.mark.distributed

STEPS, MICRO_BATCHES = 10, 5

# So large that the first steps overflow, and growing so soon that it overflows again later.
SCALE = LossScale(initial=2.0**17, growth_interval=2)


def engine_at(stage: int, **changes: Any) -> ZeroEngine:
    fields: dict[str, Any] = {
        "stage": stage,
        "precision": "fp16",
        "micro_batches": MICRO_BATCHES,
        "clip_norm": 0.5,
        "optimizer": AdamWConfig(lr=5e-3),
        "schedule": ScheduleConfig(kind="linear", total_steps=STEPS, warmup_steps=2),
        "loss_scale": SCALE,
        "tile": 64,
        "staging_bytes": 4096,
    }
    return ZeroEngine(build(), ZeroConfig(**(fields | changes)))


def masters(engine: ZeroEngine) -> bytes:
    """Masters and moments, gathered whole."""
    found = b""
    for state in engine.optimizer.states:
        for kind in state.kinds:
            flat = torch.zeros(state.unit.padded)
            flat[state.start : state.stop] = getattr(state, kind)
            engine.collectives.gather_from_owners(
                flat, state.unit.chunk, state.unit.numel, kind="test", tag=0
            )
            found += flat[: state.unit.numel].numpy().tobytes()
    return found


def train(engine: ZeroEngine, steps: range) -> list[dict[str, Any]]:
    told = []
    for step in steps:
        before = masters(engine)
        for index in engine.micro_batches:
            engine.backward(engine(*batch(step, index)))
        report = engine.step()
        assert (masters(engine) == before) == (report.skipped or report.lr["default"] == 0)
        told.append(
            {
                "loss": report.loss,
                "norm": report.grad_norm,
                "lr": report.lr["default"],
                "skipped": report.skipped,
                "skips": report.skipped_steps,
                "scale": report.loss_scale,
                "counts": (report.step, engine.steps_done, engine.optimizer.steps_done),
            }
        )
    return told


def whole_runs(rank: int, world: int) -> list[Any]:
    """Every stage, with memory as predicted; and the losses of fp32 that never moves."""
    answers: list[Any] = []
    for stage in (0, 1, 2, 3):
        engine = engine_at(stage)
        told = train(engine, range(STEPS))
        memory, budget = engine.memory(), engine.budget
        for category in ("parameters", "gradients", "optimizer_states", "padding", "communication_buffers"):
            assert getattr(memory, category) == getattr(budget, category), category
        answers.append((repr(told), masters(engine)))
    at_rest = train(engine_at(2, precision="fp32", optimizer=SGDConfig(lr=0.0)), range(STEPS))
    return [*answers, told, [entry["loss"] for entry in at_rest]]


def test_scale_skips_and_bits_at_every_stage() -> None:
    """E2 (DeepSpeed issues 966, 1488, 1945): tied layers, fp16, accumulation: equal losses at every stage."""
    results = run_ranks(3, whole_runs)
    assert len({repr(r[:4]) for r in results}) == 1, "every rank decides the same"
    *stages, told, at_rest = results[0]
    assert len(set(stages)) == 1
    skipped = [entry["skipped"] for entry in told]
    assert skipped[0]
    assert not all(skipped)
    updates, scale, good, skips = 0, SCALE.initial, 0, 0
    for step, entry in enumerate(told):
        assert entry["scale"] == scale
        # The schedule goes by updates: two of warm-up, then linear down to a tenth.
        due = (0.5, 1.0)[updates] if updates < 2 else 0.1 + 0.9 * (1 - (updates - 2) / (STEPS - 3))
        assert entry["lr"] == pytest.approx(5e-3 * due)
        if entry["skipped"]:
            scale, good, skips = scale / 2, 0, skips + 1
            assert not math.isfinite(entry["norm"])
        else:
            updates, good = updates + 1, good + 1
            if good == SCALE.growth_interval:
                scale, good = scale * 2, 0
        assert math.isfinite(entry["loss"])
        assert entry["skips"] == skips
        assert entry["counts"] == (step + 1, step + 1, updates)
    assert max(e["scale"] for e in told[skipped.index(False) :]) > told[skipped.index(False)]["scale"], "grew"
    # A skipped step leaves parameters as they were, so the first losses are those of an fp32 model at rest.
    first = skipped.index(False)
    assert [e["loss"] for e in told[: first + 1]] == pytest.approx(at_rest[: first + 1], rel=5e-3)


def unscaled(rank: int, world: int) -> list[tuple[float, float, bytes]]:
    """The first step of fp16 at three scales, and of fp32: norm, mean loss, masters."""
    found = []
    for scale in (1.0, 64.0, 4096.0):
        engine = engine_at(
            2, loss_scale=LossScale(initial=scale), optimizer=SGDConfig(lr=0.1), clip_norm=None
        )
        train_one = train(engine, range(1))[0]
        found.append((train_one["norm"], train_one["loss"], masters(engine)))
    fp32 = engine_at(2, precision="fp32", optimizer=SGDConfig(lr=0.1), clip_norm=None)
    train_one = train(fp32, range(1))[0]
    found.append((train_one["norm"], train_one["loss"], masters(fp32)))
    return found


def _floats(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.float32)


def test_the_scale_leaves_norm_and_update_as_they_are() -> None:
    """E1 (DeepSpeed issue 7837) in fp16: gradients are unscaled once, whatever the scale is."""
    *scaled, (norm, loss, want) = run_ranks(2, unscaled)[0]
    for got_norm, got_loss, got in scaled:
        assert got_norm == pytest.approx(norm, rel=2e-2)
        assert got_loss == pytest.approx(loss, rel=2e-3)
        torch.testing.assert_close(_floats(got), _floats(want), rtol=0, atol=2e-3)


def save_in_mid_run(rank: int, world: int, root: Path) -> Any:
    engine = engine_at(2)
    train(engine, range(5))
    checkpoint.save(engine, root, extra={}, generation=1)
    return repr(train(engine, range(5, STEPS))), masters(engine)


def go_on(rank: int, world: int, root: Path, stage: int) -> Any:
    engine = engine_at(stage)
    info = manifest.latest(root)
    assert info is not None
    checkpoint.load(engine, info.path)
    assert engine.steps_done == info.step == 5
    assert engine.optimizer.steps_done < 5
    assert engine.gate.skipped == 5 - engine.optimizer.steps_done
    return repr(train(engine, range(5, STEPS))), masters(engine)


def test_a_resume_in_mid_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    """Scale, good steps in a row, skipped steps, updates and schedule are state like the moments."""
    want = run_ranks(2, save_in_mid_run, tmp_path)
    saved = manifest.read(manifest.scan(tmp_path)[0].path)
    assert saved.step == 5
    assert saved.updates is not None
    assert saved.loss_scale is not None
    assert saved.loss_scale["skipped"] == 5 - saved.updates > 0
    for stage in (0, 3):
        assert run_ranks(2, go_on, tmp_path, stage) == want


def overflow(rank: int, world: int) -> str:
    """One rank's gradient is inf at every scale: skipped down to the floor, then an error on all ranks."""
    engine = engine_at(1, micro_batches=2, loss_scale=LossScale(initial=8.0, floor=2.0))
    start = masters(engine)
    for step in range(2):
        engine.backward(engine(*batch(step, rank)) * (1e6 if rank == 1 else 1.0))
        report = engine.step()
        assert report.skipped
        assert report.clip_coefficient == 0.0
        assert report.skipped_steps == step + 1
    engine.backward(engine(*batch(2, rank)) * (1e6 if rank == 1 else 1.0))
    with pytest.raises(LossScaleError) as caught:
        engine.step()
    assert isinstance(caught.value, NonFiniteError)
    assert (engine.steps_done, engine.optimizer.steps_done) == (2, 0)
    assert masters(engine) == start
    engine.backward(engine(*batch(2, rank)))  # and the engine goes on
    assert not engine.step().skipped
    return str(caught.value)


def test_an_overflow_at_the_floor_is_an_error_that_says_so() -> None:
    first, second = run_ranks(2, overflow)
    assert first == second
    assert "loss scale is at its floor of 2 (2 steps were skipped so far)" in first
    assert "lower the learning rate" in first


class NanLoss(nn.Module):
    """A loss that is nan while its gradient is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 5))

    def forward(self, value: float) -> torch.Tensor:
        return self.weight.float().sum() + value


def nan_loss(rank: int, world: int) -> None:
    for precision in ("fp32", "bf16"):
        engine = ZeroEngine(NanLoss(), ZeroConfig(precision=precision, stage=2, tile=64))
        engine.backward(engine(math.nan if rank == 1 else 0.0))
        with pytest.raises(NonFiniteError, match="mean loss nan after step 0: parameters are unchanged"):
            engine.step()
        assert torch.equal(engine.module.weight, torch.ones_like(engine.module.weight))
        engine.backward(engine(0.0))
        assert engine.step().step == 1
    scale = LossScale(initial=2.0**10)
    engine = ZeroEngine(NanLoss(), ZeroConfig(precision="fp16", stage=2, tile=64, loss_scale=scale))
    engine.backward(engine(math.nan if rank == 1 else 0.0))
    report = engine.step()
    assert report.skipped
    assert math.isfinite(report.grad_norm)
    assert torch.equal(engine.module.weight, torch.ones_like(engine.module.weight))


def test_a_nan_loss_with_finite_gradients_updates_nothing() -> None:
    run_ranks(2, nan_loss)
