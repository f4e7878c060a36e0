"""The token's file: made on the service's first start, for its owner only, read by the command line."""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

_TOKEN_BYTES = 32


class TokenFileError(RuntimeError):
    """The token file cannot be used as it is; the message says what to change."""


def read_token(path: Path) -> str:
    """The token kept in `path`.

    Raises TokenFileError if the file is missing, empty, or readable by anyone but its owner.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise TokenFileError(
            f"no token at {path}: start the service first, or name the data folder"
        ) from None
    except OSError as error:
        raise TokenFileError(f"cannot read the token at {path}: {error.strerror}") from error
    with os.fdopen(handle) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise TokenFileError(
                f"the token at {path} is open to other users (mode {mode:04o}): run chmod 600 on it"
            )
        token = file.read().strip()
    if not token:
        raise TokenFileError(f"the token at {path} is empty: remove the file and start the service again")
    return token


def ensure_token(path: Path) -> str:
    """The token kept in `path`; made on the first call, in a file only its owner can read.

    The file appears whole or not at all, and of two processes that start together both get the same token.
    """
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_urlsafe(_TOKEN_BYTES) + "\n")
            # Where another process was first, its token counts.
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink()
    return read_token(path)
