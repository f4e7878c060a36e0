"""Where a rank's bytes are: every category measured, and what no category explains.

Owns the measuring of the process (or device) and of what autograd saves. The engine tells it what it
allocated; `budget` says what it should have been.
"""

from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of one rank.

    parameters, gradients, optimizer_states  model states held between steps
    communication_buffers  the staging buffer and the whole-unit buffers ever lent out
    activations   peak of what forward saved for backward
    padding       tails of buffers that round a unit up to whole chunks
    resident      the process's proportional set size (CPU) or the allocator's reserved bytes (CUDA)
    baseline      occupied before the engine was built, less the model it was given
    unattributed  peak beyond the baseline that none of the categories explains; never negative
    """

    parameters: int
    gradients: int
    optimizer_states: int
    communication_buffers: int
    activations: int
    padding: int
    resident: int
    baseline: int
    unattributed: int

    @property
    def model_states(self) -> int:
        return self.parameters + self.gradients + self.optimizer_states


def resident_bytes(device: torch.device) -> int:
    """What this process holds: shared pages count in proportion to their sharers."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return int(psutil.Process().memory_full_info().pss)


def occupied_bytes(device: torch.device) -> int:
    """What peaks are measured in: on CUDA the bytes of live tensors, else the same as `resident_bytes`."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes(device)


class PeakSampler:
    """Samples the process where memory peaks: after forward, before backward frees what it saved.

    Reading the set size costs milliseconds, so after the first steps only every twentieth is sampled.
    """

    _ALWAYS_STEPS = 3
    _EVERY_STEPS = 20

    def __init__(self, device: torch.device, baseline: int) -> None:
        self._device = device
        self.baseline = baseline
        self.peak = 0

    def sample(self, step: int) -> None:
        if step < self._ALWAYS_STEPS or step % self._EVERY_STEPS == 0:
            if self._device.type == "cuda":
                self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device))
            else:
                self.peak = max(self.peak, resident_bytes(self._device))


class SavedTensors:
    """Counts the bytes of distinct storages that autograd saves during one forward."""

    def __init__(self, exclude: set[int]) -> None:
        self._exclude = exclude
        self._seen: dict[int, int] = {}
        self.peak = 0

    def begin(self) -> None:
        self._seen.clear()

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self._exclude:
            self._seen[address] = storage.nbytes()

    def end(self) -> None:
        self.peak = max(self.peak, sum(self._seen.values()))
        self._seen.clear()
