"""What a run yields, and the names its contestants go by. Plain values: knows no torch."""

from dataclasses import dataclass

BASE, FLOOR = "ddp", "floor"
"""What ratios refer to, and what no engine can undercut."""

NATIVE = "stage 2 native"
"""bf16 only: the engine with torch's own products, as its peers have them; the rest is the exchange."""

_NAMES = (
    BASE,
    "ddp + zero-redundancy",
    "fsdp2 keep",
    "fsdp2 reshard",
    *(f"deepspeed {stage}" for stage in (1, 2, 3)),
    *(f"stage {stage}" for stage in (0, 1, 2, 3)),
    NATIVE,
    FLOOR,
)
_ONLY = {"ddp + zero-redundancy": "fp32", NATIVE: "bf16"}


def names(precision: str) -> list[str]:
    """All contestants of a precision, in the order of the tables."""
    return [name for name in _NAMES if _ONLY.get(name, precision) == precision]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One contestant in one round.

    step_s          median over the timed steps of the mean over ranks
    losses          of every step, warm-up included, mean over ranks
    parameters      elements of the model
    wire_bytes      sent by a rank in a step, as the interface counts them, mean over ranks
    ledger_bytes    the same as the engine counts them; None where it does not
    peak_bytes      highest proportional set size in training, less that before the model was built; the
                    worst rank's
    building_bytes  the same while the model was built and wrapped
    seconds         of a step by phase, mean over ranks and steps
    model_states    bytes over all ranks as (measured, predicted); None where the engine does not say
    foreign_cores   cores busy with anything but the ranks while they were timed
    """

    step_s: float
    losses: list[float]
    parameters: int
    wire_bytes: float
    ledger_bytes: float | None
    peak_bytes: int
    building_bytes: int
    seconds: dict[str, float]
    model_states: tuple[int, int] | None
    foreign_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WireResult:
    """Bytes that a rank sent in a step of one stage, mean over ranks.

    counted  by the interface, all headers and acknowledgements included
    payload  of these, what TCP carried
    ledger   by the engine
    promised 2 psi (N - 1) / N elements at stages 0 to 2, 3 psi (N - 1) / N at stage 3
    """

    precision: str
    size: str
    world_size: int
    stage: int
    counted: float
    payload: float
    ledger: float
    promised: float
