"""The examples in the docstrings run, on a real scheduler and real Dask workers."""

import functools
from typing import Any

import anyio
import distributed
import numpy as np
import pytest

import asynchooks
from asynchooks import distributed as public
from asynchooks import protocols

from ..test_docstrings import example_of, run_async
from . import programs
from .clusters import native
from .processes import Scheduler

pytestmark = pytest.mark.faults


async def run_example(body: str, **names: Any) -> None:
    """With all public names, perhaps in a task of Dask."""
    modules = (asynchooks, public, protocols)
    namespace: dict[str, Any] = {
        **{name: getattr(module, name) for module in modules for name in module.__all__},
        "anyio": anyio,
        "np": np,
        **names,
    }
    await run_async(body, namespace)


def test_all_that_is_public_has_an_example() -> None:
    assert all(example_of(getattr(public, name)) for name in public.__all__)


@pytest.mark.parametrize("name", ["StepSource", "Demand", "SourceState"])
async def test_the_example_of_what_needs_no_scheduler_runs(name: str) -> None:
    await run_example(example_of(getattr(public, name)))


async def test_the_example_of_a_dask_cluster_runs(scheduler: Scheduler) -> None:
    example = example_of(public.DaskCluster)
    for written, used in (
        ("tcp://127.0.0.1:8786", scheduler.address),
        ("last_step=1000", "last_step=20"),
    ):
        assert written in example
        example = example.replace(written, used)
    await run_example(example, step=lambda: {"loss": 0.0})


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_example_of_a_remote_server_runs_in_a_task_of_dask(client: Any) -> None:
    async with native(client.scheduler.address) as own:
        async with public.host_parameter_server(
            own, np.zeros(3), protocols.Asynchronous(), num_workers=1
        ) as server:
            example = example_of(public.RemoteParameterServer)
            await own.submit(run_example, example, address=server.address, worker=0, pure=False)
            assert await server.global_step.wait_for(1) == server.version == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_example_of_a_hosted_server_runs(client: Any) -> None:
    await run_example(
        example_of(public.host_parameter_server),
        address=client.scheduler.address,
        Client=functools.partial(distributed.Client, set_as_default=False),
        train=functools.partial(programs.train, last_step=10, secs=0.0),
    )
