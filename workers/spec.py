"""The job specification: everything a user says about a job, validated, and nothing else.

Plain pydantic: importing it loads neither Ray nor torch, so the API, the command line and the cluster
share one definition. Unknown fields are refused everywhere.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Precision(StrEnum):
    """Arithmetic of forward and backward. bf16 keeps fp32 master parameters, momentum and variance."""

    FP32 = "fp32"
    BF16 = "bf16"


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


class Optimizer(_Section):
    """AdamW on fp32 master parameters. Weight decay applies to parameters of two or more dimensions."""

    kind: Literal["adamw"] = "adamw"
    lr: PositiveFloat = Field(1e-3, description="Peak learning rate.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="Decay of the running means of the gradient and of its square."
    )
    eps: PositiveFloat = Field(1e-8, description="Added to the denominator.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay.")
    clip_norm: PositiveFloat | None = Field(
        1.0, description="Largest global gradient norm; null: no clipping."
    )


class Schedule(_Section):
    """Learning rate over the steps, as a factor of the peak."""

    kind: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear rise from 0 to the peak.")
    final_ratio: float = Field(
        0.1, ge=0, le=1, description="Factor reached at the last step (linear, cosine)."
    )


class Zero(_Section):
    """Settings of the ZeRO engine."""

    stage: Literal[0, 1, 2, 3] = Field(
        2,
        description="0: nothing partitioned; 1: optimizer states; 2: and gradients; 3: and parameters.",
    )
    tile: PositiveInt = Field(
        256, multiple_of=64, description="Elements of the smallest piece that can change owner."
    )
    staging_bytes: PositiveInt = Field(
        8 << 20, description="Size of the constant communication buffer, in bytes."
    )
    reproducible: bool = Field(
        False,
        description="Whether the same bits come out for every number of workers; costs log2 of the number of "
        "micro-batches in fp32 accumulators of the owned gradients. CPU only so far.",
    )
    activation_checkpointing: Literal["none", "unit"] = Field(
        "none",
        description="unit: of each layer only the inputs are kept for backward, which computes the layer's "
        "forward once more; none: all that backward needs is kept.",
    )


class Workers(_Section):
    """How many ranks the job has, and within which bounds it may be resized."""

    wanted: PositiveInt = Field(1, description="World size asked for at the start.")
    min: PositiveInt = Field(1, description="Fewest ranks the job goes on with after a loss.")
    max: PositiveInt | None = Field(None, description="Most ranks; null: the number of micro-batches.")


class Resources(_Section):
    """What one worker takes from its node."""

    cpus: PositiveFloat = Field(1.0, description="CPUs reserved for a worker; fractions share a core.")
    gpus: Literal[0, 1] = Field(0, description="GPUs of a worker. 1 uses NCCL, 0 uses gloo.")
    memory_bytes: PositiveInt | None = Field(
        None,
        description="Memory reserved for a worker, in bytes; null: none is reserved.",
    )
    threads: PositiveInt = Field(1, description="Torch threads of a worker.")


class Checkpoints(_Section):
    """When state is saved, and how much of it is kept."""

    every_steps: PositiveInt | None = Field(
        100, description="Save every so many steps; null: only on demand."
    )
    keep: PositiveInt = Field(3, description="Newest checkpoints kept.")


class Recovery(_Section):
    """What the job may spend on lost workers before it is given up."""

    max_worker_losses: int = Field(10, ge=0, description="Lost workers tolerated; a wanted resize uses none.")
    collective_timeout_s: PositiveFloat = Field(
        600.0,
        description="Longest wait in one collective, in seconds; a lost worker is noticed by its death.",
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
    steps: PositiveInt = Field(description="Optimizer steps in all.")
    global_batch: PositiveInt = Field(description="Samples per step, whatever the number of workers.")
    micro_batch: PositiveInt = Field(
        description="Samples that one rank computes at a time; divides `global_batch`."
    )
    sequence_length: PositiveInt = Field(128, description="Tokens per sample that are predicted.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seeds initial parameters, data order and dropout.")
    precision: Precision = Field(Precision.FP32, description="fp32 or bf16.")
    optimizer: Optimizer = Field(default_factory=Optimizer)
    schedule: Schedule = Field(default_factory=Schedule)
    zero: Zero = Field(default_factory=Zero)
    workers: Workers = Field(default_factory=Workers)
    resources: Resources = Field(default_factory=Resources)
    checkpoints: Checkpoints = Field(default_factory=Checkpoints)
    recovery: Recovery = Field(default_factory=Recovery)
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
        return self
