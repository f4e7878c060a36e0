from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.api.running import Running, running


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    """A service of the test's own."""
    with running(tmp_path) as service:
        yield service


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service for tests that change nothing in it."""
    with running(tmp_path_factory.mktemp("shared")) as service:
        yield service
