"""The service that chaos comes over, on hosts where they can be had, and else on one machine."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos import grounds
from tests.chaos.decisions import ON_ONE_HOST, Kind
from tests.distributed import namespaces
from tests.multihost.cluster import Cluster
from tests.multihost.served import Service

_REST_S = 900.0
"""What the chaos test may take beside the chaos itself."""


@dataclass(frozen=True, slots=True)
class Ground:
    """A running service and what may happen to it; `hosts` are there where links can be cut."""

    service: Service
    kinds: tuple[Kind, ...]
    hosts: Cluster | None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "ground" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(config.getoption("--chaos-seconds") + _REST_S))


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    with ExitStack() as held:
        hosts = held.enter_context(grounds.hosts()) if namespaces.refusal() is None else None
        place = hosts or held.enter_context(grounds.one_machine(tmp_path))
        service = Service(place, tmp_path)
        held.callback(service.kill)
        service.start()
        yield Ground(service, ON_ONE_HOST if hosts is None else tuple(Kind), hosts)
