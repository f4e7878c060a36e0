"""Training with widened products: the same bits at every stage, recomputed or not, and near fp32."""

from typing import Any

import pytest
import torch

from tests.distributed import odd_model
from tests.distributed.ranks import RankFailedError, run_ranks
from workers.models import GPT
from workers.spec import GPTModel
from zero_core import AdamWConfig, LossScale, ZeroConfig, ZeroEngine
from zero_core.config import Precision

pytestmark = pytest.mark.distributed

STEPS, MICRO_BATCHES, SEQUENCE = 4, 3, 6
STAGES = (0, 1, 2, 3)


class Both(torch.nn.Module):
    """Attention and dropout, beside the frozen and tied parameters of the odd model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        model = GPTModel(layers=2, hidden=16, heads=2, vocabulary=29, dropout=0.1)
        self.gpt = GPT(model, sequence_length=SEQUENCE)
        self.odd = odd_model.build()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(inputs, targets) + self.odd(inputs, targets)
        return loss


def train(rank: int, stage: int, precision: Precision, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "stage": stage,
        "precision": precision,
        "micro_batches": MICRO_BATCHES,
        "optimizer": AdamWConfig(lr=5e-3),
        "loss_scale": LossScale(initial=256.0),
        "low_precision_products": "widened",
        "clip_norm": 1.0,
        "tile": 64,
    }
    engine = ZeroEngine(Both(), ZeroConfig(**(fields | changes)))
    losses, norms = [], []
    for step in range(STEPS):
        for index in engine.micro_batches:
            torch.manual_seed(100 * step + index)
            engine.backward(engine(*odd_model.batch(step, index)))
        report = engine.step()
        assert not report.skipped
        losses.append(report.loss)
        norms.append(report.grad_norm)
    with torch.no_grad():
        engine.eval()
        evaluated = float(engine(*odd_model.batch(STEPS, 0)))
    memory, budget = engine.memory(), engine.budget
    for category in ("parameters", "gradients", "optimizer_states", "padding", "communication_buffers"):
        assert getattr(memory, category) == getattr(budget, category), category
    return {"bits": (losses, norms, evaluated), "losses": losses, "saved": memory.activations}


def runs(rank: int, world: int, precision: Precision) -> dict[str, Any]:
    found = {
        f"stage {stage}, {checkpointing}": train(
            rank, stage, precision, activation_checkpointing=checkpointing
        )
        for stage in STAGES
        for checkpointing in ("none", "unit")
    }
    found["native"] = train(rank, 3, precision, low_precision_products="native")
    found["reproducible"] = train(rank, 2, precision, reproducible=True)
    found["fp32"] = train(rank, 1, "fp32")
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_stages_agree_to_the_bit_and_losses_are_near_fp32s(precision: Precision) -> None:
    first, second = run_ranks(2, runs, precision, timeout_s=600)
    staged = {name: run for name, run in first.items() if name.startswith("stage")}
    want = staged["stage 0, none"]
    assert {repr(run["bits"]) for run in staged.values()} == {repr(want["bits"])}
    assert {repr(second[name]["bits"]) for name in staged} == {repr(want["bits"])}
    near = 2e-2 if precision == "bf16" else 5e-3
    for name in ("native", "fp32", "reproducible"):
        assert want["losses"] == pytest.approx(first[name]["losses"], rel=near)
    assert first["stage 3, none"]["saved"] == first["native"]["saved"], "nothing is saved in fp32"


def reproducible(rank: int, world: int) -> Any:
    return train(rank, 2, "bf16", reproducible=True)["bits"]


def test_the_reproducible_mode_gives_the_same_bits_for_every_number_of_ranks() -> None:
    found = [run_ranks(world, reproducible, timeout_s=300)[0] for world in (1, 2, 3)]
    assert found[0] == found[1] == found[2]


def apart(rank: int, world: int) -> None:
    train(rank, 1, "bf16", low_precision_products="widened" if rank else "native")


def test_settings_that_differ_between_ranks_are_refused() -> None:
    with pytest.raises(RankFailedError, match="low_precision_products is 'widened' on rank 1 and 'native'"):
        run_ranks(2, apart, timeout_s=300)
