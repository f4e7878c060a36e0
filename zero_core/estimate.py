"""The formulas of ZeRO's memory and volume, and what they give for a model of which little is known.

Owns how many bytes an element takes at each stage and how often it crosses the wire. `budget` applies these
formulas to every unit of a layout; here they are applied to a parameter count, as in the ZeRO paper (arXiv
1910.02054, section 5): 16, 4 + 12/N, 2 + 14/N and 16/N bytes per parameter for Adam in mixed precision. The
two differ by what a layout rounds to whole tiles (`budget.tile_rounding`); padding lies beside both.

Plain integers and fractions: knows neither torch nor a layout nor a process group.
"""

from dataclasses import dataclass
from fractions import Fraction

from zero_core.config import ITEM_BYTES
from zero_core.errors import ConfigError

STAGES = (0, 1, 2, 3)


MOMENTS: dict[str, int] = {"adamw": 2, "adam": 2, "sgd": 1}
"""fp32 numbers that an optimizer keeps for a parameter beside its master; sgd: with momentum."""

FP32_BYTES = 4
"""Bytes of one element of a master, a moment or a sum, whatever the precision."""

ELEMENTS_PER_POSITION = 12
"""Activations of a transformer block, in tensors of [batch, sequence, hidden] (the paper's estimate)."""

_SLICING_PER_PASS = 4
"""Tensor slicing sends two all-reduces of [batch, sequence, hidden] a block and pass, of two sends each."""


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer_states: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """What elements take at a stage: the one place where a stage's bytes are said.

    item             bytes of an element of the compute dtype
    optimizer_bytes  K, bytes of an element of the optimizer states; see `optimizer_bytes`
    sum_bytes        of fp32 sums of gradients for an owned element, see `gradient_sum_bytes`; 0 without any
    """

    stage: int
    item: int
    optimizer_bytes: int
    sum_bytes: int

    def states(
        self, whole: int, owned: int, *, width: int | None = None, trainable: bool = True
    ) -> ModelStates:
        """Bytes of a rank that owns `owned` of `whole` elements.

        `width` is an element's bytes where they are not the compute dtype's. Frozen elements have neither
        gradients nor optimizer states.
        """
        parameters = (owned if self.stage == 3 else whole) * (width or self.item)
        if not trainable:
            return ModelStates(parameters, 0, 0)
        if self.stage <= 1:
            gradients = whole * self.item + owned * self.sum_bytes
        else:
            gradients = owned * (self.sum_bytes or self.item)
        stepped = whole if self.stage == 0 else owned
        return ModelStates(parameters, gradients, stepped * self.optimizer_bytes)


def moments_of(optimizer: str) -> int:
    """fp32 numbers that an optimizer keeps for a parameter. Raises ConfigError for one that is not known."""
    if optimizer not in MOMENTS:
        raise ConfigError(f"optimizer {optimizer!r} must be one of {', '.join(MOMENTS)}")
    return MOMENTS[optimizer]


def optimizer_bytes(item: int, moments: int) -> int:
    """K: fp32 moments, and an fp32 master where the parameters, `item` bytes an element, are not fp32."""
    return FP32_BYTES * (moments + (item != FP32_BYTES))


def saved_bytes(moments: int) -> int:
    """Bytes of a trained element in a checkpoint, whatever the precision: its fp32 master and moments."""
    return FP32_BYTES * (1 + moments)


def gradient_sum_bytes(micro_batches: int, world_size: int, *, reproducible: bool = False) -> int:
    """Bytes of fp32 sums for an owned element: one over rounds; the reproducible tree has log2(M) of them."""
    if reproducible:
        return FP32_BYTES * micro_batches.bit_length()
    return FP32_BYTES if micro_batches > world_size else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained, as far as bytes go.

    dp             N, the data-parallel degree: the ranks that states are partitioned over
    mp             the model-parallel degree: each rank trains 1 / mp of the model
    precision      of forward and backward: fp32, bf16 or fp16
    moments        fp32 numbers the optimizer keeps for a parameter, see `moments_of`
    micro_batches  M of one step over all N ranks; None: one for each rank
    reproducible   whether gradients are added in the reproducible mode's tree
    """

    dp: int
    mp: int = 1
    precision: str = "bf16"
    moments: int = 2
    micro_batches: int | None = None
    reproducible: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "mp", "micro_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value} must be at least 1")
        if self.precision not in ITEM_BYTES:
            raise ConfigError(f"precision {self.precision!r} must be one of {', '.join(sorted(ITEM_BYTES))}")
        if self.moments < 0:
            raise ConfigError(f"moments {self.moments} must not be negative")

    @property
    def item(self) -> int:
        """Bytes of an element of the compute dtype."""
        return ITEM_BYTES[self.precision]


def model_states(parameters: int, training: Training, stage: int) -> ModelStates:
    """Model states of a model of so many trainable parameters, on the rank that holds the most.

    Shares are whole elements, rounded up: N ranks own ceil(psi / N) each at most. Raises ConfigError for a
    stage that does not exist, or fewer than one parameter.
    """
    _check(parameters, stage)
    return _states(_share(parameters, training.mp), training, stage)


def wire_elements(parameters: int, training: Training, stage: int) -> dict[str, Fraction]:
    """Elements a rank sends in a step by kind to its N - 1 data-parallel peers, on average over the ranks.

    The paper's 2 psi for stages 0 to 2 and 3 psi for stage 3, times (N - 1) / N, with one micro-batch for
    each rank; reductions, and stage 3's gathers, recur with every round.
    """
    _check(parameters, stage)
    psi, world = _share(parameters, training.mp), training.dp
    once = psi * Fraction(world - 1, world)
    # A micro-batch moves a whole gradient less the part its own rank owns; gathers reach working ranks only.
    recurring = once * Fraction(training.micro_batches or world, world)
    if stage <= 2:
        return {"reduce": recurring, "gather": once}
    return {"reduce": recurring, "gather": recurring, "gather_backward": recurring}


def largest_model(device_bytes: int, training: Training, stage: int) -> int:
    """Parameters of the largest model whose states fit into `device_bytes` of each device; 0: none does.

    Found with the very function that predicts, so that it and only it decides.
    """
    _check(1, stage)
    # Each parameter takes at least a byte of the rank that owns it.
    low, high = 0, max(device_bytes, 0) * training.dp
    while low < high:
        middle = (low + high + 1) // 2
        if _states(middle, training, stage).total <= device_bytes:
            low = middle
        else:
            high = middle - 1
    return low * training.mp


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A transformer by its sizes, and the micro-batch that one rank computes at a time."""

    layers: int
    hidden: int
    batch: int
    sequence: int

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "batch", "sequence"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} must be at least 1")

    @property
    def stream(self) -> int:
        """Elements of [batch, sequence, hidden]: what passes from one block to the next."""
        return self.batch * self.sequence * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Activation checkpointing: only the inputs of segments are kept, the rest is computed again.

    every        blocks in a segment
    partitioned  Pa: each model-parallel rank keeps its part of a checkpoint
    on_host      checkpoints are kept in host memory; with `partitioned`, the paper's Pa+cpu
    """

    every: int = 1
    partitioned: bool = False
    on_host: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"a segment of {self.every} blocks must have at least 1")


@dataclass(frozen=True, slots=True)
class Activations:
    """What one micro-batch keeps for its backward, on one rank.

    kept_bytes        held from forward to backward on the device: all activations, or the checkpoints
    recomputed_bytes  those of the one segment that is computed again at a time
    host_bytes        checkpoints in host memory
    copied_bytes      their way to the host and back
    recompute         what is computed again, as a share of forward and backward
    slicing_elements  what tensor slicing itself sends per rank, forward, backward and recomputation
    gathered_elements what a rank sends to put partitioned checkpoints together again
    """

    kept_bytes: int
    recomputed_bytes: int
    host_bytes: int
    copied_bytes: int
    recompute: Fraction
    slicing_elements: Fraction
    gathered_elements: Fraction

    @property
    def device_bytes(self) -> int:
        """Bytes at the peak on the device."""
        return self.kept_bytes + self.recomputed_bytes


def transformer_parameters(layers: int, hidden: int) -> int:
    """Parameters of the blocks' matrices: 12 hidden^2 each, with a feed-forward layer of 4 hidden."""
    return 12 * layers * hidden**2


def activations(
    model: Transformer, training: Training, checkpointing: Checkpointing | None = None
) -> Activations:
    """Activations of a transformer by the paper's formulas; without checkpointing all of them are kept.

    Tensor slicing divides some tensors of a block and not others: none is counted as divided here but
    checkpoints, if they are partitioned. Raises ConfigError if they are to be partitioned over one rank.
    """
    block = ELEMENTS_PER_POSITION * model.stream
    sliced = Fraction(training.mp - 1, training.mp) * model.stream * model.layers
    if checkpointing is None:
        # Backward takes twice the work of forward, and its all-reduces are as many.
        kept = block * model.layers * training.item
        return Activations(kept, 0, 0, 0, Fraction(0), 2 * _SLICING_PER_PASS * sliced, Fraction(0))
    if checkpointing.partitioned and training.mp == 1:
        raise ConfigError(
            "activations can only be partitioned over model-parallel ranks, and mp is 1; raise mp, or do not "
            "partition them"
        )
    segments = _share(model.layers, checkpointing.every)
    kept = segments * model.stream
    if checkpointing.partitioned:
        kept = _share(kept, training.mp)
    kept *= training.item
    on_host = kept if checkpointing.on_host else 0
    return Activations(
        kept_bytes=kept - on_host,
        recomputed_bytes=block * min(checkpointing.every, model.layers) * training.item,
        host_bytes=on_host,
        copied_bytes=2 * on_host,
        recompute=Fraction(1, 3),
        slicing_elements=3 * _SLICING_PER_PASS * sliced,
        gathered_elements=sliced / checkpointing.every if checkpointing.partitioned else Fraction(0),
    )


def _states(local: int, training: Training, stage: int) -> ModelStates:
    """Of `local` parameters: those of one model-parallel rank."""
    formula = Formula(
        stage=stage,
        item=training.item,
        optimizer_bytes=optimizer_bytes(training.item, training.moments),
        sum_bytes=gradient_sum_bytes(
            training.micro_batches or training.dp, training.dp, reproducible=training.reproducible
        ),
    )
    return formula.states(local, _share(local, training.dp))


def _share(elements: int, ranks: int) -> int:
    return -(-elements // ranks)


def _check(parameters: int, stage: int) -> None:
    if stage not in STAGES:
        raise ConfigError(f"stage {stage!r} must be 0, 1, 2 or 3")
    if parameters < 1:
        raise ConfigError(f"a model of {parameters} parameters has nothing to train; give at least 1")
