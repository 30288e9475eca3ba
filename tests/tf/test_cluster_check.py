"""Whether all processes of a cluster answer, and were given the same cluster."""

from __future__ import annotations

import json
import logging
import signal
import time

import anyio
import pytest

from asynchooks import ClusterError

from .cluster_processes import TaskLauncher, free_cluster, task_of
from .servers import listening

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


async def test_a_worker_waits_for_a_ps_that_comes_later(
    tasks_launcher: TaskLauncher, anyio_backend_name: str
) -> None:
    cluster = free_cluster(ps=2, worker=1)
    waits, checked = anyio.Event(), anyio.Event()

    async def check() -> None:
        await task_of(cluster, "worker:0").check_cluster()
        checked.set()

    tasks_launcher.start("serving", cluster, "ps:0", backend=anyio_backend_name)
    with listening("worker:0 waits for ps:1, for", waits.set):
        async with anyio.create_task_group() as group:
            group.start_soon(check)
            await waits.wait()
            assert not checked.is_set()
            tasks_launcher.start("serving", cluster, "ps:1", backend=anyio_backend_name)
    assert checked.is_set()


async def test_a_long_wait_for_a_ps_is_warned_of_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asynchooks.tf.cluster._messages._PATIENCE_SECS", 0.3)
    monkeypatch.setattr("asynchooks.tf.cluster._messages._LONGEST_PAUSE_SECS", 0.1)
    task = task_of(free_cluster(ps=1, worker=1), "worker:0", max_wait_secs=2.0)
    with caplog.at_level(logging.INFO, "asynchooks"), pytest.raises(ClusterError):
        await task.check_cluster()
    levels = [each.levelno for each in caplog.records if "waits for ps:0" in each.message]
    warned = [place for place, level in enumerate(levels) if level == logging.WARNING]
    assert len(warned) == 2, "after 0.3 s and 0.9 s, not yet after 2.7 s"
    assert warned[0] >= 2
    assert "for 2 s more at most: no server answers" in caplog.records[0].message


async def test_a_wait_for_a_ps_ends_in_time_and_can_be_cancelled() -> None:
    cluster = free_cluster(ps=1, worker=1)
    begun = time.monotonic()
    message = r"worker:0 waited for ps:0 for max_wait_secs=0.2 s: no server answers .*is it running"
    with pytest.raises(ClusterError, match=message):
        await task_of(cluster, "worker:0", max_wait_secs=0.2).check_cluster()
    with anyio.move_on_after(0.1) as scope:
        await task_of(cluster, "worker:0").check_cluster()
    assert scope.cancelled_caught
    assert time.monotonic() - begun < 2


async def test_a_silent_ps_is_not_waited_for_longer(
    tasks_launcher: TaskLauncher, anyio_backend_name: str
) -> None:
    cluster = free_cluster(ps=1, worker=1)
    tasks_launcher.start("serving", cluster, "ps:0", backend=anyio_backend_name).signal(
        signal.SIGSTOP
    )
    begun = time.monotonic()
    with pytest.raises(ClusterError, match="has not answered for [13] s; is it running"):
        await task_of(cluster, "worker:0", max_wait_secs=0).check_cluster()
    assert time.monotonic() - begun < 6


async def test_tasks_that_were_given_different_clusters_are_refused(
    tasks_launcher: TaskLauncher, anyio_backend_name: str
) -> None:
    cluster = free_cluster(ps=1, worker=3)
    tasks_launcher.start("serving", cluster, "ps:0", backend=anyio_backend_name)
    mine = {**cluster, "chief": cluster["worker"][:1], "worker": cluster["worker"][1:]}
    zero, one, two = cluster["worker"]
    message = (
        f"worker:0 and the process at {cluster['ps'][0]}, which is ps:0, were given different "
        f"clusters: chief:0 is {zero} here and missing there, worker:0 is {one} here and {zero} "
        f"there, worker:1 is {two} here and {one} there, worker:2 is missing here and {two} there; "
        "give all processes the same"
    )
    with pytest.raises(ClusterError, match=message):
        async with task_of(mine, "worker:0"):
            pytest.fail("it has begun to train")


async def test_a_server_that_is_no_ps_of_the_cluster_is_refused() -> None:
    cluster = free_cluster(ps=2, worker=1)
    swapped = {**cluster, "ps": cluster["ps"][::-1]}
    task_of(swapped, "ps:0").start()
    task_of(cluster, "ps:0").start()
    with pytest.raises(ClusterError, match="at .*, which is ps:0, were given different"):
        await task_of(cluster, "worker:0").check_cluster()
    other = free_cluster(ps=1, worker=1)
    tf.distribute.Server(other, job_name="ps", task_index=0)
    with pytest.raises(ClusterError, match="does not describe its task; start it through a Clus"):
        await task_of(other, "worker:0", max_wait_secs=0.1).check_cluster()


async def test_a_server_with_the_description_of_another_task_is_named() -> None:
    cluster = free_cluster(ps=1, worker=1)
    task = task_of(cluster, "ps:0")
    messages = pytest.importorskip("asynchooks.tf.cluster._messages")
    text = '{"task": "worker:0", "cluster": {"ps:0": "%s", "worker:0": "%s"}}'
    messages.write_task(task.target, text % (cluster["ps"][0], cluster["worker"][0]))
    with pytest.raises(ClusterError, match="worker:0 found worker:0 at .*; start ps:0 there"):
        await task_of(cluster, "worker:0").check_cluster()


async def test_a_server_of_another_version_is_refused() -> None:
    cluster = free_cluster(ps=1, worker=1)
    task = task_of(cluster, "ps:0")
    messages = pytest.importorskip("asynchooks.tf.cluster._messages")
    task_there = json.loads(messages.read_task(task.target))
    messages.write_task(task.target, json.dumps({**task_there, "version": "0.0.1"}))
    with pytest.raises(
        ClusterError, match=rf"ps:0 at {cluster['ps'][0]} runs asynchooks 0\.0\.1, worker:0 \d"
    ):
        await task_of(cluster, "worker:0").check_cluster()
