"""The bytes of one rank by category, as they are allocated, beside the process as the system sees it.

Knows who holds what; nothing of when it is held, nor of the prediction (`budget`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zero_core.activations import CheckpointStore
from zero_core.arena import Arena
from zero_core.buffers import BufferPool
from zero_core.collectives import Collectives
from zero_core.memory import MemoryReport, PeakSampler, SavedTensors, fragmentation_bytes, resident_bytes
from zero_core.optimizer import FlatOptimizer
from zero_core.reduction import Reducer
from zero_core.standing import LiveState
from zero_core.units import FlatUnit, UnitState


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """All that holds memory for one engine. `offloaded`: activations' checkpoints are in host memory."""

    units: Sequence[FlatUnit]
    collectives: Collectives
    pools: Sequence[BufferPool]
    states_arena: Arena
    optimizer: FlatOptimizer
    reducer: Reducer
    live: LiveState
    checkpoints: CheckpointStore
    offloaded: bool
    saved: SavedTensors
    peak: PeakSampler

    def report(self) -> MemoryReport:
        """As of now; peaks are those of the sampled steps."""
        whole = [u for u in self.units if u.state is UnitState.WHOLE]
        parameters = sum(u.numel * u.dtype.itemsize for u in whole)
        parameters += sum(u.owned * u.dtype.itemsize for u in self.units if u.shard is not None)
        padding = sum((u.padded - u.numel) * u.dtype.itemsize for u in whole) + self.reducer.padding_bytes
        padding += self.states_arena.padding_bytes
        buffers = self.collectives.staging.numel()
        buffers += sum(pool.allocated_bytes for pool in self.pools)
        held = parameters + padding + buffers + self.reducer.held_bytes + self.optimizer.held_bytes
        held += self.live.replica_bytes
        baseline, device = self.peak.baseline, self.collectives.device
        resident, checkpoints = resident_bytes(device), self.checkpoints
        block = 0 if self.offloaded else checkpoints.reserved_bytes
        copied = self.peak.save_copy.held()
        return MemoryReport(
            parameters=parameters,
            gradients=self.reducer.held_bytes,
            optimizer_states=self.optimizer.held_bytes,
            communication_buffers=buffers,
            activations=self.saved.peak,
            padding=padding,
            resident=resident,
            baseline=baseline,
            unattributed=max(0, max(self.peak.peak, baseline) - baseline - held - self.saved.peak),
            checkpoints=0 if self.offloaded else checkpoints.held_bytes,
            recomputed=self.saved.recomputed,
            host_checkpoints=checkpoints.held_bytes if self.offloaded else 0,
            fragmentation=fragmentation_bytes(
                device, resident=resident, baseline=baseline, held=held + block + copied
            ),
            replicas=self.live.replica_bytes,
            save_copy=copied,
        )
