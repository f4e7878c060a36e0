"""Settings of the engine. Plain values: knows neither torch nor a process group."""

from dataclasses import dataclass, field
from typing import Literal

from zero_core.errors import ConfigError

Stage = Literal[0, 1, 2, 3]
Precision = Literal["fp32", "bf16"]

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
    broadcast_initial  start all ranks from rank 0's parameters
    reproducible    add micro-batches in one fixed tree, and norm and loss exactly, so that the same bits come
                    out for every number of ranks; costs log2(M) fp32 accumulators of the owned gradients
    """

    stage: Stage = 2
    precision: Precision = "fp32"
    micro_batches: int | None = None
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    clip_norm: float | None = None
    tile: int = 256
    staging_bytes: int = 8 << 20
    broadcast_initial: bool = True
    reproducible: bool = False

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
        if self.staging_bytes < 4096:
            raise ConfigError(f"staging_bytes {self.staging_bytes} must be at least 4096")
