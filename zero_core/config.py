"""Settings of the engine. Plain values: knows neither torch nor a process group."""

from dataclasses import dataclass, field
from typing import Literal

from zero_core.errors import ConfigError

Stage = Literal[0, 1, 2, 3]
Precision = Literal["fp32", "bf16"]
Checkpointing = Literal["none", "unit"]

ITEM_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2}
"""Bytes of one element of the compute dtype."""

TILE_STEP = 64
"""A tile is a multiple of this: cuts at such places leave a vectorised kernel's rounding as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) on fp32 master parameters.

    Weight decay applies to parameters of two or more dimensions: biases and norms are left out.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        if not self.lr >= 0 or not self.eps > 0 or not self.weight_decay >= 0:
            raise ConfigError(
                f"lr {self.lr} and weight_decay {self.weight_decay} must not be negative, "
                f"eps {self.eps} must be positive"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas {self.betas} must lie in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """How a model is partitioned and stepped.

    stage           0: nothing partitioned; 1: optimizer states; 2: and gradients; 3: and parameters
    precision       dtype of forward and backward; bf16 keeps fp32 master parameters and moments
    micro_batches   M, the micro-batches of one step over all ranks; None: one for each rank
    clip_norm       largest global gradient norm; None: gradients are not clipped
    tile            elements of the smallest piece of a unit that can change owner; a multiple of 64
    staging_bytes   size of the one communication buffer; it does not grow with the model
    transport       "auto": ranks on one host read each other's memory, others send over the group (gloo or
                    NCCL); "network": all send. The numbers do not depend on it
    overlap         a unit's reduction goes on while backward fills the next one; no number depends on it
    prefetch_units  stage 3: how many units are gathered ahead of their use, 0 or 1
    keep_gathered_bytes  stage 3: units, the smallest first, that stay whole from forward to backward in so
                    many bytes: less is gathered twice. 0 moves 3 psi, as much as the model 2 psi
    divergence_check  compare what ranks are about to do before data move between hosts: "always", for the
                    "first" three steps, or "off"; within a host it costs nothing and is always done
    collective_timeout_s  longest wait for another rank
    broadcast_initial  start all ranks from rank 0's parameters
    reproducible    add micro-batches in one fixed tree, and norm and loss exactly, so that the same bits come
                    out for every number of ranks; costs log2(M) fp32 accumulators of the owned gradients
    activation_checkpointing  "unit": of each unit but the root only the inputs are kept for backward, which
                    computes the unit's forward once more; "none": all that autograd saves is kept
    checkpoint_offload  keep those inputs in page-locked host memory; needs a GPU
    partition_activations  split those inputs over the ranks of a model-parallel group (the paper's Pa);
                    refused, as there is no model parallelism yet
    """

    stage: Stage = 2
    precision: Precision = "fp32"
    micro_batches: int | None = None
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    clip_norm: float | None = None
    tile: int = 256
    staging_bytes: int = 8 << 20
    transport: Literal["auto", "network"] = "auto"
    overlap: bool = True
    prefetch_units: int = 1
    keep_gathered_bytes: int = 0
    divergence_check: Literal["always", "first", "off"] = "always"
    collective_timeout_s: float = 600.0
    broadcast_initial: bool = True
    reproducible: bool = False
    activation_checkpointing: Checkpointing = "none"
    checkpoint_offload: bool = False
    partition_activations: bool = False

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"stage {self.stage!r} must be 0, 1, 2 or 3")
        if self.precision not in ITEM_BYTES:
            raise ConfigError(f"precision {self.precision!r} must be one of {sorted(ITEM_BYTES)}")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ConfigError(f"micro_batches {self.micro_batches} must be at least 1")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm {self.clip_norm} must be positive, or None for no clipping")
        if self.tile < 1 or self.tile % TILE_STEP:
            raise ConfigError(f"tile {self.tile} must be a positive multiple of {TILE_STEP} elements")
        if self.transport not in ("auto", "network"):
            raise ConfigError(f"transport {self.transport!r} must be 'auto' or 'network'")
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
        if self.staging_bytes < 4096:
            raise ConfigError(f"staging_bytes {self.staging_bytes} must be at least 4096")
        self._check_activations()

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
