"""What a rank will hold and send, computed before anything is allocated.

The arithmetic mirrors what the engine allocates, buffer by buffer, over the same layout; a test holds
the two together to the byte. For Adam in mixed precision the model states come out as in the ZeRO
paper (arXiv 1910.02054, section 5): 16, 4 + 12/N, 2 + 14/N and 16/N bytes per parameter.

Plain integers: knows neither torch nor a process group.
"""

from dataclasses import dataclass

from zero_core.config import ITEM_BYTES, ZeroConfig
from zero_core.layout import Layout
from zero_core.residency import buffer_bytes, gathered_buffers, gradient_buffers, item_bytes, kept_gathered


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of one rank by category.

    `padding` names the part of `parameters` and `gradients` buffers that rounds units up to whole
    chunks; it is not included in them. `activations` is what the caller says the model saves.
    """

    parameters: int
    gradients: int
    optimizer_states: int
    communication_buffers: int
    activations: int
    padding: int

    @property
    def model_states(self) -> int:
        """Parameters, gradients and optimizer states: what the paper's formulas count."""
        return self.parameters + self.gradients + self.optimizer_states

    @property
    def total(self) -> int:
        return self.model_states + self.communication_buffers + self.activations + self.padding


def rounds(micro_batches: int, world_size: int) -> int:
    """Micro-batches that the busiest rank computes in a step."""
    return -(-micro_batches // world_size)


def predict(layout: Layout, config: ZeroConfig, rank: int, *, activation_bytes: int = 0) -> Budget:
    """The bytes `rank` will hold under `layout`, which carries the world size."""
    item = ITEM_BYTES[config.precision]
    accumulates = rounds(config.micro_batches or layout.world_size, layout.world_size) > 1
    parameters = gradients = optimizer = padding = 0
    for index, unit in enumerate(layout.units):
        width = item_bytes(unit.dtype, config.precision)
        start, stop = layout.owned(index, rank)
        owned, tail = stop - start, layout.padded(index) - unit.numel
        if config.stage == 3:
            parameters += owned * width
        else:
            parameters += unit.numel * width
            padding += tail * width
        if not unit.trainable:
            continue
        if config.stage <= 1:
            gradients += unit.numel * item
            padding += tail * item
        if config.reproducible:
            gradients += owned * 4 * (config.micro_batches or layout.world_size).bit_length()
        elif config.stage >= 2 or accumulates:
            gradients += owned * (4 if accumulates else item)
        optimizer += (unit.numel if config.stage == 0 else owned) * optimizer_bytes(config.precision)
    return Budget(parameters, gradients, optimizer, _communication(layout, config), activation_bytes, padding)


def optimizer_bytes(precision: str) -> int:
    """fp32 momentum and variance, and an fp32 master where the parameters themselves are not fp32."""
    return 8 if precision == "fp32" else 12


def _communication(layout: Layout, config: ZeroConfig) -> int:
    """The staging buffer, and from stage 2 on the whole units that are in memory at one time."""
    whole = gradient_buffers(layout, config) + gathered_buffers(layout, config)
    return config.staging_bytes + buffer_bytes(whole, config.precision)


def wire_elements(layout: Layout, config: ZeroConfig) -> dict[str, float]:
    """Elements a rank sends in a step by kind, on average over the ranks.

    The paper's 2 psi for stages 0 to 2 and 3 psi for stage 3, times (N - 1) / N, with one micro-batch for
    each rank; reductions, and stage 3's gathers, recur with every round of micro-batches.
    """
    world = layout.world_size
    share = (world - 1) / world
    micro_batches = config.micro_batches or world
    psi, frozen = layout.numel(trainable=True), layout.numel(trainable=False)
    # A micro-batch moves a whole gradient less the part its own rank owns; gathers reach working ranks only.
    passes = micro_batches / world
    volume = {"reduce": psi * share * passes}
    if config.stage <= 2:
        volume["gather"] = psi * share
    else:
        volume["gather"] = (psi + frozen) * share * passes
        kept = sum(layout.units[index].numel for index in kept_gathered(layout, config))
        volume["gather_backward"] = (psi + frozen - kept) * share * passes
    return volume
