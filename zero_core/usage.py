"""What callers may do, and when: the checks that come before anything is changed.

Knows settings, counts and what it is given; nothing of how a step is computed.
"""

from collections.abc import Sequence
from typing import Any

import torch

from zero_core.collectives import Collectives
from zero_core.config import ZeroConfig
from zero_core.errors import ConfigError, UsageError


def check_group(config: ZeroConfig, collectives: Collectives) -> int:
    """M, the micro-batches of a step. Raises ConfigError where the group cannot do what is set."""
    if config.reproducible and collectives.native:
        raise ConfigError("reproducible sums need reduction='ordered' on NCCL: its own have no fixed order")
    total = config.micro_batches or collectives.world_size
    if collectives.world_size > total:
        raise ConfigError(
            f"world size {collectives.world_size} exceeds the {total} micro-batches of a step: "
            "every rank needs at least one"
        )
    return total


def check_loss(loss: Any) -> None:
    """Raises UsageError for what cannot be a micro-batch's loss."""
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"backward needs the loss as a tensor, got {type(loss).__name__}: pass what the model's forward "
            "led to, not a number read from it"
        )
    if loss.numel() != 1:
        raise UsageError(f"backward needs a scalar loss, got shape {tuple(loss.shape)}")


def check_turn(computed: int, due: range) -> None:
    """Raises UsageError where a rank has computed all `due` micro-batches of a step."""
    if computed >= len(due):
        raise UsageError(
            f"rank {due.start} has {len(due)} micro-batches in this step (M {due.stop}, N {due.step}), and "
            "backward was called once more"
        )


def check_complete(computed: int, due: range) -> None:
    """Raises UsageError where a rank has computed fewer than the `due` micro-batches of a step."""
    if computed != len(due):
        raise UsageError(
            f"rank {due.start} has {len(due)} micro-batches in this step, but backward was called {computed} "
            "times"
        )


def abandons(steps: Sequence[Sequence[float]]) -> bool:
    """Whether a step is to be forgotten before states are written; `steps`: `step_under_way` of every rank.

    Raises UsageError where one is under way and did not fail: its gradients would go with other parameters.
    """
    begun = [rank for rank, (under_way, _) in enumerate(steps) if under_way]
    if begun and not any(failed for _, failed in steps):
        raise UsageError(
            f"states are to be written within a step, on rank(s) {begun[:8]}: what was computed of it would "
            "not fit them; load or write after step() and before the next forward, or into a new engine "
            "(a forward that no backward follows needs torch.no_grad())"
        )
    return bool(begun)
