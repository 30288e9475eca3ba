"""What all tests share: every async test runs on asyncio and on trio."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings

# how long an example takes depends on what else the machine does
settings.register_profile("asynchooks", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("asynchooks")

# shells start what runs in the background with SIGINT ignored, and processes of tests inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Dask's tests come last: threads and sockets of its own go on for a while after them."""
    items.sort(key=lambda item: "/tests/distributed/" in item.path.as_posix())


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-secs", type=float, default=3600.0, help="how long the soaks of clusters go on"
    )


@pytest.fixture
def soak_secs(request: pytest.FixtureRequest) -> float:
    secs: float = request.config.getoption("--soak-secs")
    return secs
