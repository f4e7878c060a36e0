"""What the files of the command line share: exit codes, the options before the command, common arguments."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from api.client import Client
from api.connection import connect
from service.settings import Settings

FAILED = 1
WRONG_USAGE = 2
UNREACHABLE = 3
FOUND = 4
"""Damage, or differences: what was looked for was found."""

out = Console()
err = Console(stderr=True)


class UserMistake(Exception):  # noqa: N818 - named for the outcome
    """A file or value given on the command line cannot be used."""


class DamageFound(Exception):  # noqa: N818 - named for the outcome
    """What is meant cannot be used, as it is damaged."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was given before the command."""

    settings: Settings
    url: str | None
    token_file: Path | None

    def client(self) -> Client:
        return connect(self.settings, url=self.url, token_file=self.token_file)


def options_of(context: typer.Context) -> Options:
    given: Options = context.obj
    return given


JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job, or the beginning of it.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]
