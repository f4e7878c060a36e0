"""What a rank will hold and send, computed before anything is allocated.

The arithmetic mirrors what the engine allocates, buffer by buffer, over the same layout; a test holds
the two together to the byte. What an element takes is said in `estimate`; here it is summed over the units,
with what each of them rounds up: to whole tiles at its owners, and to whole chunks in its buffers.

Plain integers: knows neither torch nor a process group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zero_core import estimate
from zero_core.config import ITEM_BYTES, OptimizerConfig, ZeroConfig
from zero_core.estimate import Formula, gradient_sum_bytes, saved_bytes
from zero_core.layout import Layout
from zero_core.residency import buffer_bytes, gathered_buffers, gradient_buffers, item_bytes, kept_gathered

ALIGNMENT_BYTES = 64
"""Pieces of a pre-allocated block begin at multiples of this, as memory from torch's allocators does."""


SLOT_HEADER_BYTES = 512
"""Of a slot that a rank's states are copied into, what says which state they are."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of one rank by category.

    `padding` names what rounds up and is not included elsewhere: units to whole chunks in the buffers of
    `parameters` and `gradients`, the pieces of the block that holds `optimizer_states` to 64 bytes.
    `activations` is what the caller says the model saves. `replicas` are copies of states in host memory, and
    so is `save_copy`, from which checkpoints are written behind the training.
    """

    parameters: int
    gradients: int
    optimizer_states: int
    communication_buffers: int
    activations: int
    padding: int
    replicas: int = 0
    save_copy: int = 0

    @property
    def model_states(self) -> int:
        """Parameters, gradients and optimizer states: what the paper's formulas count."""
        return self.parameters + self.gradients + self.optimizer_states

    @property
    def total(self) -> int:
        held = self.model_states + self.communication_buffers + self.activations + self.padding
        return held + self.host_bytes

    @property
    def host_bytes(self) -> int:
        """What lies in host memory also where the rest is on a device."""
        return self.replicas + self.save_copy


def rounds(micro_batches: int, world_size: int) -> int:
    """Micro-batches that the busiest rank computes in a step."""
    return -(-micro_batches // world_size)


def predict(
    layout: Layout,
    config: ZeroConfig,
    rank: int,
    *,
    activation_bytes: int = 0,
    buffer_bytes: int = 0,
    keeps: Sequence[int] = (),
    save_copy: int = 0,
) -> Budget:
    """The bytes `rank` will hold under `layout`, which carries the world size.

    buffer_bytes  of the model's persistent buffers, each rounded up to 64; replicas hold them too
    keeps         ranks of other hosts whose replicas it keeps; those of its own host take no memory here
    save_copy     what saves behind the training copy, see `save_copy_bytes`; 0 without any
    """
    formula = _formula(layout, config)
    parameters = gradients = optimizer = padding = 0
    for index, unit in enumerate(layout.units):
        width = item_bytes(unit.dtype, config.precision)
        start, stop = layout.owned(index, rank)
        states = formula.states(unit.numel, stop - start, width=width, trainable=unit.trainable)
        parameters += states.parameters
        gradients += states.gradients
        optimizer += states.optimizer_states
        tail = layout.padded(index) - unit.numel
        if config.stage != 3:
            padding += tail * width
        if config.stage <= 1 and unit.trainable:
            padding += tail * formula.item
    padding += optimizer_arena_bytes(layout, config, rank) - optimizer
    replicas = 0
    if replicates(layout, config, buffer_bytes=buffer_bytes):
        replicas = sum(region_bytes(layout, config, r, buffer_bytes=buffer_bytes) for r in (rank, *keeps))
    communication = _communication(layout, config)
    return Budget(
        parameters, gradients, optimizer, communication, activation_bytes, padding, replicas, save_copy
    )


def optimizer_bytes(precision: str, optimizer: OptimizerConfig) -> int:
    """K: the optimizer's fp32 moments, and an fp32 master where parameters are not fp32."""
    return estimate.optimizer_bytes(ITEM_BYTES[precision], len(optimizer.moments))


def tile_rounding(layout: Layout, config: ZeroConfig, rank: int) -> int:
    """Bytes of `rank`'s states of trainable parameters beyond those of an even share, ceil(psi / N) elements.

    There are some because cuts fall between tiles. They are part of what `predict` gives, the part that
    `estimate.model_states` cannot see; fewer than none on a rank that owns less than an even share.
    """
    formula = _formula(layout, config)
    whole = layout.numel(trainable=True)
    owned = 0
    for index, unit in enumerate(layout.units):
        if unit.trainable:
            start, stop = layout.owned(index, rank)
            owned += stop - start
    even = -(-whole // layout.world_size)
    return formula.states(whole, owned).total - formula.states(whole, even).total


def _formula(layout: Layout, config: ZeroConfig) -> Formula:
    world = layout.world_size
    return Formula(
        stage=config.stage,
        item=ITEM_BYTES[config.precision],
        optimizer_bytes=optimizer_bytes(config.precision, config.optimizer),
        sum_bytes=gradient_sum_bytes(config.micro_batches or world, world, reproducible=config.reproducible),
    )


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of pieces in a pre-allocated block."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def optimizer_arena_bytes(layout: Layout, config: ZeroConfig, rank: int) -> int:
    """The one block that `rank`'s optimizer states lie in: an aligned fp32 piece for each kind and unit."""
    total = 0
    for index, unit in enumerate(layout.units):
        if unit.trainable:
            start, stop = (0, unit.numel) if config.stage == 0 else layout.owned(index, rank)
            total += optimizer_bytes(config.precision, config.optimizer) // 4 * aligned(4 * (stop - start))
    return total


def replicates(layout: Layout, config: ZeroConfig, *, buffer_bytes: int) -> bool:
    """Whether there is anything to copy: not on a rank alone, nor at stage 0 if the model has no buffers."""
    return config.replicas > 0 and layout.world_size > 1 and (config.stage > 0 or buffer_bytes > 0)


def region_bytes(layout: Layout, config: ZeroConfig, rank: int, *, buffer_bytes: int) -> int:
    """The memory of `rank`'s replica: two slots of its states; at stage 3 its part of frozen units, once."""
    slot, frozen = SLOT_HEADER_BYTES + buffer_bytes, 0
    if config.stage > 0:
        slot += optimizer_arena_bytes(layout, config, rank)
    for index, unit in enumerate(layout.units):
        start, stop = layout.owned(index, rank)
        if unit.trainable and config.stage > 0 and config.precision == "fp32":
            slot += aligned(4 * (stop - start))
        elif not unit.trainable and config.stage == 3:
            frozen = frozen or SLOT_HEADER_BYTES
            frozen += aligned((stop - start) * item_bytes(unit.dtype, config.precision))
    return 2 * slot + frozen


def save_copy_bytes(layout: Layout, config: ZeroConfig, rank: int, *, buffer_bytes: int = 0) -> int:
    """What `rank` copies to host memory for a save behind the training: the tensors of its files.

    Masters and moments of what it owns, frozen elements as they are held; on rank 0 also the model's
    persistent buffers, of `buffer_bytes` in all.
    """
    total = 0 if rank else buffer_bytes
    for index, unit in enumerate(layout.units):
        start, stop = layout.owned(index, rank)
        trained = saved_bytes(len(config.optimizer.moments))
        total += (stop - start) * (trained if unit.trainable else item_bytes(unit.dtype, config.precision))
    return total


def exchange_bytes(layout: Layout, config: ZeroConfig, rank: int) -> int:
    """The one block of what `rank` reduces and gathers: parameters, gradients and buffers for them."""
    total = 0
    for index, unit in enumerate(layout.units):
        width, padded = item_bytes(unit.dtype, config.precision), layout.padded(index)
        start, stop = layout.owned(index, rank)
        total += aligned((stop - start if config.stage == 3 else padded) * width)
        if unit.trainable and config.stage <= 1:
            total += aligned(padded * width)
    for (capacity, dtype), count in gradient_buffers(layout, config).items():
        total += count * aligned(capacity * item_bytes(dtype, config.precision))
    return total


def _communication(layout: Layout, config: ZeroConfig) -> int:
    """The staging buffer, and from stage 2 on the whole units that are in memory at one time."""
    whole = gradient_buffers(layout, config) + gathered_buffers(layout, config)
    return config.staging_bytes + buffer_bytes(whole, config.precision)


def wire_elements(layout: Layout, config: ZeroConfig) -> dict[str, float]:
    """Elements a rank sends in a step by kind, on average over the ranks, to the element.

    Other than by `estimate.wire_elements` where a round has micro-batches for some ranks only: they own more
    or less than an even share, by the rounding to whole tiles. Units that are kept are gathered once.
    """
    world, kept = layout.world_size, kept_gathered(layout, config)
    full, rest = divmod(config.micro_batches or world, world)

    def rounds(index: int) -> int:
        """Of one unit, in all rounds: what every working rank contributes, or lacks, less its own part."""
        numel = layout.units[index].numel
        owned = (layout.owned(index, rank) for rank in range(rest))
        return full * (world - 1) * numel + sum(numel - (stop - start) for start, stop in owned)

    units = range(len(layout.units))
    trainable = [index for index in units if layout.units[index].trainable]
    volume = {"reduce": sum(map(rounds, trainable))}
    if config.stage <= 2:
        volume["gather"] = (world - 1) * layout.numel(trainable=True)
    else:
        volume["gather"] = sum(map(rounds, units))
        volume["gather_backward"] = sum(rounds(index) for index in units if index not in kept)
    return {kind: elements / world for kind, elements in volume.items()}
