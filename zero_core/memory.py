"""Where a rank's bytes are: every category measured, and what no category explains.

Owns the measuring of the process (or device) and of what autograd saves. The engine tells it what it
allocated; `budget` says what it should have been.

There are two accounts, of two moments, and no figure belongs to both:

    at the peak    peak - baseline = model states + buffers + padding + replicas + activations + unattributed
    now (CPU)      resident - baseline = the same + save copy + checkpoint block - activations + fragmentation
    now (CUDA)     reserved = allocated + fragmentation

The save copy is taken off the peak as it was at that moment: it may come, grow and go between two samples.
"""

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of one rank.

    parameters, gradients, optimizer_states  model states held between steps
    communication_buffers  the staging buffer and the whole-unit buffers ever lent out
    activations   peak of what is saved for backward: after forward, or after a recomputation within backward
    checkpoints   of them: inputs of units that are kept to compute the units' forward again
    recomputed    of them: the most that one recomputation saved
    host_checkpoints  checkpoints in page-locked host memory (`checkpoint_offload`), in none of the others
    padding       tails of buffers that round a unit up to whole chunks, or a piece up to its alignment
    resident      the process's proportional set size (CPU) or the allocator's reserved bytes (CUDA)
    baseline      occupied before the engine was built, less the model it was given
    unattributed  peak beyond the baseline that none of the categories explains; never negative
    replicas      slots that this rank's states are copied into, and those it keeps for ranks of other hosts
    save_copy     host memory that saves behind the training copy this rank's states into
    fragmentation held by the allocator and in use for nothing. CUDA: reserved less allocated. CPU: `resident`
                  less the baseline and all that the engine holds now, between steps; never negative
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
    checkpoints: int = 0
    recomputed: int = 0
    host_checkpoints: int = 0
    fragmentation: int = 0
    replicas: int = 0
    save_copy: int = 0

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


def fragmentation_bytes(device: torch.device, *, resident: int, baseline: int, held: int) -> int:
    """Bytes that the allocator keeps and nothing uses.

    held: what the engine holds at this moment. On a CPU only the system's figure tells what is kept, so all
    that is beyond the baseline and `held` counts: freed memory that has not gone back to the system, and what
    others in the process have allocated since. What was allocated but never touched is not resident, and
    lowers the figure.
    """
    if device.type == "cuda":
        return max(0, resident - torch.cuda.memory_allocated(device))
    return max(0, resident - baseline - held)


def _nothing() -> int:
    return 0


@dataclass(frozen=True, slots=True)
class SaveCopy:
    """The copy of a rank's states from which checkpoints are written behind the training, in host memory.

    predicted  bytes, from the first save on
    held       gives those that there are now
    """

    predicted: int = 0
    held: Callable[[], int] = _nothing


class PeakSampler:
    """Samples the process where memory peaks: where most is saved for backward.

    Reading the set size costs milliseconds, so after the first steps only every twentieth is sampled.

    peak  the most that was seen, less the save copy at that moment, which is no device's memory
    """

    _ALWAYS_STEPS = 3
    _EVERY_STEPS = 20

    def __init__(self, device: torch.device, baseline: int) -> None:
        self._device = device
        self.baseline = baseline
        self.peak = 0
        self.save_copy = SaveCopy()

    def due(self, step: int) -> bool:
        """Whether memory is looked at in this step."""
        return step < self._ALWAYS_STEPS or step % self._EVERY_STEPS == 0

    def sample(self, step: int) -> None:
        if self.due(step):
            if self._device.type == "cuda":
                self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device))
            else:
                beside = self.save_copy.held()
                self.peak = max(self.peak, resident_bytes(self._device) - beside)


class SavedTensors:
    """Counts the bytes of distinct storages that autograd saves, from forward to backward of a micro-batch.

    exclude     addresses of storages that are no activations: parameters that are whole
    recomputes  whether forwards are repeated within backward: then what backward has freed by that time must
                be known too

    peak        most bytes at one moment: at the end of a forward, or of a recomputation
    recomputed  most bytes that one recomputation saved
    """

    def __init__(self, exclude: set[int], *, recomputes: bool = False) -> None:
        self._exclude = exclude
        self._recomputes = recomputes
        self._saved: dict[int, tuple[int, StorageWeakRef | None]] = {}
        self._again: dict[int, int] = {}
        self.peak = 0
        self.recomputed = 0

    def begin(self) -> None:
        """A micro-batch's forward begins."""
        self._saved.clear()

    def excludes(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in one of the storages that are no activations."""
        return tensor.untyped_storage().data_ptr() in self._exclude

    def count(self, tensor: torch.Tensor) -> None:
        """Forward saves the tensor."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self._exclude:
            reference = None
            if self._recomputes:
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._saved[address] = storage.nbytes(), reference

    def end(self) -> bool:
        """The forward is over, and backward has not begun. Returns whether no moment has seen more."""
        total = sum(nbytes for nbytes, _ in self._saved.values())
        if not self._recomputes:
            self._saved.clear()
        return self._at_peak(total)

    def begin_recomputation(self) -> None:
        """Backward computes a unit's forward again."""
        self._again.clear()

    def count_recomputed(self, tensor: torch.Tensor) -> None:
        """A recomputation saves the tensor."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in self._exclude:
            self._again[address] = storage.nbytes()

    def end_recomputation(self) -> bool:
        """What the recomputation saved is all there, beside what backward has not freed yet.

        Returns whether no moment has seen more.
        """
        alive = {}
        for address, (nbytes, reference) in self._saved.items():
            if reference is not None and not reference.expired():  # type: ignore[no-untyped-call]
                alive[address] = nbytes
        again = sum(nbytes for address, nbytes in self._again.items() if address not in alive)
        self.recomputed = max(self.recomputed, again)
        self._again.clear()
        return self._at_peak(sum(alive.values()) + again)

    def _at_peak(self, total: int) -> bool:
        self.peak = max(self.peak, total)
        return total == self.peak
