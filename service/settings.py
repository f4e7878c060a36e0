"""What the operator may set, and the only place that reads the environment.

Each field is also an environment variable with the prefix `ELASTIC_ZERO_`. Knows nothing of the parts
that use the values; also builds the environment handed to the processes that the service starts.
"""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of one control plane."""

    model_config = SettingsConfigDict(env_prefix="ELASTIC_ZERO_", extra="forbid", frozen=True)

    data_dir: Path = Field(
        default=Path("~/.elastic-zero"),
        validate_default=True,
        description="Folder of the database, the token, the jobs' files and the local cluster's records.",
    )
    storage: Path | None = Field(
        default=None,
        description="Root of the jobs' folders, reachable from every node; null: `data_dir`.",
    )
    host: str = Field(default="127.0.0.1", description="Address the API binds.")
    port: int = Field(default=8400, ge=0, le=65535, description="Port the API binds; 0: any free one.")
    allowed_hosts: tuple[str, ...] = Field(
        default=("127.0.0.1", "localhost", "[::1]"),
        description="Values of the Host header that are answered, as a JSON list.",
    )
    database_url: str | None = Field(
        default=None, description="SQLAlchemy URL; null: an SQLite file in `data_dir`."
    )
    ray_address: str | None = Field(
        default=None, description="`host:port` of a running Ray cluster; null: a local one of our own."
    )
    local_cpus: PositiveInt | None = Field(
        default=None, description="CPUs of the local cluster; null: those of this machine."
    )
    cluster_grows: bool = Field(
        default=False,
        description="Whether an autoscaler adds nodes to the cluster: jobs and resizes larger than it is now "
        "are then handed to Ray, for the autoscaler to see, instead of refused. A local cluster never grows.",
    )
    poll_interval_s: PositiveFloat = Field(
        default=0.3, le=60, description="Seconds between looks at the controllers and at the queue."
    )
    reconcile_interval_s: PositiveFloat = Field(
        default=5.0, le=600, description="Seconds between comparisons of the database with the cluster."
    )
    max_controller_losses: int = Field(
        default=5, ge=0, description="Times a job whose controller vanished is started again."
    )

    @field_validator("data_dir", "storage", mode="after")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().resolve()

    @property
    def storage_dir(self) -> Path:
        """Root of the jobs' folders."""
        return self.storage or self.data_dir

    @property
    def store_url(self) -> str:
        """SQLAlchemy URL of the database."""
        return self.database_url or f"sqlite:///{self.data_dir / 'elastic-zero.db'}"

    @property
    def token_file(self) -> Path:
        """The file with the API's token, readable by its owner only."""
        return self.data_dir / "token"


def child_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that the service starts: our own, with `changes`.

    The folder of our packages comes first on PYTHONPATH, so that the cluster runs the code that the
    service runs, from wherever it was started.
    """
    environment = dict(os.environ)
    spec = find_spec("service")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the package `service` cannot be found; install elastic-zero in this environment")
    home = str(Path(spec.submodule_search_locations[0]).parent)
    paths = [home, *(p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and p != home)]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)} | dict(changes or {})
