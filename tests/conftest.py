"""For all tests: nothing may depend on how fast the machine is, and what chaos is to be had."""

import pytest
from hypothesis import settings

settings.register_profile("any-speed", deadline=None)
settings.load_profile("any-speed")

CHAOS_SECONDS = 60.0
CHAOS_SEED = 18


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption(
        "--chaos-seconds",
        type=float,
        default=CHAOS_SECONDS,
        help="how long the chaos test goes on, at least until all has happened once (default: %(default)s)",
    )
    group.addoption(
        "--chaos-seed",
        type=int,
        default=CHAOS_SEED,
        help="what the chaos test decides from: one seed, one list of decisions (default: %(default)s)",
    )


def pytest_report_header(config: pytest.Config) -> str:
    seed, seconds = config.getoption("--chaos-seed"), config.getoption("--chaos-seconds")
    return f"chaos: --chaos-seed={seed} --chaos-seconds={seconds:g}"
