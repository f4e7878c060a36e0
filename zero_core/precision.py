"""Which steps are carried out: what happens where a loss or a gradient is inf or nan.

In fp32 and bf16 a value that is not finite is an error, before anything is updated. In fp16 gradients
underflow, so the loss is multiplied by a scale before backward; where that makes them overflow, the step
is skipped and the scale backs off, and after many good steps it grows again. The decision is a pure
function of the gradient norm and the mean loss, which are the same bits on every rank.

Knows neither torch nor a process group.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from zero_core.config import LossScale, ZeroConfig
from zero_core.errors import CheckpointError, LossScaleError, NonFiniteError


@dataclass(frozen=True, slots=True)
class ScaleState:
    """Where the loss scale stands.

    scale    what the next step's loss is multiplied by
    good     steps carried out since the scale last changed
    skipped  steps skipped in all
    """

    scale: float
    good: int = 0
    skipped: int = 0


def advance(state: ScaleState, config: LossScale, *, finite: bool) -> ScaleState | None:
    """The state after a step that was finite or not; None where the scale cannot back off further."""
    if finite:
        good = state.good + 1
        if good < config.growth_interval:
            return replace(state, good=good)
        return replace(state, scale=min(state.scale * config.growth, config.ceiling), good=0)
    if state.scale <= config.floor:
        return None
    scale = max(state.scale * config.backoff, config.floor)
    return ScaleState(scale=scale, good=0, skipped=state.skipped + 1)


class StepGate:
    """Holds the loss scale of a run (1 but in fp16) and says of each step whether it is carried out."""

    def __init__(self, config: ZeroConfig) -> None:
        self._config = config.loss_scale if config.precision == "fp16" else None
        self._state = ScaleState(1.0 if self._config is None else self._config.initial)

    @property
    def scale(self) -> float:
        """What losses are multiplied by before backward, and gradients divided by before the update."""
        return self._state.scale

    @property
    def skipped(self) -> int:
        """Steps skipped since training began, over all resumes."""
        return self._state.skipped

    def passes(self, *, grad_norm: float, loss: float, step: int) -> bool:
        """Whether the step is carried out; False: it is skipped, and the scale has backed off.

        grad_norm  of the unscaled gradients; loss: the mean; step: finished steps, for the message

        Raises NonFiniteError in fp32 and bf16 if one of them is not finite, LossScaleError in fp16 if one is
        not while the scale is at its floor. Then nothing has changed.
        """
        finite = math.isfinite(grad_norm) and math.isfinite(loss)
        if self._config is None:
            if not finite:
                raise NonFiniteError(
                    f"gradient norm {grad_norm}, mean loss {loss} after step {step}: "
                    "parameters are unchanged; lower the learning rate or look at the data of this step"
                )
            return True
        after = advance(self._state, self._config, finite=finite)
        if after is None:
            raise LossScaleError(
                f"gradient norm {grad_norm}, mean loss {loss} after step {step} although the loss scale is "
                f"at its floor of {self._config.floor:g} ({self._state.skipped} steps were skipped so far): "
                f"parameters are unchanged; {_advice(loss)}"
            )
        self._state = after
        return finite

    def state_dict(self) -> dict[str, Any] | None:
        """JSON values for a checkpoint; None where there is no loss scale."""
        return None if self._config is None else asdict(self._state)

    def load_state_dict(self, saved: Mapping[str, Any] | None) -> None:
        """Go on from what `state_dict` returned. Raises CheckpointError if there is nothing to go on from."""
        if self._config is None:
            return
        try:
            state = ScaleState(**(saved or {}))
        except TypeError as error:
            raise CheckpointError(f"the checkpoint holds no loss scale but {saved!r}: {error}") from error
        self._state = state


def _advice(loss: float) -> str:
    if math.isfinite(loss):
        return "lower the learning rate, or train in bf16 or fp32"
    return (
        "the forward pass itself leaves the range of fp16, which no loss scale mends: train in bf16 or fp32, "
        "or compute the loss in fp32"
    )
