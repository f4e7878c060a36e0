"""What is trained in the elastic benchmark, the same for every contestant: a scalar, and the GPT by its size.

Imported by every worker that is started while a pause is timed, so it imports no more than it needs.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plan import SIZES, VOCABULARY
from workers.models import GPT
from workers.spec import GPTModel

SCALAR = "1 parameter"
"""The size of a model that has nothing to move or to compute: what is left is the machinery."""

SCALAR_PAUSE_S = 0.02
"""How long a micro-batch of it takes. Steps that take no time would only measure how fast they are logged."""

MICRO_BATCH, SEQUENCE = 1, 32
"""Few tokens: what a change costs does not depend on them, and a recovery ends with the end of a step, whose
length would be measured instead."""

SEED = 0


class OneParameter(nn.Module):
    """One number that follows the targets' mean. Each forward takes `pause_s`."""

    def __init__(self, *, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The squared error, a scalar; inputs and targets int64 [batch, sequence]."""
        del inputs
        time.sleep(self.pause_s)
        return (self.weight - targets.float().mean()).square().sum()


def gpt_of(size: str) -> GPTModel:
    """The GPT of that size of `benchmarks.plan`."""
    layers, hidden, heads = SIZES[size]
    return GPTModel(layers=layers, hidden=hidden, heads=heads, vocabulary=VOCABULARY, tied_head=False)


def model_section(size: str) -> dict[str, Any]:
    """The `model` section of a job."""
    if size == SCALAR:
        factory = f"{OneParameter.__module__}:{OneParameter.__name__}"
        return {"kind": "custom", "factory": factory, "arguments": {"pause_s": SCALAR_PAUSE_S}}
    return gpt_of(size).model_dump(mode="json")


def build_model(size: str) -> nn.Module:
    """The same module, in fp32 on the CPU."""
    if size == SCALAR:
        return OneParameter(pause_s=SCALAR_PAUSE_S)
    torch.manual_seed(SEED)
    return GPT(gpt_of(size), sequence_length=SEQUENCE)
