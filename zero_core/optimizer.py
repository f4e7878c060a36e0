"""Adam, AdamW and SGD on the flat, owned part of every unit.

Owns master parameters and moments. Knows ranges of units and flat tensors; not modules, nor how gradients
came about. The update is torch's fused kernel over slices of the flat tensors, one slice for each run of
parameters with the same settings.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from zero_core.config import AdamWConfig, OptimizerConfig, SGDConfig, ZeroConfig
from zero_core.groups import Stepping, runs
from zero_core.units import FlatUnit

# The optimizer widens 16-bit gradients in runs of this many elements, which stay in the cache.
_RUN = 1 << 16

STATE_KINDS = ("master", "momentum", "variance")
"""All kinds of state there are, in order; which of them a run has is `UnitStates.kinds`."""


@dataclass(slots=True)
class UnitStates:
    """The optimizer's view of one trainable unit: elements [start, stop) of it, all flat.

    master     [held] fp32; in fp32 training the parameters themselves
    compute    [held] compute dtype: the parameters that the update is written to
    momentum   [held] fp32: Adam's running mean of gradients, SGD's running sum; None for SGD without momentum
    variance   [held] fp32: Adam's running mean of squares; None for SGD
    """

    unit: FlatUnit
    start: int
    stop: int
    master: torch.Tensor
    compute: torch.Tensor
    momentum: torch.Tensor | None
    variance: torch.Tensor | None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of state it has; each is the attribute of that name."""
        return tuple(kind for kind in STATE_KINDS if getattr(self, kind) is not None)


class FlatOptimizer:
    """Steps all units' held ranges."""

    def __init__(self, config: ZeroConfig, states: Sequence[UnitStates]) -> None:
        self._config = config
        self.states = list(states)
        self._pieces = [_by_settings(config, state, None) for state in self.states]
        device = self.states[0].master.device if self.states else torch.device("cpu")
        self._step = torch.zeros((), dtype=torch.float32, device=device)
        self._steps_done = 0

    @property
    def steps_done(self) -> int:
        """Updates carried out; skipped steps are not among them."""
        return self._steps_done

    @steps_done.setter
    def steps_done(self, value: int) -> None:
        self._steps_done = value
        self._step.fill_(value)

    @property
    def held_bytes(self) -> int:
        """Bytes of the moments, and of the master where it is not the parameters themselves."""
        total = 0
        for state in self.states:
            total += sum(getattr(state, kind).numel() * 4 for kind in state.kinds if kind != "master")
            if state.master.dtype != state.compute.dtype:
                total += state.master.numel() * 4
        return total

    def select(self, trained: frozenset[str]) -> None:
        """From now on step these parameters only; the others keep their values and moments as they are."""
        self._pieces = [_by_settings(self._config, state, trained) for state in self.states]

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], *, rates: Mapping[str, float], divisor: float) -> None:
        """One update.

        gradients  a [held] tensor per unit, fp32 or compute dtype; fp32 ones are divided in place
        rates      the learning rate of every group, by name
        divisor    what gradients are divided by: loss scale over clip coefficient
        """
        self._step += 1
        # The kernel divides gradients by it: neither clipping nor unscaling costs a pass of its own.
        unscale = torch.tensor(divisor, device=self._step.device) if divisor != 1.0 else None
        for state, by_settings, gradient in zip(self.states, self._pieces, gradients, strict=True):
            for how, pieces in by_settings:
                lr = rates[how.group]
                if gradient.dtype == torch.float32:
                    parts = [gradient[a:b] for a, b in pieces]
                    self._update(state, pieces, parts, how.settings, lr, unscale)
                    continue
                for a, b in (part for piece in pieces for part in _split(*piece, _RUN)):
                    self._update(state, [(a, b)], [gradient[a:b].float()], how.settings, lr, unscale)
            if state.master.dtype != state.compute.dtype:
                state.compute.copy_(state.master)
        self._steps_done += 1

    def _update(
        self,
        state: UnitStates,
        pieces: Sequence[tuple[int, int]],
        gradients: list[torch.Tensor],
        settings: OptimizerConfig,
        lr: float,
        unscale: torch.Tensor | None,
    ) -> None:
        masters = [state.master[a:b] for a, b in pieces]
        momentum = [] if state.momentum is None else [state.momentum[a:b] for a, b in pieces]
        if isinstance(settings, SGDConfig):
            torch._fused_sgd_(
                masters,
                gradients,
                momentum,
                weight_decay=settings.weight_decay,
                momentum=settings.momentum,
                lr=lr,
                dampening=settings.dampening,
                nesterov=settings.nesterov,
                maximize=False,
                # The very first gradient starts the momentum undampened. The buffer is there from the
                # beginning, so the count of updates says which one is the first, after a resume too.
                is_first_step=self._steps_done == 0,
                grad_scale=unscale,
            )
            return
        assert state.variance is not None
        kernel = torch._fused_adamw_ if isinstance(settings, AdamWConfig) else torch._fused_adam_
        kernel(
            masters,
            gradients,
            momentum,
            [state.variance[a:b] for a, b in pieces],
            [],
            [self._step] * len(pieces),
            lr=lr,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=unscale,
        )


def _by_settings(
    config: ZeroConfig, state: UnitStates, trained: frozenset[str] | None
) -> list[tuple[Stepping, list[tuple[int, int]]]]:
    """The state's runs, those with the same settings together: one call of the kernel takes them all."""
    found: dict[Stepping, list[tuple[int, int]]] = {}
    for a, b, how in runs(config, state.unit.unit, state.start, state.stop, trained):
        found.setdefault(how, []).append((a, b))
    return list(found.items())


def _split(start: int, stop: int, run: int) -> Iterator[tuple[int, int]]:
    for a in range(start, stop, run):
        yield a, min(a + run, stop)
