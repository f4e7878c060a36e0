"""A model whose forward hangs on one rank for as long as a file exists."""

import time
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from tests.integration.paced_model import Paced


class Held(Paced):
    """`held` is the file; rank 1 of the group stays in its forward while it is there."""

    def __init__(self, *, held: str, pause_s: float) -> None:
        super().__init__(pause_s=pause_s)
        self._held = Path(held)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        while dist.get_rank() == 1 and self._held.exists():
            time.sleep(0.02)
        return super().forward(inputs, targets)
