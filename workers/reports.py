"""What travels from the cluster to the control plane: the entries of a job's numbered log.

Entries are numbered by the controller from 1, without gaps, over the whole life of the job; a reader
asks for what comes after the last number it has stored. Plain pydantic, no Ray, no torch.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Phase(StrEnum):
    """Where a job stands on the cluster: the `phase` of a phase event."""

    STARTING = "starting"
    RUNNING = "running"
    RESIZING = "resizing"
    RECOVERING = "recovering"
    PAUSING = "pausing"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether the attempt is over: nothing of it is left on the cluster but the controller itself."""
        return self in _FINAL


_FINAL = frozenset({Phase.PAUSED, Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})


class MemoryUse(_Wire):
    """Bytes of one rank by category: what is measured, or what was predicted."""

    parameters: int
    gradients: int
    optimizer_states: int
    communication_buffers: int
    activations: int = Field(description="Peak of what is saved for backward.")
    padding: int = Field(0, description="Tails of buffers that round a unit up to whole chunks.")
    unattributed: int = Field(
        0, description="Resident beyond the baseline and all categories; 0 in a prediction."
    )
    replicas: int = Field(
        0,
        description="Copies of this rank's states for others, and those it keeps for ranks of other hosts.",
    )
    save_copy: int = Field(
        0,
        description="Copy of this rank's states from which checkpoints are written behind the training, kept "
        "from the first one on.",
    )
    checkpoints: int = Field(
        0, description="Of `activations`: inputs of layers that are computed again; 0 in a prediction."
    )
    recomputed: int = Field(
        0, description="Of `activations`: the most that one layer, computed again, saved; 0 in a prediction."
    )
    fragmentation: int = Field(
        0,
        description="Kept by the allocator between steps and used for nothing. Of another moment than the "
        "rest, so not to be added to it. 0 in a prediction.",
    )


class RankReport(_Wire):
    """One rank's account of one finished step."""

    type: Literal["report"] = "report"
    seq: int
    time: float = Field(description="Unix seconds.")
    generation: int
    rank: int
    world_size: int
    worker: str = Field(description="Name of the worker process, stable over resizes.")
    step: int = Field(description="Finished steps, so the first report says 1.")
    loss: float | None = Field(
        description="Mean over the global batch; the same on every rank. Null where not finite (skipped)."
    )
    lr: float = Field(description="Learning rate of the parameters that no group matches.")
    group_lrs: dict[str, float] = Field(
        default_factory=dict, description="Learning rate of each parameter group, by name."
    )
    grad_norm: float | None = Field(
        description="Before clipping, without the loss scale. Null where not finite (skipped)."
    )
    skipped: bool = Field(
        False, description="Whether fp16 gradients overflowed, so that nothing was updated."
    )
    skipped_steps: int = Field(0, description="Steps skipped so far, this one included.")
    loss_scale: float = Field(1.0, description="What losses were multiplied by; 1 but in fp16.")
    tokens: int = Field(description="Tokens this rank computed in the step.")
    step_s: float = Field(description="Wall time of the step in seconds.")
    seconds: dict[str, float] = Field(description="Seconds by phase.")
    bytes_sent: dict[str, int] = Field(description="Bytes this rank sent, by kind.")
    bytes_by_transport: dict[str, int] = Field(
        default_factory=dict,
        description="The same bytes by the way they went: `shared` (memory of this host), `network`.",
    )
    memory: MemoryUse
    predicted: MemoryUse
    resident_bytes: int = Field(description="Proportional set size of the process (device memory on a GPU).")
    samples: list[int] | None = Field(None, description="Ids of the samples read, where the ledger is on.")
    rebuilt: bool = Field(
        False,
        description="Written by the controller for a rank that was lost before it told the step, which is "
        "not repeated: what all ranks share, and its samples; times, bytes and memory are 0.",
    )


class Event(_Wire):
    """Something that happened to the job.

    A phase, a change of its workers (wanted, refused, forced), a worker that was lost, holds the others up or
    is slow, a node that is drained, a checkpoint (saved, failed, dropped and owed, found damaged), data that
    begin anew, a command, an error.
    """

    type: Literal["event"] = "event"
    seq: int
    time: float = Field(description="Unix seconds.")
    generation: int
    kind: Literal[
        "phase",
        "resize",
        "resize_refused",
        "recovery",
        "worker_lost",
        "worker_stuck",
        "worker_slow",
        "drain",
        "checkpoint",
        "checkpoint_failed",
        "checkpoint_dropped",
        "checkpoint_damaged",
        "data_restarted",
        "command",
        "error",
    ]
    data: dict[str, Any] = Field(default_factory=dict)


LogEntry = Annotated[RankReport | Event, Field(discriminator="type")]
log_entry: TypeAdapter[RankReport | Event] = TypeAdapter(LogEntry)
