"""PreemptionHook with workers that share a session: all end, and the signal leaves once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionHook,
    SharedSessionCreator,
)

from ..preemptions import At, Counter, handlers_are_kept, saved_counts, saving, sigterm

pytestmark = pytest.mark.anyio
NUM_WORKERS = 8


class Workers:
    """Eight sessions that share one model, each in a task; some get hooks of their own."""

    def __init__(self, directory: Path) -> None:
        self.model = Counter()
        self.shared = SharedSessionCreator(FunctionSessionCreator(self.model.step), NUM_WORKERS)
        self.directory = directory
        self.sessions: list[MonitoredSession] = []
        self.moments = [At() for _ in range(NUM_WORKERS)]
        self.left: list[type[BaseException]] = []
        self.is_signalled = False
        self.num_open = 0

    async def work(self, number: int, hooks: list[Any]) -> None:
        hooks = [*hooks, self.moments[number]]
        if number == 3:
            hooks.append(saving(self.directory, self.model))
        session = MonitoredSession(hooks, self.shared)
        self.sessions.append(session)
        async with session:
            self.num_open += 1
            while not session.should_stop():
                # not before all are open; and a second signal would end the process
                if (
                    self.num_open == NUM_WORKERS
                    and self.model.count >= 40
                    and not self.is_signalled
                ):
                    self.is_signalled = True
                    sigterm()
                await session.run([])
                await anyio.lowlevel.checkpoint()

    async def work_caught(self, number: int, hooks: list[Any]) -> None:
        try:
            await self.work(number, hooks)
        except SystemExit as error:
            self.left.append(type(error))

    def check_ends(self) -> None:
        assert [each.log[-1] for each in self.moments] == ["end"] * NUM_WORKERS
        for session in self.sessions:
            assert str(session.stop_reason) == "PreemptionHook: the process got SIGTERM"
        assert saved_counts(self.directory)[self.model.count] == self.model.count


async def test_one_hook_for_all_workers_ends_all_and_the_signal_leaves_the_last(
    tmp_path: Path,
) -> None:
    workers, hook = Workers(tmp_path), PreemptionHook()
    with handlers_are_kept():
        async with anyio.create_task_group() as group:
            for number in range(NUM_WORKERS):
                group.start_soon(workers.work_caught, number, [hook])
    assert workers.left == [SystemExit]
    assert hook.received is signal.SIGTERM
    workers.check_ends()


@pytest.mark.parametrize("place", [0, 3, 7])
async def test_a_hook_for_one_worker_stops_the_others_too(tmp_path: Path, place: int) -> None:
    workers = Workers(tmp_path)
    with handlers_are_kept():
        async with anyio.create_task_group() as group:
            for number in range(NUM_WORKERS):
                hooks = [PreemptionHook()] if number == place else []
                group.start_soon(workers.work_caught, number, hooks)
    assert workers.left == [SystemExit]
    workers.check_ends()


async def test_a_worker_that_opens_after_the_signal_stops_at_once(tmp_path: Path) -> None:
    workers, hook = Workers(tmp_path), PreemptionHook()
    with handlers_are_kept():
        with pytest.raises(SystemExit):
            async with MonitoredSession([hook], workers.shared) as first:
                sigterm()
                async with MonitoredSession([hook], workers.shared) as second:
                    assert second.should_stop()
                assert first.should_stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_leaves_a_task_group_is_the_loops_own_way(number: signal.Signals) -> None:
    """asyncio lets SystemExit and KeyboardInterrupt out of its loop; trio's groups wrap them."""
    kind = KeyboardInterrupt if number is signal.SIGINT else SystemExit

    async def main() -> None:
        hook, model = PreemptionHook(), Counter()
        shared = SharedSessionCreator(FunctionSessionCreator(model.step), NUM_WORKERS)

        async def work() -> None:
            async with MonitoredSession([hook], shared) as session:
                while not session.should_stop():
                    if model.count >= 40 and hook.received is None:
                        signal.raise_signal(number)
                    await session.run([])
                    await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            for _ in range(NUM_WORKERS):
                group.start_soon(work)

    with handlers_are_kept(), pytest.raises(kind):
        anyio.run(main)
    with handlers_are_kept(), pytest.raises(BaseExceptionGroup) as caught:
        anyio.run(main, backend="trio")
    assert [type(each) for each in caught.value.exceptions] == [kind]


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("group", ["asyncio.TaskGroup()", "anyio.create_task_group()"])
@pytest.mark.parametrize("is_uvloop", [False, True])
def test_a_signal_leaves_asyncios_task_groups_without_a_report_of_tasks(
    number: signal.Signals, group: str, is_uvloop: bool
) -> None:
    if is_uvloop:
        pytest.importorskip("uvloop")
    program = f"""
import asyncio, gc, signal, anyio
from asynchooks import FunctionSessionCreator, MonitoredSession, PreemptionHook

async def train():
    creator = FunctionSessionCreator(lambda: dict(loss=0.0))
    async with MonitoredSession([PreemptionHook()], creator) as session:
        signal.raise_signal({int(number)})
        await session.or_stop(anyio.sleep_forever)

async def main():
    async with {group} as group:
        start = getattr(group, "start_soon", None)
        for fn in (train, anyio.sleep_forever):
            start(fn) if start else group.create_task(fn())

try:
    anyio.run(main, backend_options=dict(use_uvloop={is_uvloop}))
except (SystemExit, KeyboardInterrupt) as left:
    print(type(left).__name__, *left.args)
gc.collect()
"""
    expected = "KeyboardInterrupt" if number is signal.SIGINT else f"SystemExit {128 + number}"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [expected]
    warning = f"{number.name}: training stops, and its hooks end"
    assert done.stderr.startswith(warning)
    assert len(done.stderr.splitlines()) == 1
