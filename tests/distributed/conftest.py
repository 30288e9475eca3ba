"""One scheduler and three processes for all tests here that leave them whole."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest

pytest.importorskip("distributed")

from distributed import Client, LocalCluster

from asynchooks.distributed import DaskCluster

from .processes import Scheduler, a_pool, a_scheduler
from .sessions import Join


@pytest.fixture(scope="package")
def scheduler() -> Iterator[Scheduler]:
    with a_scheduler() as running:
        yield running


@pytest.fixture(scope="package")
def pool() -> Iterator[ProcessPoolExecutor]:
    with a_pool(3) as running:
        yield running


@pytest.fixture(scope="package")
def client() -> Iterator[Any]:
    """A synchronous client of three Dask workers on loopback, each a process of its own."""
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=4, processes=True, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def training(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return str(request.node.nodeid)


@pytest.fixture
def join(scheduler: Scheduler, training: str) -> Join:
    """Makes clusters of this test's training, each of them a process to the scheduler."""
    return partial(DaskCluster, scheduler.address, training)
