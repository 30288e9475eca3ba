"""Launchers of processes, shared by all tests, because it takes seconds to load TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import servers
from .cluster_processes import TaskLauncher, launched
from .training_processes import training_launched

launcher = pytest.fixture(scope="session")(servers.launched)
server = pytest.fixture(servers.running_server)
cluster_launcher = pytest.fixture(scope="session")(launched)
training_launcher = pytest.fixture(scope="session")(training_launched)


@pytest.fixture
def tasks_launcher(cluster_launcher: TaskLauncher) -> Iterator[TaskLauncher]:
    """Starts the processes of one test; at its end none of them is left."""
    try:
        yield cluster_launcher
    finally:
        cluster_launcher.end_all()
