"""What a job's owner may tell its controller while it runs. Plain pydantic, no Ray, no torch."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, TypeAdapter


class _Command(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    who: str = Field(description="Who asks; kept in the job's events.")


class Resize(_Command):
    """Go on with another number of workers. The newest wanted number counts."""

    kind: Literal["resize"] = "resize"
    workers: PositiveInt


class Pause(_Command):
    """Save at the next step boundary and give all resources back."""

    kind: Literal["pause"] = "pause"


class Cancel(_Command):
    """End now; what came after the last checkpoint is lost."""

    kind: Literal["cancel"] = "cancel"


class SaveCheckpoint(_Command):
    """Save at the next step boundary and go on."""

    kind: Literal["checkpoint"] = "checkpoint"


Command = Annotated[Resize | Pause | Cancel | SaveCheckpoint, Field(discriminator="kind")]
parse_command: TypeAdapter[Resize | Pause | Cancel | SaveCheckpoint] = TypeAdapter(Command)
