"""A launcher of processes, shared by all tests, because it takes seconds to load TensorFlow."""

from collections.abc import Iterator

import pytest

from . import servers
from .processes import TaskLauncher, launched

shared_launcher = pytest.fixture(scope="session")(launched)
server = pytest.fixture(servers.running_server)


@pytest.fixture
def launcher(shared_launcher: TaskLauncher) -> Iterator[TaskLauncher]:
    """Starts the processes of one test; at its end none of them is left."""
    try:
        yield shared_launcher
    finally:
        shared_launcher.end_all()
