"""The clean end of a cluster: each process reports its end to each ps, which waits for that."""

from __future__ import annotations

import logging
import math
import re
import signal
import threading
import time
from collections.abc import Callable

import anyio
import pytest

from asynchooks import ClusterTask, StopTraining

from .cluster_processes import TaskLauncher, free_cluster, task_of
from .servers import listening

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow, pytest.mark.faults]


@pytest.fixture
def tasks() -> dict[str, ClusterTask]:
    """The tasks of a cluster with one ps, which this process serves."""
    cluster = free_cluster(ps=1, chief=1, worker=1, evaluator=1)
    return {name: task_of(cluster, name) for name in ("ps:0", "chief:0", "worker:0", "evaluator:0")}


Threads = Callable[[], list[str]]


@pytest.fixture
def threads() -> Threads:
    """Names the threads of the end that have begun since; those of memberships are other tests'."""
    before = set(threading.enumerate())

    def begun() -> list[str]:
        names = [each.name for each in threading.enumerate() if each not in before]
        return [name for name in names if re.match("asynchooks-(?!membership)", name)]

    return begun


async def test_a_ps_serves_until_all_that_train_have_ended(
    tasks: dict[str, ClusterTask], threads: Threads
) -> None:
    log = []

    async def serve() -> None:
        await tasks["ps:0"].serve(linger_secs=math.inf)
        log.append("served")

    async with anyio.create_task_group() as group:
        group.start_soon(serve)
        for name in ("evaluator:0", "ps:0", "chief:0", "chief:0"):
            await tasks[name].end()
            await anyio.sleep(0.02)
            log.append(name)
        await tasks["worker:0"].end()
    assert log == ["evaluator:0", "ps:0", "chief:0", "chief:0", "served"]
    assert threads() == []


async def test_an_end_before_the_ps_serves_is_not_lost(tasks: dict[str, ClusterTask]) -> None:
    tasks["ps:0"].start()
    await tasks["worker:0"].end()
    await tasks["chief:0"].end()
    with anyio.fail_after(5):
        await tasks["ps:0"].serve(linger_secs=math.inf)
        await tasks["ps:0"].serve()  # it stays over


async def test_once_the_chief_has_ended_the_others_have_the_linger_time(
    tasks: dict[str, ClusterTask], caplog: pytest.LogCaptureFixture
) -> None:
    tasks["ps:0"].start()
    await tasks["chief:0"].end()
    begun = time.monotonic()
    await tasks["ps:0"].serve(linger_secs=0.3)
    assert 0.3 <= time.monotonic() - begun < 3
    line = "The chief ended 0.3 s ago, and the end of worker:0 was not reported; ps:0 ends"
    assert line in caplog.messages


async def test_without_the_chiefs_end_a_ps_goes_on(tasks: dict[str, ClusterTask]) -> None:
    tasks["ps:0"].start()
    await tasks["worker:0"].end()
    with anyio.move_on_after(0.3) as scope:
        await tasks["ps:0"].serve(linger_secs=0)
    assert scope.cancelled_caught


async def test_a_cancelled_serve_ends_at_once_and_remembers(
    tasks: dict[str, ClusterTask], threads: Threads, caplog: pytest.LogCaptureFixture
) -> None:
    tasks["ps:0"].start()
    await tasks["worker:0"].end()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(tasks["ps:0"].serve)
            while threads() != ["asynchooks-serve"]:  # noqa: ASYNC110 - it sets no event
                await anyio.sleep(0.005)
            begun = time.monotonic()
            scope.cancel()
    assert scope.cancelled_caught
    assert time.monotonic() - begun < 0.9
    assert threads() == [], "a thread in TensorFlow may abort the process's end"
    assert not [each for each in caplog.messages if "is left alone" in each]
    await tasks["chief:0"].end()
    with anyio.fail_after(5):
        await tasks["ps:0"].serve(linger_secs=math.inf)


async def test_serving_is_for_a_ps_and_once_at_a_time(tasks: dict[str, ClusterTask]) -> None:
    with pytest.raises(RuntimeError, match="worker:0 is no ps; train there, within `async with ta"):
        await tasks["worker:0"].serve()
    with pytest.raises(ValueError, match="linger_secs is -1; give seconds >= 0"):
        await tasks["ps:0"].serve(linger_secs=-1)
    async with anyio.create_task_group() as group:
        group.start_soon(tasks["ps:0"].serve)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="ps:0 is being served already"):
            await tasks["ps:0"].serve()
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("error", "is_clean"), [(None, True), (StopTraining("enough"), True), (KeyError("x"), False)]
)
async def test_a_block_that_ends_cleanly_reports_its_end_to_the_ps(
    error: Exception | None, is_clean: bool, tasks: dict[str, ClusterTask]
) -> None:
    async with tasks["ps:0"]:
        await tasks["worker:0"].end()
    try:
        async with tasks["chief:0"] as task:
            assert task is tasks["chief:0"]
            if error is not None:
                raise error
    except (StopTraining, KeyError) as raised:
        assert raised is error
    with anyio.move_on_after(10 if is_clean else 0.2) as scope:
        await tasks["ps:0"].serve(linger_secs=math.inf)
    assert scope.cancelled_caught is not is_clean


async def test_the_end_does_not_wait_for_a_ps_that_is_gone(
    tasks: dict[str, ClusterTask], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asynchooks")
    begun = time.monotonic()
    await tasks["worker:0"].end()
    assert time.monotonic() - begun < 4
    assert any("worker:0 could not report its end to ps:0: no" in each for each in caplog.messages)


async def test_a_silent_ps_keeps_neither_the_end_nor_the_other_ps(
    tasks_launcher: TaskLauncher, anyio_backend_name: str
) -> None:
    cluster = free_cluster(ps=2, worker=1)
    silent, other = (
        tasks_launcher.start("serving", cluster, f"ps:{index}", backend=anyio_backend_name)
        for index in range(2)
    )
    silent.signal(signal.SIGSTOP)
    begun = time.monotonic()
    task = task_of(cluster, "worker:0")
    await task.end()
    assert time.monotonic() - begun < 4
    assert (other.line(), other.code()) == ("served", 0)
    silent.signal(signal.SIGCONT)
    await task.end()  # once more: to those that do not know it
    assert (silent.line(), silent.code()) == ("served", 0)
    with listening() as lines:
        await task.end()
    assert lines == [], "all have it, and no request is sent"


async def test_a_ps_that_is_killed_during_the_report_does_not_delay_the_end(
    tasks_launcher: TaskLauncher, anyio_backend_name: str
) -> None:
    cluster = free_cluster(ps=1, worker=1)
    ps = tasks_launcher.start("serving", cluster, "ps:0", backend=anyio_backend_name)
    ps.signal(signal.SIGSTOP)
    begun = time.monotonic()
    async with anyio.create_task_group() as group:
        group.start_soon(task_of(cluster, "worker:0").end)
        await anyio.sleep(0.2)
        ps.kill()
    assert time.monotonic() - begun < 4


async def test_a_cancelled_end_ends_at_once(
    tasks_launcher: TaskLauncher, anyio_backend_name: str
) -> None:
    cluster = free_cluster(ps=1, worker=1)
    ps = tasks_launcher.start("serving", cluster, "ps:0", backend=anyio_backend_name)
    ps.signal(signal.SIGSTOP)
    begun = time.monotonic()
    with anyio.move_on_after(0.1) as scope:
        await task_of(cluster, "worker:0").end()
    assert scope.cancelled_caught
    assert time.monotonic() - begun < 0.9
