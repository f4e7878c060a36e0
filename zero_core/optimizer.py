"""AdamW on the flat, owned part of every unit.

Owns master parameters, momentum and variance. Knows ranges of units and flat tensors; not modules, nor
how gradients came about. The update is torch's fused kernel over slices of the flat tensors, one slice
for each run of parameters with the same hyper-parameters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zero_core.config import TILE_STEP, AdamWConfig
from zero_core.layout import Unit
from zero_core.units import FlatUnit

# The optimizer widens bf16 gradients in runs of this many elements, which stay in the cache.
_RUN = 1 << 16

STATE_KINDS = ("master", "momentum", "variance")


@dataclass(slots=True)
class UnitStates:
    """The optimizer's view of one trainable unit: elements [start, stop) of it, all flat.

    master     [held] fp32; in fp32 training the parameters themselves
    compute    [held] compute dtype: the parameters that the update is written to
    momentum, variance  [held] fp32
    """

    unit: FlatUnit
    start: int
    stop: int
    master: torch.Tensor
    compute: torch.Tensor
    momentum: torch.Tensor
    variance: torch.Tensor


class FlatAdamW:
    """Steps all units' held ranges."""

    def __init__(self, config: AdamWConfig, states: Sequence[UnitStates]) -> None:
        self._config = config
        self.states = list(states)
        self._runs = [list(decay_runs(s.unit.unit, s.start, s.stop)) for s in self.states]
        device = self.states[0].master.device if self.states else torch.device("cpu")
        self._step = torch.zeros((), dtype=torch.float32, device=device)

    @property
    def steps_done(self) -> int:
        return int(self._step.item())

    @steps_done.setter
    def steps_done(self, value: int) -> None:
        self._step.fill_(value)

    @property
    def held_bytes(self) -> int:
        """Bytes of both moments, and of the master where it is not the parameters themselves."""
        total = 0
        for state in self.states:
            total += state.momentum.numel() * 4 + state.variance.numel() * 4
            if state.master.dtype != state.compute.dtype:
                total += state.master.numel() * 4
        return total

    def select(self, trained: frozenset[str]) -> None:
        """From now on step these parameters only; the others keep their values and moments as they are."""
        self._runs = [list(decay_runs(s.unit.unit, s.start, s.stop, trained)) for s in self.states]

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], *, lr: float, scale: float) -> None:
        """One update. gradients: a [held] tensor per unit, fp32 or compute dtype, scaled by `scale`."""
        self._step += 1
        for state, runs, gradient in zip(self.states, self._runs, gradients, strict=True):
            widened = gradient if gradient.dtype == torch.float32 else None
            for decays in (True, False):
                pieces = [(a, b) for a, b, decay in runs if decay == decays]
                if widened is None:
                    pieces = [piece for a, b in pieces for piece in _split(a, b, _RUN)]
                    for a, b in pieces:
                        self._update(state, [(a, b)], [gradient[a:b].float()], decays, lr, scale)
                elif pieces:
                    self._update(state, pieces, [widened[a:b] for a, b in pieces], decays, lr, scale)
            if state.master.dtype != state.compute.dtype:
                state.compute.copy_(state.master)

    def _update(
        self,
        state: UnitStates,
        pieces: list[tuple[int, int]],
        gradients: list[torch.Tensor],
        decays: bool,
        lr: float,
        scale: float,
    ) -> None:
        # The kernel divides gradients by grad_scale: clipping costs no pass of its own.
        unscale = torch.tensor(1.0 / scale, device=self._step.device) if scale != 1.0 else None
        torch._fused_adamw_(
            [state.master[a:b] for a, b in pieces],
            gradients,
            [state.momentum[a:b] for a, b in pieces],
            [state.variance[a:b] for a, b in pieces],
            [],
            [self._step] * len(pieces),
            lr=lr,
            beta1=self._config.betas[0],
            beta2=self._config.betas[1],
            weight_decay=self._config.weight_decay if decays else 0.0,
            eps=self._config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=unscale,
        )


def decay_runs(
    unit: Unit, start: int, stop: int, trained: frozenset[str] | None = None
) -> Iterator[tuple[int, int, bool]]:
    """Cut [start, stop) of a unit into runs (from, to, decays), relative to `start`.

    trained  names of the parameters that are in any run; None: all

    Parameters of two or more dimensions decay; biases, norms and scalars do not. A run that begins between
    two multiples of `TILE_STEP` elements is cut at the second: a vectorised kernel rounds the last few
    elements of a slice by other instructions, so slices must end at the same places whoever owns them.
    """
    for a, b, decays in _same_decay(unit, start, stop, trained):
        aligned = min(b, -(-(start + a) // TILE_STEP) * TILE_STEP - start)
        if a < aligned:
            yield a, aligned, decays
        if aligned < b:
            yield aligned, b, decays


def _same_decay(
    unit: Unit, start: int, stop: int, trained: frozenset[str] | None
) -> Iterator[tuple[int, int, bool]]:
    open_run: tuple[int, int, bool] | None = None
    for slot in unit.slots:
        a, b = max(slot.offset, start) - start, min(slot.stop, stop) - start
        if a >= b or (trained is not None and slot.name not in trained):
            continue
        decays = len(slot.shape) >= 2
        if open_run and open_run[1:] == (a, decays):
            open_run = (open_run[0], b, decays)
        else:
            if open_run:
                yield open_run
            open_run = (a, b, decays)
    if open_run:
        yield open_run


def _split(start: int, stop: int, run: int) -> Iterator[tuple[int, int]]:
    for a in range(start, stop, run):
        yield a, min(a + run, stop)
