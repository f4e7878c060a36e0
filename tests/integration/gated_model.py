"""The built-in GPT, slowed down until a file appears: the test gets its time, and the rest runs fast."""

import time
from pathlib import Path

from torch import Tensor

from workers.models import GPT
from workers.spec import GPTModel


class GatedGPT(GPT):
    """Each forward takes `pause_s` until the file `gate` exists. The numbers are those of the GPT."""

    def __init__(
        self, *, gate: str, pause_s: float, layers: int, hidden: int, heads: int, sequence_length: int
    ) -> None:
        super().__init__(GPTModel(layers=layers, hidden=hidden, heads=heads), sequence_length=sequence_length)
        self._gate = Path(gate)
        self._pause_s = pause_s

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if not self._gate.exists():
            time.sleep(self._pause_s)
        return super().forward(inputs, targets)
