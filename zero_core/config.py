"""Settings of the engine. Plain values: knows neither torch nor a process group."""

import math
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from zero_core.errors import ConfigError

Stage = Literal[0, 1, 2, 3]
Precision = Literal["fp32", "bf16", "fp16"]
ScheduleKind = Literal["constant", "linear", "cosine"]
Checkpointing = Literal["none", "unit"]
Transport = Literal["auto", "network"]
DivergenceCheck = Literal["always", "first", "off"]
Products = Literal["auto", "native", "widened"]

ITEM_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one element of the compute dtype."""

TILE_STEP = 64
"""A tile is a multiple of this: cuts at such places leave a vectorised kernel's rounding as it is."""


DEFAULT_GROUP = "default"
"""The group of the parameters that no pattern matches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdamSettings:
    """What Adam and AdamW share."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_types(self)
        check_rates(self.lr, self.weight_decay)
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"eps {self.eps} must be positive")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas {self.betas} must be two numbers in [0, 1)")

    @property
    def moments(self) -> tuple[str, ...]:
        """The fp32 states kept for each parameter beside its master."""
        return "momentum", "variance"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig(_AdamSettings):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) on fp32 master parameters.

    lr            learning rate, before the schedule
    betas         decay of the running means of the gradient and of its square
    eps           added to the denominator
    weight_decay  decoupled from the gradient. Applies to parameters of two or more dimensions: biases and
                  norms are left out, unless a group says otherwise
    """

    weight_decay: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamConfig(_AdamSettings):
    """Adam (Kingma and Ba, arXiv 1412.6980) on fp32 master parameters.

    lr            learning rate, before the schedule
    betas         decay of the running means of the gradient and of its square
    eps           added to the denominator
    weight_decay  L2 penalty: this times the parameter is added to the clipped gradient. Applies as AdamW's
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SGDConfig:
    """Stochastic gradient descent on fp32 master parameters, as torch.optim.SGD computes it.

    lr            learning rate, before the schedule
    momentum      decay of the running sum of gradients; 0: none is kept
    dampening     the gradient enters that sum times 1 - dampening, but for the first, which starts it whole
    nesterov      look ahead along the momentum; needs a momentum and no dampening
    weight_decay  L2 penalty: this times the parameter is added to the clipped gradient. Applies as AdamW's
    """

    lr: float = 1e-2
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_types(self)
        check_rates(self.lr, self.weight_decay)
        if not 0 <= self.momentum < 1 or not 0 <= self.dampening <= 1:
            raise ConfigError(
                f"momentum {self.momentum} must lie in [0, 1), dampening {self.dampening} in [0, 1]"
            )
        if self.nesterov and not (self.momentum and not self.dampening):
            raise ConfigError(
                f"nesterov needs a momentum and no dampening: "
                f"momentum is {self.momentum}, dampening {self.dampening}"
            )

    @property
    def moments(self) -> tuple[str, ...]:
        """The fp32 states kept for each parameter beside its master."""
        return ("momentum",) if self.momentum else ()


OptimizerConfig: TypeAlias = AdamWConfig | AdamConfig | SGDConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters stepped with settings of their own. None: as the optimizer has it.

    name          what reports call it
    patterns      shell-style patterns (`*`, `?`, `[...]`) over whole parameter names; a tied parameter goes
                  by the first of its names. The first group that matches has the parameter; a group
                  that matches nothing is fine
    lr            learning rate, before the schedule, in place of the optimizer's
    lr_factor     times the optimizer's learning rate; instead of `lr`
    weight_decay  applies to all of the group's parameters, whatever their dimensions
    betas, eps    Adam and AdamW only
    momentum, dampening, nesterov  SGD only; momentum may not turn to or from 0, as all units keep one or none
    """

    name: str
    patterns: tuple[str, ...]
    lr: float | None = None
    lr_factor: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    momentum: float | None = None
    dampening: float | None = None
    nesterov: bool | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if not self.name or self.name == DEFAULT_GROUP:
            raise ConfigError(
                f"a group cannot be called {self.name!r}: {DEFAULT_GROUP!r} is all that no group matches"
            )
        if self.lr is not None and self.lr_factor is not None:
            raise ConfigError(
                f"group {self.name!r} has both lr {self.lr} and lr_factor {self.lr_factor}: set one of them"
            )
        if self.lr_factor is not None and not 0 <= self.lr_factor < math.inf:
            raise ConfigError(f"lr_factor {self.lr_factor} of group {self.name!r} must not be negative")

    def applied(self, optimizer: OptimizerConfig) -> OptimizerConfig:
        """The optimizer's settings as this group has them; ConfigError for one that the optimizer has not."""
        changes = {
            f.name: value
            for f in fields(self)
            if f.name not in ("name", "patterns", "lr_factor")
            and (value := getattr(self, f.name)) is not None
        }
        unknown = sorted(changes.keys() - {f.name for f in fields(optimizer)})
        if unknown:
            raise ConfigError(
                f"group {self.name!r} sets {unknown}, which {type(optimizer).__name__} has not: "
                f"it has {sorted(f.name for f in fields(optimizer))}"
            )
        if self.lr_factor is not None:
            changes["lr"] = optimizer.lr * self.lr_factor
        try:
            applied = replace(optimizer, **changes)
        except ConfigError as error:
            raise ConfigError(f"group {self.name!r}: {error}") from error
        if applied.moments != optimizer.moments:
            raise ConfigError(
                f"group {self.name!r} sets momentum {self.momentum}, but the optimizer's is not: "
                "either all parameters have a momentum or none"
            )
        return applied


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over the optimizer's updates, as a factor of each group's rate.

    kind          shape after the warm-up
    warmup_steps  updates of linear rise; the last of them has factor 1
    total_steps   the update count at which `final_ratio` is reached and kept; linear and cosine need it
    final_ratio   factor of the last update (linear, cosine)
    """

    kind: ScheduleKind = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        _check_types(self)
        if self.kind not in ("constant", "linear", "cosine"):
            raise ConfigError(f"schedule kind {self.kind!r} must be constant, linear or cosine")
        if self.warmup_steps < 0 or not 0 <= self.final_ratio <= 1:
            raise ConfigError(
                f"warmup_steps {self.warmup_steps} must not be negative, "
                f"final_ratio {self.final_ratio} must lie in [0, 1]"
            )
        if self.total_steps is None and self.kind != "constant":
            raise ConfigError(f"a {self.kind} schedule needs total_steps: the steps until final_ratio")
        if self.total_steps is not None and not self.total_steps >= max(1, self.warmup_steps):
            raise ConfigError(
                f"total_steps {self.total_steps} must be at least 1 and warmup_steps {self.warmup_steps}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling, in fp16 only: the loss is multiplied before backward, gradients divided after it.

    initial          the first scale. Powers of two keep scaling exact, here and in the two factors
    growth           factor after `growth_interval` good steps in a row; 1: never grows
    growth_interval  good steps before the scale grows
    backoff          factor after a step whose gradients overflowed, which is skipped
    floor            an overflow at this scale is an error
    ceiling          the scale never grows beyond this
    """

    initial: float = 65536.0
    growth: float = 2.0
    growth_interval: int = 2000
    backoff: float = 0.5
    floor: float = 1.0
    ceiling: float = 2.0**24

    def __post_init__(self) -> None:
        _check_types(self)
        if not 0 < self.floor <= self.initial <= self.ceiling < math.inf:
            raise ConfigError(
                f"loss scale must satisfy 0 < floor {self.floor} <= initial {self.initial} "
                f"<= ceiling {self.ceiling}, all finite"
            )
        if not 1 <= self.growth < math.inf or not 0 < self.backoff < 1 or self.growth_interval < 1:
            raise ConfigError(
                f"loss scale: growth {self.growth} and growth_interval {self.growth_interval} must be at "
                f"least 1, backoff {self.backoff} must lie between 0 and 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """How a model is partitioned and stepped.

    stage           0: nothing partitioned; 1: optimizer states; 2: and gradients; 3: and parameters
    precision       dtype of forward and backward; bf16 and fp16 keep fp32 master parameters and moments
    low_precision_products  matrix products, attention and convolutions in bf16 and fp16 on a CPU: "auto"
                    widens them to fp32 and rounds once where torch has no vector kernels for the dtype,
                    "widened" always, which a GPU refuses, "native" never; not used in fp32
    micro_batches   M, the micro-batches of one step over all ranks; None: one for each rank
    optimizer       which one, and its settings for the parameters that no group matches
    groups          parameters with settings of their own; the first match counts
    schedule        learning rates over the updates
    loss_scale      how fp16 keeps small gradients; not used in fp32 and bf16
    clip_norm       largest global gradient norm; None: gradients are not clipped
    tile            elements of the smallest piece of a unit that can change owner; a multiple of 64
    staging_bytes   size of the one communication buffer; it does not grow with the model
    transport       "auto": ranks on one host read each other's memory, others send over the group (gloo or
                    NCCL); "network": all send. The numbers do not depend on it
    reduction       on NCCL: "native", its own reduce-scatter, in its order and the compute dtype, or
                    "ordered", the exchange and fp32 sum in rank order that CPUs always have
    overlap         a unit's reduction goes on while backward fills the next one; no number depends on it
    prefetch_units  stage 3: how many units are gathered ahead of their use, 0 or 1
    keep_gathered_bytes  stage 3: units, the smallest first, that stay whole from forward to backward in so
                    many bytes: less is gathered twice. 0 moves 3 psi, as much as the model 2 psi
    divergence_check  compare what ranks are about to do before data move between hosts: "always", for the
                    "first" three steps, or "off"; within a host it costs nothing and is always done; on
                    NCCL nothing is compared
    collective_timeout_s  longest wait for another rank
    broadcast_initial  start all ranks from rank 0's parameters
    reproducible    add micro-batches in one fixed tree, and norm and loss exactly, so that the same bits come
                    out for every number of ranks; costs log2(M) fp32 accumulators of the owned gradients
    activation_checkpointing  "unit": of each unit but the root only the inputs are kept for backward, which
                    computes the unit's forward once more; "none": all that autograd saves is kept
    checkpoint_offload  keep those inputs in page-locked host memory; needs a GPU
    replicas        1: a rank's states are copied into the memory of another rank, on another host where there
                    are several, so that they outlive it; 0: they are not. At stage 0 all have them anyway
    replica_every_steps  steps from one copy to the next: so many are repeated at most after a loss
    partition_activations  split those inputs over the ranks of a model-parallel group (the paper's Pa);
                    refused, as there is no model parallelism yet
    """

    stage: Stage = 2
    precision: Precision = "fp32"
    low_precision_products: Products = "auto"
    micro_batches: int | None = None
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    groups: tuple[ParameterGroup, ...] = ()
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss_scale: LossScale = field(default_factory=LossScale)
    clip_norm: float | None = None
    tile: int = 256
    staging_bytes: int = 8 << 20
    transport: Transport = "auto"
    reduction: Literal["native", "ordered"] = "native"
    overlap: bool = True
    prefetch_units: int = 1
    keep_gathered_bytes: int = 0
    divergence_check: DivergenceCheck = "always"
    collective_timeout_s: float = 600.0
    broadcast_initial: bool = True
    reproducible: bool = False
    activation_checkpointing: Checkpointing = "none"
    checkpoint_offload: bool = False
    replicas: int = 0
    replica_every_steps: int = 1
    partition_activations: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
        if self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"stage {self.stage!r} must be 0, 1, 2 or 3")
        if self.precision not in ITEM_BYTES:
            raise ConfigError(f"precision {self.precision!r} must be one of {sorted(ITEM_BYTES)}")
        if self.low_precision_products not in ("auto", "native", "widened"):
            raise ConfigError(
                f"low_precision_products {self.low_precision_products!r} must be 'auto', 'native' or "
                "'widened'"
            )
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ConfigError(f"micro_batches {self.micro_batches} must be at least 1")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm {self.clip_norm} must be positive, or None for no clipping")
        if self.tile < 1 or self.tile % TILE_STEP:
            raise ConfigError(f"tile {self.tile} must be a positive multiple of {TILE_STEP} elements")
        if self.staging_bytes < 4096:
            raise ConfigError(f"staging_bytes {self.staging_bytes} must be at least 4096")
        if self.replicas not in (0, 1) or self.replica_every_steps < 1:
            raise ConfigError(
                f"replicas {self.replicas} must be 0 or 1, replica_every_steps {self.replica_every_steps} at "
                "least 1"
            )
        _check_groups(self.groups, self.optimizer)
        self._check_exchange()
        self._check_activations()

    def _check_exchange(self) -> None:
        if self.transport not in ("auto", "network"):
            raise ConfigError(f"transport {self.transport!r} must be 'auto' or 'network'")
        if self.reduction not in ("native", "ordered"):
            raise ConfigError(f"reduction {self.reduction!r} must be 'native' or 'ordered'")
        if self.divergence_check not in ("always", "first", "off"):
            raise ConfigError(
                f"divergence_check {self.divergence_check!r} must be 'always', 'first' or 'off'"
            )
        if self.prefetch_units not in (0, 1):
            raise ConfigError(f"prefetch_units {self.prefetch_units} must be 0 or 1")
        if self.keep_gathered_bytes < 0:
            raise ConfigError(f"keep_gathered_bytes {self.keep_gathered_bytes} must not be negative")
        if self.keep_gathered_bytes and self.stage != 3:
            raise ConfigError(
                f"keep_gathered_bytes means something at stage 3 only; the stage is {self.stage}: set it to 0"
            )
        if not self.collective_timeout_s > 0:
            raise ConfigError(f"collective_timeout_s {self.collective_timeout_s} must be positive")

    def _check_activations(self) -> None:
        if self.activation_checkpointing not in ("none", "unit"):
            raise ConfigError(
                f"activation_checkpointing {self.activation_checkpointing!r} must be 'none' or 'unit'"
            )
        if self.checkpoint_offload and self.activation_checkpointing == "none":
            raise ConfigError(
                "checkpoint_offload is set and activation_checkpointing is 'none': there are no checkpoints "
                "to move to the host; set activation_checkpointing='unit'"
            )
        if self.partition_activations:
            raise ConfigError(
                "partition_activations splits each checkpoint over the ranks of a model-parallel group, "
                "which hold the same one; this engine has no model parallelism yet, and data-parallel ranks "
                "hold different ones, of which nothing can be saved this way: turn it off"
            )


def _check_groups(groups: tuple[ParameterGroup, ...], optimizer: OptimizerConfig) -> None:
    names = [group.name for group in groups]
    if len(set(names)) < len(names):
        raise ConfigError(f"groups {names} must have different names")
    for group in groups:
        group.applied(optimizer)  # refuses what the optimizer has not


def check_rates(lr: float, weight_decay: float = 0.0) -> None:
    """Raises ConfigError for what no optimizer steps with."""
    if not 0 <= lr < math.inf or not 0 <= weight_decay < math.inf:
        raise ConfigError(f"lr {lr} and weight_decay {weight_decay} must be finite and not negative")


def _check_types(settings: object) -> None:
    """Raises ConfigError for the first setting that is not of the type its dataclass declares."""
    kind: Any = type(settings)
    for name, wanted in _hints(kind).items():
        value = getattr(settings, name)
        if not _is_a(value, wanted):
            raise ConfigError(
                f"{name} {value!r} of {kind.__name__} must be {_called(wanted)}, not {type(value).__name__}"
            )


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _is_a(value: Any, wanted: Any) -> bool:
    """Whether a value is of an annotated type: a bool is no number, an int is a float."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin is UnionType:
        return any(_is_a(value, one) for one in inner)
    if origin is Literal:
        return type(value) in {type(one) for one in inner}
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        return len(kinds) != len(value) or all(map(_is_a, value, kinds))  # how many is another check's
    if wanted in (int, float):
        return isinstance(value, (int, wanted)) and not isinstance(value, bool)
    return isinstance(value, wanted)


def _called(wanted: Any) -> str:
    """An annotated type in words."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin is UnionType:
        return " or ".join(_called(one) for one in inner)
    if origin is Literal:
        return " or ".join(repr(one) for one in inner)
    if origin is tuple:
        return f"a tuple of {_called(inner[0])}"
    return "None" if wanted is NoneType else str(wanted.__name__)
