"""Errors of a cluster that cannot be opened, or that gets wrong arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute
from distributed import Client

from asynchooks import MonitoredSession
from asynchooks.distributed import DaskCluster

from .processes import ROOT, Scheduler, a_scheduler, own_host

pytestmark = [pytest.mark.anyio, pytest.mark.faults]

ONE_BACKEND = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""For tests that start a scheduler of their own, which takes a second or more."""


def test_something_else_than_a_client_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"client is 8786; give a distributed\.Client"):
        DaskCluster(8786)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"name": ""}, "name is ''"),
        (ValueError, {"heartbeat_secs": 0}, "heartbeat_secs is 0; give finite seconds > 0"),
        (ValueError, {"heartbeat_secs": 9, "lease_secs": 3}, "no shorter than a heartbeat .9 s"),
        (ValueError, {"timeout_secs": float("inf")}, "timeout_secs is inf"),
        (TypeError, {"lease_secs": "30"}, "lease_secs is '30'"),
    ],
)
def test_values_out_of_range_are_named(
    error: type[Exception], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=message):
        DaskCluster("tcp://127.0.0.1:1", **options)


async def test_an_address_without_an_answer_is_named_in_time() -> None:
    address = f"tcp://{own_host()}:8786"
    with pytest.raises(ConnectionError, match=f"{address} within 0.5 s"):
        await DaskCluster(address, timeout_secs=0.5).open()


@pytest.mark.parametrize(
    "words", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, b"\0" * 64, b"\xff" * 64]
)
async def test_something_else_that_answers_is_no_scheduler(words: bytes) -> None:
    async def answer(stream: Any) -> None:
        async with stream:
            await stream.send(words)
            await anyio.sleep_forever()

    listeners = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listeners.extra(SocketAttribute.local_port)
    async with listeners, anyio.create_task_group() as group:
        group.start_soon(listeners.serve, answer)
        with pytest.raises(ConnectionError, match=f"no Dask scheduler answers at .*:{port} "):
            await DaskCluster(f"tcp://127.0.0.1:{port}", timeout_secs=0.5).open()
        group.cancel_scope.cancel()


async def test_a_malformed_address_is_named() -> None:
    with pytest.raises(ConnectionError, match="nowhere://at all"):
        await DaskCluster("nowhere://at all", timeout_secs=0.5).open()


async def test_a_closed_client_is_refused(scheduler: Scheduler) -> None:
    client = Client(scheduler.address, set_as_default=False)
    client.close()
    with pytest.raises(ConnectionError, match="closed"):
        await DaskCluster(client).open()


async def test_a_cluster_that_is_not_open_says_how_to_open_it() -> None:
    cluster = DaskCluster("tcp://127.0.0.1:1")
    with pytest.raises(RuntimeError, match="async with DaskCluster"):
        await cluster.advance()
    with pytest.raises(RuntimeError, match="async with DaskCluster"):
        async with MonitoredSession([], cluster.session_creator(dict)):
            pass


async def test_a_cluster_opens_once(scheduler: Scheduler, training: str) -> None:
    async with DaskCluster(scheduler.address, training) as cluster:
        with pytest.raises(RuntimeError, match="opened before"):
            await cluster.open()


@pytest.mark.parametrize(("error", "step"), [(ValueError, -1), (TypeError, 1.5)])
async def test_steps_are_integers_from_zero_on(
    scheduler: Scheduler, training: str, error: type[Exception], step: Any
) -> None:
    async with DaskCluster(scheduler.address, training) as cluster:
        with pytest.raises(error, match=f"step is {step}; give an integer >= 0"):
            await cluster.publish(step)


@ONE_BACKEND
async def test_another_version_at_the_scheduler_is_named(tmp_path: Path) -> None:
    installed = tmp_path / "asynchooks-99.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: asynchooks\nVersion: 99.0\n")
    with a_scheduler(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)])) as scheduler:
        with pytest.raises(
            RuntimeError, match=rf"{scheduler.address} runs asynchooks 99\.0, this process "
        ):
            await DaskCluster(scheduler.address).open()


@ONE_BACKEND
async def test_a_scheduler_where_asynchooks_is_missing_says_what_to_do() -> None:
    with a_scheduler(before="import sys; sys.modules['asynchooks'] = None") as scheduler:
        with pytest.raises(
            RuntimeError, match=r"No module named 'asynchooks.*Install asynchooks where the sche"
        ):
            await DaskCluster(scheduler.address).open()


@ONE_BACKEND
async def test_a_scheduler_that_takes_no_plugin_says_what_to_do() -> None:
    forbidden = {"DASK_DISTRIBUTED__SCHEDULER__BLOCKED_HANDLERS": "['register_scheduler_plugin']"}
    with a_scheduler(**forbidden) as scheduler:
        with pytest.raises(RuntimeError, match="dask scheduler --preload"):
            await DaskCluster(scheduler.address).open()


@ONE_BACKEND
async def test_a_scheduler_that_has_preloaded_the_plugin_needs_no_registration() -> None:
    forbidden = {"DASK_DISTRIBUTED__SCHEDULER__BLOCKED_HANDLERS": "['register_scheduler_plugin']"}
    preload = {"DASK_DISTRIBUTED__SCHEDULER__PRELOAD": "['asynchooks.distributed._dask_plugin']"}
    with a_scheduler(**forbidden, **preload) as scheduler:
        async with DaskCluster(scheduler.address) as cluster:
            assert await cluster.advance() == 1


def test_without_dask_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "distributed.py").write_text(
        "raise ModuleNotFoundError('gone', name='distributed')\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from asynchooks.distributed import DaskCluster"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'asynchooks[dask]'" in done.stderr
