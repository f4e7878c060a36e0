"""A user's own model for tests: learns next to nothing, at a chosen pace, and fails where it is told to."""

import builtins
import time

import torch
from torch import Tensor, nn
from torch.nn import functional


class Paced(nn.Module):
    """A table of next-token logits. Each forward takes `pause_s`; the `fail_at`-th raises `fail_with`."""

    def __init__(
        self,
        *,
        pause_s: float = 0.0,
        fail_at: int | None = None,
        fail_with: str = "ValueError",
        size: int = 31,
    ) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.fail_at = fail_at
        self.fail_with = fail_with
        self.calls = 0
        self.table = nn.Embedding(size, size)
        self.layers = nn.ModuleList([nn.Linear(size, size)])

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fail_at:
            error = (
                torch.OutOfMemoryError if "OutOfMemory" in self.fail_with else vars(builtins)[self.fail_with]
            )
            raise error("this model was told to fail")
        time.sleep(self.pause_s)
        size = self.table.num_embeddings
        logits = self.layers[0](torch.tanh(self.table(inputs % size)))
        return functional.cross_entropy(logits.flatten(0, 1), (targets % size).flatten())
