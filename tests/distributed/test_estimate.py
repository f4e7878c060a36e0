"""The planner's estimate against what a running engine holds and sends (DeepSpeed issue 5102)."""

from fractions import Fraction
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.ranks import run_ranks
from zero_core import ZeroConfig, ZeroEngine
from zero_core.budget import tile_rounding
from zero_core.config import ITEM_BYTES, Stage
from zero_core.estimate import Training, model_states, wire_elements

pytestmark = pytest.mark.distributed

WIDTH, LAYERS, TILE = 16, 3, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Stack(nn.Module):
    """Linear layers of `width`, without biases; 16 x 16 elements of each are whole tiles on two ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, width] -> scalar loss."""
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.float().square().mean()


def measure(rank: int, world: int, width: int) -> dict[tuple[int, str, int], dict[str, Any]]:
    """What each stage, precision and number of micro-batches really takes, by (stage, precision, M)."""
    found = {}
    for stage in get_args(Stage):
        for precision, dtype in DTYPES.items():
            for micro_batches in (world, 2 * world):
                config = ZeroConfig(
                    stage=stage,
                    precision=precision,
                    micro_batches=micro_batches,
                    tile=TILE,
                    staging_bytes=4096,
                )
                engine = ZeroEngine(Stack(width), config)
                for _ in engine.micro_batches:
                    engine.backward(engine(torch.ones(2, width, dtype=dtype)))
                report, memory = engine.step(), engine.memory()
                found[stage, precision, micro_batches] = {
                    "states": (memory.parameters, memory.gradients, memory.optimizer_states),
                    "padding": memory.padding,
                    "rounding": tile_rounding(engine.layout, config, rank),
                    "budget": engine.budget,
                    "sent": report.bytes_sent,
                }
    return found


def test_what_is_estimated_is_what_is_measured() -> None:
    """There an estimator had no stage 1 and wrong multipliers; here it holds to the byte and the element."""
    psi = LAYERS * WIDTH**2
    ranks = run_ranks(2, measure, WIDTH)
    for (stage, precision, micro_batches), first in ranks[0].items():
        training = Training(dp=2, precision=precision, micro_batches=micro_batches)
        states = model_states(psi, training, stage)
        for found in (first, ranks[1][stage, precision, micro_batches]):
            assert found["states"] == (states.parameters, states.gradients, states.optimizer_states)
            assert (found["padding"], found["rounding"]) == (0, 0)
        item = ITEM_BYTES[precision]
        for kind, elements in wire_elements(psi, training, stage).items():
            sent = sum(rank[stage, precision, micro_batches]["sent"][kind] for rank in ranks)
            assert Fraction(sent, 2 * item) == elements, (stage, precision, kind)
    # As multiples of psi, with one micro-batch a rank: the paper's formulas at N = 2.
    total = {stage: sum(ranks[0][stage, "bf16", 2]["states"]) for stage in get_args(Stage)}
    assert total == {0: 16 * psi, 1: (4 + 6) * psi, 2: (2 + 7) * psi, 3: 8 * psi}


def test_where_sizes_are_odd_the_difference_has_a_name() -> None:
    """13 x 13 elements on three ranks: rounding to tiles within the states, padding beside them."""
    psi = LAYERS * 13**2
    ranks = run_ranks(3, measure, 13)
    for key, first in ranks[0].items():
        stage, precision, micro_batches = key
        training = Training(dp=3, precision=precision, micro_batches=micro_batches)
        states = model_states(psi, training, stage)
        for rank in ranks:
            found = rank[key]
            assert sum(found["states"]) == states.total + found["rounding"]
            assert found["padding"] == found["budget"].padding
            assert sum(found["states"]) <= sum(first["states"]), "rank 0 holds the most"
        if stage > 0:
            assert first["rounding"] > 0
