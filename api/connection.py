"""Finding the service: its address and token from the data folder, or as they are given."""

import os
import pwd
from pathlib import Path

from api import server_file
from api.client import Client, ClientError
from api.token_file import read_token
from service.settings import Settings


class NoService(ClientError):  # noqa: N818 - named for the outcome
    """There is no address to ask."""


def connect(settings: Settings, *, url: str | None = None, token_file: Path | None = None) -> Client:
    """A client of the service of this data folder, or of the one at `url`.

    Raises NoService where none runs here, and TokenFileError.
    """
    if url is None:
        record = server_file.read(settings.data_dir)
        if record is None or not record.alive:
            raise NoService(
                f"no service runs on the data folder {settings.data_dir}: start one with "
                "'elastic-zero serve', or name the folder with --data-dir or the address with --url"
            )
        url = record.url
    token = read_token(token_file or settings.token_file)
    return Client(url, token, who=f"cli:{_user()}"[:64])


def _user() -> str:
    """The name of the user that runs this process, or its number where it has none, as in containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
