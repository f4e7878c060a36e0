"""What is run: models by size, the cells of a run, and the plans to choose from.

Plain values and text: knows neither torch nor how anything is measured.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

SIZES = {  # name: layers, hidden, heads; vocabulary 8192, sequence 128, head not tied
    "1M": (2, 64, 2),  # for a smoke run only: nothing but overhead
    "10M": (4, 320, 5),
    "50M": (8, 640, 10),
    "124M": (16, 768, 12),
}
VOCABULARY, SEQUENCE, MICRO_BATCH = 8192, 128, 2
PRECISIONS = ("fp32", "bf16")

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Rounds of all contestants of one precision on one model at one number of ranks.

    steps   timed steps of each contestant in each round, after `warmup` untimed ones; `memory_steps`
            more follow, in which memory is sampled and time is not taken
    """

    precision: str
    size: str
    world_size: int
    rounds: int
    steps: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """`fp32:10M:2:3:20` is precision, size, ranks, rounds and timed steps; ValueError if it is not."""
        parts = text.split(":")
        if len(parts) != 5 or parts[0] not in PRECISIONS or parts[1] not in SIZES:
            raise ValueError(
                f"{text!r} must be PRECISION:SIZE:RANKS:ROUNDS:STEPS with a precision of "
                f"{list(PRECISIONS)} and a size of {list(SIZES)}, e.g. fp32:10M:2:3:20"
            )
        world_size, rounds, steps = (int(part) for part in parts[2:])
        if min(world_size - 1, rounds, steps) < 1:
            raise ValueError(f"{text!r} needs at least 2 ranks, 1 round and 1 step")
        return cls(precision=parts[0], size=parts[1], world_size=world_size, rounds=rounds, steps=steps)

    @property
    def warmup(self) -> int:
        return 2 if self.steps >= 8 else 1

    @property
    def memory_steps(self) -> int:
        return 2 if self.steps >= 8 else 1

    @property
    def where(self) -> str:
        return f"{self.size} N={self.world_size}"

    @property
    def title(self) -> str:
        return f"{self.precision}, {self.where}"


def bf16_flags() -> set[str]:
    """The CPU's own bf16 instructions; without any, torch's bf16 products are about ten times slower."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return _BF16_FLAGS & set(flags.split())


def plans() -> dict[str, tuple[list[Run], list[tuple[str, str, int]]]]:
    """By name: the runs, and the wire runs as (precision, size, ranks).

    bf16 is kept small where the CPU has no instructions for it, on account of the peers. "short" fits 25
    minutes on 2 quiet cores, "quick" is a smoke run.
    """
    wire = [("fp32", "10M", 2), ("fp32", "10M", 4), ("bf16", "10M", 2)]
    grid = ["10M:2:5:20", "50M:2:3:8", "124M:2:3:5", "10M:4:3:10", "50M:4:2:5", "124M:4:1:3"]
    low = grid if bf16_flags() else ["10M:2:3:3", "10M:4:2:2", "50M:2:1:1"]
    full = [f"fp32:{cell}" for cell in grid] + [f"bf16:{cell}" for cell in low]
    short = ["fp32:10M:2:3:10", "fp32:50M:2:2:5", "fp32:10M:4:1:5", "fp32:124M:2:1:3", "bf16:10M:2:1:2"]
    quick = ["fp32:1M:2:1:2", "bf16:1M:2:1:2"]
    return {
        "full": ([Run.parse(text) for text in full], wire),
        "short": ([Run.parse(text) for text in short], wire),
        "quick": ([Run.parse(text) for text in quick], [("fp32", "1M", 2)]),
    }
