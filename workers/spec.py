"""The job specification: everything a user says about a job, validated, and nothing else.

Plain pydantic: importing it loads neither Ray nor torch, so the API, the command line and the cluster
share one definition. Unknown fields are refused everywhere. Optimizers and loss scaling are put before the
engine's own settings as they are read, so that what it would refuse is refused on submission.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from workers.engine_config import engine_config
from zero_core.config import (
    AdamConfig,
    AdamWConfig,
    OptimizerConfig,
    ParameterGroup,
    ScheduleKind,
    SGDConfig,
    ZeroConfig,
)
from zero_core.config import LossScale as EngineLossScale
from zero_core.errors import ConfigError

_MOST = 2**53
"""Beyond that not every reader of JSON is exact."""


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {value}")
    return value


_NoBool = BeforeValidator(_no_bool)
"""Beside a Literal of numbers, to which True is 1."""


class _Section(BaseModel):
    """Strict: "yes" is no bool, and 2.0 no int. What JSON has no type of its own for is told by its field."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Precision(StrEnum):
    """Arithmetic of forward and backward. bf16 and fp16 keep fp32 masters; fp16 scales the loss."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class GPTModel(_Section):
    """The built-in decoder-only transformer, by its sizes."""

    kind: Literal["gpt"] = "gpt"
    layers: int = Field(4, ge=1, le=10_000, description="Number of transformer blocks.")
    hidden: PositiveInt = Field(128, description="Width of the residual stream; a multiple of `heads`.")
    heads: PositiveInt = Field(4, description="Attention heads per block.")
    vocabulary: PositiveInt = Field(256, description="Number of token ids; 256 for text read as bytes.")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Dropout probability in every block.")
    tied_head: bool = Field(True, description="Whether the output head shares the token embedding's weight.")

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "GPTModel":
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} must be a multiple of heads {self.heads}")
        return self


class CustomModel(_Section):
    """A user's own model, imported on the workers.

    The class follows the protocol in `workers.models`: built with `arguments`, called with
    `(inputs, targets)`, both int64 of shape [batch, sequence], it returns the scalar mean loss.
    """

    kind: Literal["custom"]
    factory: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="`package.module:Class`, importable on every worker.",
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class.")


class TextData(_Section):
    """Files read as bytes, one token a byte, concatenated in sorted order."""

    kind: Literal["text"]
    paths: list[str] = Field(
        min_length=1,
        description="Files, folders (read recursively) or glob patterns, as seen by the workers; "
        "`python:` stands for the sources and documentation that ship with the workers' Python.",
    )
    max_bytes: PositiveInt | None = Field(None, description="Read at most so many bytes in all.")


class TokenData(_Section):
    """A flat binary file of token ids, memory-mapped."""

    kind: Literal["tokens"]
    path: str = Field(description="The file, as seen by the workers.")
    dtype: Literal["uint16", "uint32", "int32"] = Field(
        "uint16", description="Type of one token, little endian."
    )


class SyntheticData(_Section):
    """Seeded random tokens, for benchmarks only: there is nothing in them to learn."""

    kind: Literal["synthetic"]
    samples: PositiveInt = Field(65_536, description="Number of distinct samples.")


_Beta = Annotated[float, Field(ge=0, lt=1)]
_Betas = Annotated[tuple[_Beta, _Beta], Field(strict=False)]


class _Group(_Section):
    """What every optimizer's groups have."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,79}$", description="What reports call it; not `default`."
    )
    patterns: tuple[str, ...] = Field(
        strict=False,
        description="Shell-style patterns (`*`, `?`, `[...]`) over whole parameter names. The first group "
        "that matches has the parameter; a tied parameter goes by the first of its names.",
    )
    lr: PositiveFloat | None = Field(None, description="Peak learning rate, in place of the optimizer's.")
    lr_factor: float | None = Field(
        None, ge=0, description="Times the optimizer's peak learning rate; instead of `lr`."
    )
    weight_decay: float | None = Field(
        None, ge=0, description="For all parameters of the group, whatever their dimensions."
    )


class AdamGroup(_Group):
    """Parameters with settings of their own under AdamW or Adam; null: as the optimizer has it."""

    betas: _Betas | None = Field(None, description="In place of the optimizer's.")
    eps: PositiveFloat | None = Field(None, description="In place of the optimizer's.")


class SGDGroup(_Group):
    """Parameters with settings of their own under SGD; null: as the optimizer has it."""

    momentum: float | None = Field(
        None, ge=0, lt=1, description="In place of the optimizer's; 0 only where that is 0."
    )
    dampening: float | None = Field(None, ge=0, le=1, description="In place of the optimizer's.")
    nesterov: bool | None = Field(None, description="In place of the optimizer's.")


_GROUPS = Field(
    (), strict=False, description="Parameters with settings of their own; all others take the optimizer's."
)


class _Optimizer(_Section):
    """What every optimizer has."""

    kind: str
    lr: PositiveFloat = Field(1e-3, description="Peak learning rate.")
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: PositiveFloat | None = Field(
        1.0, description="Largest global gradient norm; null: no clipping."
    )
    groups: tuple[_Group, ...] = _GROUPS

    def engine_settings(self) -> OptimizerConfig:
        """The same as the engine's settings: the fields have the same names there."""
        settings = self.model_dump(exclude={"kind", "clip_norm", "groups"})
        return _ENGINE_SETTINGS[self.kind](**settings)

    def engine_groups(self) -> tuple[ParameterGroup, ...]:
        """The groups as the engine's settings."""
        return tuple(ParameterGroup(**group.model_dump()) for group in self.groups)

    @model_validator(mode="after")
    def _as_the_engine_allows(self) -> Self:
        try:
            ZeroConfig(optimizer=self.engine_settings(), groups=self.engine_groups())
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self


class _AdamSettings(_Optimizer):
    """What the optimizers with running means of the gradient and of its square have."""

    betas: _Betas = Field(
        (0.9, 0.95), description="Decay of the running means of the gradient and of its square."
    )
    eps: PositiveFloat = Field(1e-8, description="Added to the denominator.")
    groups: tuple[AdamGroup, ...] = _GROUPS


class AdamWOptimizer(_AdamSettings):
    """AdamW on fp32 master parameters. Weight decay applies to parameters of two or more dimensions."""

    kind: Literal["adamw"] = "adamw"
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay.")


class AdamOptimizer(_AdamSettings):
    """Adam on fp32 master parameters. Weight decay applies to parameters of two or more dimensions."""

    kind: Literal["adam"]
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty, added to the clipped gradient.")


class SGDOptimizer(_Optimizer):
    """SGD with momentum on fp32 master parameters. Weight decay as with Adam: of two or more dimensions."""

    kind: Literal["sgd"]
    lr: PositiveFloat = Field(1e-2, description="Peak learning rate.")
    momentum: float = Field(
        0.9, ge=0, lt=1, description="Decay of the running sum of gradients; 0: none is kept."
    )
    dampening: float = Field(
        0.0, ge=0, le=1, description="Gradients enter that sum times 1 - dampening, but for the first."
    )
    nesterov: bool = Field(
        False, description="Look ahead along the momentum; needs a momentum and no dampening."
    )
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty, added to the clipped gradient.")
    groups: tuple[SGDGroup, ...] = _GROUPS


_ENGINE_SETTINGS: dict[str, type[OptimizerConfig]] = {
    "adamw": AdamWConfig,
    "adam": AdamConfig,
    "sgd": SGDConfig,
}


DEFAULT_OPTIMIZER = "adamw"
"""The kind of an optimizer that names none, as when there was no other."""


def _with_kind(value: Any) -> Any:
    return {"kind": DEFAULT_OPTIMIZER, **value} if isinstance(value, Mapping) else value


Optimizer = Annotated[
    Annotated[AdamWOptimizer | AdamOptimizer | SGDOptimizer, Field(discriminator="kind")],
    BeforeValidator(_with_kind),
]


class LossScale(_Section):
    """Dynamic loss scaling, fp16 only. Where gradients overflow the step is skipped; its data is used up."""

    initial: PositiveFloat = Field(65536.0, description="What losses are multiplied by at first.")
    growth: float = Field(
        2.0, ge=1, description="Factor after `growth_interval` good steps in a row; 1: it never grows."
    )
    growth_interval: PositiveInt = Field(2000, description="Good steps before the scale grows.")
    backoff: float = Field(0.5, gt=0, lt=1, description="Factor after a skipped step.")
    floor: PositiveFloat = Field(1.0, description="An overflow at this scale ends the job.")
    ceiling: PositiveFloat = Field(2.0**24, description="The scale never grows beyond this.")

    @model_validator(mode="after")
    def _as_the_engine_allows(self) -> Self:
        try:
            EngineLossScale(**self.model_dump())
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self


class Schedule(_Section):
    """Learning rate over the updates, as a factor of the peak. A step that fp16 skips is no update."""

    kind: ScheduleKind = Field("constant", description="Shape after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Updates of linear rise from 0 to the peak.")
    final_ratio: float = Field(
        0.1, ge=0, le=1, description="Factor reached at the job's last step (linear, cosine)."
    )


class Zero(_Section):
    """Settings of the ZeRO engine."""

    stage: Annotated[Literal[0, 1, 2, 3], _NoBool] = Field(
        2,
        description="0: nothing partitioned; 1: optimizer states; 2: and gradients; 3: and parameters.",
    )
    tile: PositiveInt = Field(
        256, multiple_of=64, description="Elements of the smallest piece that can change owner."
    )
    staging_bytes: PositiveInt = Field(
        8 << 20, ge=4096, description="Size of the constant communication buffer, in bytes."
    )
    low_precision_products: Literal["auto", "native", "widened"] = Field(
        "auto",
        description="How CPUs multiply matrices in bf16 and fp16. auto: where torch has no vector kernels "
        "for the dtype, operands are widened to fp32 and the result is rounded once; native: as torch does; "
        "widened: always widened, which is refused on GPUs.",
    )
    reproducible: bool = Field(
        False,
        description="Whether the same bits come out for every number of workers; costs log2 of the number of "
        "micro-batches in fp32 accumulators of the owned gradients. On GPUs it needs reduction: ordered.",
    )
    reduction: Literal["native", "ordered"] = Field(
        "native",
        description="On GPUs: native is NCCL's own reduce-scatter; ordered sums in fp32 in rank order, as on "
        "CPUs.",
    )
    keep_gathered_bytes: int = Field(
        0,
        ge=0,
        description="Stage 3: so many bytes for layers that stay whole from forward to backward instead of "
        "being gathered twice.",
    )
    divergence_check: Literal["always", "first", "off"] = Field(
        "always",
        description="Whether ranks compare what they are about to do before data move between hosts: always, "
        "in the first three steps, or never. Ranks on one host always do.",
    )
    activation_checkpointing: Literal["none", "unit"] = Field(
        "none",
        description="unit: of each layer only the inputs are kept for backward, which computes the layer's "
        "forward once more; none: all that backward needs is kept.",
    )

    @model_validator(mode="after")
    def _kept_at_stage_three(self) -> "Zero":
        if self.keep_gathered_bytes and self.stage != 3:
            raise ValueError(
                f"keep_gathered_bytes {self.keep_gathered_bytes} means something at stage 3 only; the stage "
                f"is {self.stage}: leave it out"
            )
        return self


class Workers(_Section):
    """How many ranks the job has, and within which bounds it may be resized."""

    wanted: PositiveInt = Field(1, description="World size asked for at the start.")
    min: PositiveInt = Field(1, description="Fewest ranks the job goes on with after a loss.")
    max: PositiveInt | None = Field(None, description="Most ranks; null: the number of micro-batches.")


class Resources(_Section):
    """What one worker takes from its node."""

    cpus: PositiveFloat = Field(1.0, description="CPUs reserved for a worker; fractions share a core.")
    gpus: Annotated[Literal[0, 1], _NoBool] = Field(
        0, description="GPUs of a worker. 1 uses NCCL, 0 uses gloo."
    )
    memory_bytes: PositiveInt | None = Field(
        None,
        description="Memory reserved for a worker, in bytes; null: none is reserved.",
    )
    threads: PositiveInt = Field(1, description="Torch threads of a worker.")


def _place(value: str, field: str) -> str:
    """A folder or an address as given, checked. Raises ValueError."""
    scheme, mark, rest = value.partition("://")
    path = rest if mark else value
    if not value.isprintable() or value != value.strip():
        raise ValueError(f"{field} {value!r} holds spaces at its ends or characters that cannot be printed")
    if mark and not (re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) and path.strip("/")):
        raise ValueError(f"{field} {value!r} is no address: scheme://bucket/folder")
    if mark and "@" in path.partition("/")[0]:
        raise ValueError(f"{field} must not hold credentials: the workers find them in their environment")
    if not mark and not path.startswith("/"):
        raise ValueError(f"{field} {value!r} must be an absolute path or an address (s3://bucket/folder)")
    if ".." in path.split("/"):
        raise ValueError(f"{field} {value!r} must not lead upwards (..)")
    return value


class Checkpoints(_Section):
    """When state is saved, where, and how much of it is kept."""

    every_steps: PositiveInt | None = Field(
        100, description="Save every so many steps; null: only on demand."
    )
    keep: PositiveInt = Field(3, description="Newest checkpoints kept.")
    keep_every: PositiveInt | None = Field(
        None,
        description="Checkpoints of steps that are multiples of this are kept beside the newest; null: none.",
    )
    asynchronous: bool = Field(
        True,
        description="Whether training goes on while a periodic checkpoint is written, from a copy of the "
        "rank's states in host memory. One at a time: a save that is due while another is written waits for "
        "it. The last one, a pause's and one on demand are waited for.",
    )
    location: str | None = Field(
        None,
        min_length=1,
        max_length=1000,
        description="Folder (absolute) or address (`s3://bucket/folder`) that all nodes and the service "
        "reach; the job's checkpoints go into a folder of its id there. Null: the job's own folder.",
    )

    @model_validator(mode="after")
    def _somewhere(self) -> "Checkpoints":
        if self.location is not None:
            _place(self.location, "location")
        return self


class StartFrom(_Section):
    """What a new job begins with instead of parameters from its seed: exactly one of the three.

    From a checkpoint of any world size and stage all goes on: parameters, optimizer, schedule, the count of
    steps that `steps` is the end of, and by samples the position in the data; where data, `seed` or
    `sequence_length` are others, the data begin anew, as an event `data_restarted` says. From safetensors
    come parameters only: step 0, a new optimizer, the start of the data.
    """

    job: str | None = Field(
        None, pattern=r"^[a-z0-9][a-z0-9-]{0,62}$", description="Id of another job of this service."
    )
    step: PositiveInt | None = Field(
        None, description="With `job`: which of its checkpoints; null: the newest that is whole."
    )
    checkpoint: str | None = Field(
        None,
        min_length=1,
        max_length=1000,
        description="A checkpoint, or a folder of them of which the newest that is whole is taken: absolute "
        "path or address (`s3://bucket/folder`), as seen by the workers.",
    )
    safetensors: str | None = Field(
        None,
        min_length=1,
        max_length=1000,
        description="A folder of safetensors files, as Hugging Face lays them out: as `checkpoint` is given.",
    )
    cast: bool = Field(
        False, description="Whether a checkpoint of another `precision` is taken, its frozen parts rounded."
    )

    @model_validator(mode="after")
    def _one_of_three(self) -> "StartFrom":
        given = [name for name in ("job", "checkpoint", "safetensors") if getattr(self, name) is not None]
        if len(given) != 1:
            named = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of job, checkpoint and safetensors; given: {named}")
        if self.step is not None and self.job is None:
            raise ValueError(f"step {self.step} means something with job only: name the checkpoint's folder")
        if self.cast and self.safetensors is not None:
            raise ValueError("cast means something with checkpoints only: leave it out")
        for name in ("checkpoint", "safetensors"):
            if (value := getattr(self, name)) is not None:
                _place(value, name)
        return self


class Recovery(_Section):
    """What the job may spend on lost workers before it is given up."""

    max_worker_losses: int = Field(
        10, ge=0, description="Lost workers, and broken groups, tolerated in an attempt; a resize uses none."
    )
    max_node_losses: int = Field(
        5, ge=0, description="Lost nodes tolerated in an attempt; their workers do not count as lost workers."
    )
    backoff_s: PositiveFloat = Field(
        1.0,
        description="Seconds before a replacement is sought after the second loss in a row; doubled with "
        "each further one. The first one's is sought at once.",
    )
    backoff_cap_s: PositiveFloat = Field(
        60.0,
        description="Longest such wait, in seconds; so long without a loss, and the next one counts as the "
        "first.",
    )
    collective_timeout_s: PositiveFloat = Field(
        600.0,
        description="Longest wait in one collective, in seconds; a lost worker is noticed by its death.",
    )


class Elastic(_Section):
    """How the job's state outlives its workers, and when its group changes by itself."""

    replicas: Annotated[Literal[0, 1], _NoBool] = Field(
        1,
        description="Copies of each rank's shard in the next rank's host memory. 0: a lost worker's part "
        "comes from the last checkpoint, and all go back to it.",
    )
    replica_every_steps: PositiveInt = Field(
        1, description="A copy is sent every so many steps; a loss repeats at most so many."
    )
    grow_back: bool = Field(
        True, description="Whether a job that goes on with fewer workers than wanted takes more when it can."
    )
    capacity_wait_s: PositiveFloat = Field(
        30.0,
        description="How long places for a larger group are waited for, in seconds, before the resize is "
        "refused; training goes on. With an autoscaler: longer than a node takes to start.",
    )
    stuck_after_s: PositiveFloat | None = Field(
        60.0,
        description="A rank that does not move for so many seconds while all others wait for it is treated "
        "as dead; longer than the longest single forward or backward. A warning comes at a third of it. "
        "Null: never.",
    )
    slow_share: float | None = Field(
        0.3,
        gt=0,
        lt=1,
        description="A rank to which the others lose at least this share of the step is named slow. "
        "Null: never.",
    )
    slow_steps: PositiveInt = Field(
        10, description="Steps in a row before a rank is named slow, and before it is no longer."
    )


class JobSpec(_Section):
    """One training job."""

    name: str = Field("job", pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,79}$", description="A name for people.")
    model: Annotated[GPTModel | CustomModel, Field(discriminator="kind")] = Field(
        default_factory=GPTModel, description="What is trained."
    )
    data: Annotated[TextData | TokenData | SyntheticData, Field(discriminator="kind")] = Field(
        description="What it is trained on."
    )
    steps: PositiveInt = Field(le=_MOST, description="Steps in all, those that fp16 skips included.")
    global_batch: PositiveInt = Field(
        le=_MOST, description="Samples per step, whatever the number of workers."
    )
    micro_batch: PositiveInt = Field(
        description="Samples that one rank computes at a time; divides `global_batch`."
    )
    sequence_length: PositiveInt = Field(128, description="Tokens per sample that are predicted.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seeds initial parameters, data order and dropout.")
    precision: Precision = Field(Precision.FP32, strict=False, description="fp32, bf16 or fp16.")
    loss_scale: LossScale = Field(default_factory=LossScale)
    optimizer: Optimizer = Field(
        default_factory=AdamWOptimizer,
        description="How parameters are stepped; `kind` may be left out for AdamW.",
    )
    schedule: Schedule = Field(default_factory=Schedule)
    zero: Zero = Field(default_factory=Zero)
    workers: Workers = Field(default_factory=Workers)
    resources: Resources = Field(default_factory=Resources)
    checkpoints: Checkpoints = Field(default_factory=Checkpoints)
    start_from: StartFrom | None = Field(
        None, description="A checkpoint or parameters to begin with; null: parameters from the seed."
    )
    recovery: Recovery = Field(default_factory=Recovery)
    elastic: Elastic = Field(default_factory=Elastic)
    sample_ledger: bool = Field(
        False, description="Whether each rank reports the id of every sample it read (large reports)."
    )

    @property
    def micro_batches(self) -> int:
        """M: the micro-batches of a step, numbered 0..M-1, and the largest useful world size."""
        return self.global_batch // self.micro_batch

    @property
    def max_workers(self) -> int:
        """The largest world size this job may be resized to."""
        return min(self.workers.max or self.micro_batches, self.micro_batches)

    @model_validator(mode="after")
    def _consistent(self) -> "JobSpec":
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch {self.global_batch} must be a multiple of micro_batch {self.micro_batch}"
            )
        w = self.workers
        if not w.min <= w.wanted <= self.max_workers:
            raise ValueError(
                f"workers must satisfy min {w.min} <= wanted {w.wanted} <= max {self.max_workers} "
                f"(workers.max {w.max}; the step has {self.micro_batches} micro-batches, "
                "and a rank needs at least one)"
            )
        if self.schedule.warmup_steps > self.steps:
            raise ValueError(f"schedule.warmup_steps {self.schedule.warmup_steps} exceeds steps {self.steps}")
        try:
            engine_config(self)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self
