"""Activation checkpointing in the engine: the same bits, fewer bytes, at every stage."""

import hashlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.odd_model import batch
from tests.distributed.ranks import RankFailedError, run_ranks
from workers.model_shapes import gpt_activation_bytes
from workers.models import build_model
from workers.spec import JobSpec
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.budget import aligned

pytestmark = pytest.mark.distributed

WIDTH, VOCABULARY, MICRO_BATCHES, STEPS = 13, 29, 5, 2


class LowRank(nn.Module):
    """A frozen matrix and a trainable update of low rank (LoRA), dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, *, more: Any) -> Any:
        scale, nothing = more["scale"], more["nothing"]
        assert mask is None
        assert nothing is None
        update = self.up(F.dropout(self.down(x), 0.3, self.training))
        return {"x": x + scale * F.gelu(self.base(x) + update), "rest": (None, update.mean())}


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)
        self.back = nn.Linear(3 * WIDTH, WIDTH)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> "Opaque":
        return Opaque(x + self.back(torch.tanh(self.linear(x))))


@dataclass(frozen=True)
class Opaque:
    """An output that torch cannot look into, so that no hook announces its gradient."""

    x: torch.Tensor


class Readout(nn.Module):
    """Takes a parameter of the root among its arguments: a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(x), weight)


class Hard(nn.Module):
    """Everything that makes recomputation hard, in one small model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        again = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([LowRank(), Frozen(), LowRank(), Readout()])
        self.repeated = nn.ModuleList([again] * 6)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, extra = self.embed(inputs), 0.0
        scale = torch.ones(WIDTH, dtype=x.dtype)
        for block in (self.blocks[0], self.blocks[2], self.blocks[0]):
            out = block(x, None, more={"scale": scale, "nothing": None})
            x, extra = out["x"], extra + out["rest"][1]
            x = self.blocks[1](x).x
        for again in self.repeated:
            x = torch.tanh(again(x))
        logits = self.blocks[3](x, self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) + extra.float()


def fingerprint(stage: int, precision: str, checkpointing: str, *, reproducible: bool = False) -> Any:
    """Losses, norms and the hash of all parameters; M = 5 on two ranks, so one is idle in the last round."""
    torch.manual_seed(3)
    config = ZeroConfig(
        stage=stage,
        precision=precision,
        micro_batches=MICRO_BATCHES,
        optimizer=AdamWConfig(lr=1e-2),
        clip_norm=0.5,
        tile=64,
        staging_bytes=4096,
        reproducible=reproducible,
        activation_checkpointing=checkpointing,
    )
    engine = ZeroEngine(Hard(), config)
    found = []
    for step in range(STEPS):
        for index in engine.micro_batches:
            torch.manual_seed(1000 * step + index)
            engine.backward(engine(*batch(step, index)))
        report = engine.step()
        found += [report.loss, report.grad_norm]
    hashed = hashlib.sha256()
    with engine.full_parameters():
        for _, parameter in sorted(engine.module.named_parameters()):
            hashed.update(parameter.detach().float().numpy().tobytes())
    memory, budget = engine.memory(), engine.budget
    for category in ("parameters", "gradients", "optimizer_states", "padding"):
        assert getattr(memory, category) == getattr(budget, category), category
    assert (memory.checkpoints > 0) == (memory.recomputed > 0) == (checkpointing == "unit")
    return found, hashed.hexdigest()


def all_agree(rank: int, world: int) -> list[str]:
    wrong = []
    for precision in ("fp32", "bf16"):
        want = fingerprint(0, precision, "none")
        assert want[0][0] != want[0][2], "the model learns"
        for stage in (0, 1, 2, 3):
            if fingerprint(stage, precision, "unit") != want:
                wrong.append(f"{precision}, stage {stage}")
    return wrong


def test_recomputed_units_give_the_same_bits_at_every_stage() -> None:
    """DeepSpeed 8130 (E15): frozen parameters under recomputation at stage 3; 2103 (E16): one layer used six
    times; 598 (E21): None among the arguments. With dropout, accumulation, a tied head,
    dicts, tuples and an opaque object as outputs."""
    assert run_ranks(2, all_agree) == [[], []]


def reproducible(rank: int, world: int, stage: int, checkpointing: str) -> Any:
    return fingerprint(stage, "bf16", checkpointing, reproducible=True)


def test_recomputed_units_give_the_same_bits_for_every_number_of_ranks() -> None:
    want = run_ranks(1, reproducible, 2, "none")
    assert run_ranks(2, reproducible, 3, "unit") == 2 * want
    assert run_ranks(3, reproducible, 1, "unit") == 3 * want


LENGTH, SAMPLES, LAYERS, HIDDEN = 32, 3, 6, 48


def gpt_spec(precision: str, dropout: float) -> JobSpec:
    model = {
        "kind": "gpt",
        "layers": LAYERS,
        "hidden": HIDDEN,
        "heads": 3,
        "vocabulary": 67,
        "dropout": dropout,
    }
    return JobSpec.model_validate(
        {
            "data": {"kind": "synthetic"},
            "model": model,
            "steps": 1,
            "global_batch": 2 * SAMPLES,
            "micro_batch": SAMPLES,
            "sequence_length": LENGTH,
            "precision": precision,
        }
    )


def activation_bytes(rank: int, world: int, stage: int, precision: str, dropout: float) -> Any:
    measured = []
    for checkpointing in ("none", "unit"):
        spec = gpt_spec(precision, dropout)
        config = ZeroConfig(stage=stage, precision=precision, activation_checkpointing=checkpointing)
        engine = ZeroEngine(build_model(spec), config)
        tokens = torch.randint(0, 67, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(rank))
        for _ in range(2):  # the second micro-batch finds the block
            engine.backward(engine(tokens, tokens))
            engine.step()
        measured.append(engine.memory())
        buffers, predicted = measured[-1].communication_buffers, engine.budget.communication_buffers
        assert buffers == predicted, "recomputation holds no unit longer than backward does anyway"
    return measured


@pytest.mark.parametrize(("stage", "precision", "dropout"), [(2, "fp32", 0.0), (3, "bf16", 0.1)])
def test_activations_drop_as_predicted(stage: int, precision: str, dropout: float) -> None:
    spec = gpt_spec(precision, dropout)
    predicted = [
        gpt_activation_bytes(
            spec.model,  # type: ignore[arg-type]
            sequence_length=LENGTH,
            micro_batch=SAMPLES,
            precision=spec.precision,
            checkpointing=checkpointing,  # type: ignore[arg-type]
        )
        for checkpointing in ("none", "unit")
    ]
    stream = SAMPLES * LENGTH * HIDDEN * (4 if precision == "fp32" else 2)
    for whole, recomputing in run_ranks(2, activation_bytes, stage, precision, dropout):
        assert whole.activations == pytest.approx(predicted[0], rel=0.02)
        assert recomputing.activations == pytest.approx(predicted[1], rel=0.02)
        assert recomputing.activations < whole.activations / 2.5
        assert recomputing.checkpoints == LAYERS * aligned(stream)
        assert recomputing.checkpoints + recomputing.recomputed < 1.05 * recomputing.activations
        assert (whole.checkpoints, whole.recomputed) == (0, 0)
        held = recomputing.model_states + recomputing.communication_buffers + recomputing.padding
        unaccounted = recomputing.resident - recomputing.baseline - held - recomputing.checkpoints
        assert recomputing.fragmentation == max(0, unaccounted)


def detach(rank: int, world: int) -> None:
    engine = ZeroEngine(Hard(), ZeroConfig(stage=1, activation_checkpointing="unit"))
    engine.detach()
    assert not any("forward" in vars(module) for module in engine.module.modules())
    engine.module(*batch(0, 0)).backward()
    ZeroEngine(Hard(), ZeroConfig(activation_checkpointing="unit", checkpoint_offload=True))


def test_detach_takes_the_wrapping_off_and_a_cpu_cannot_offload() -> None:
    with pytest.raises(RankFailedError, match="are in host memory already"):
        run_ranks(1, detach)
