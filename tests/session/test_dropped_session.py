"""A session that is dropped without being closed says so, and gives back what it holds."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionHook,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StepCounterHook,
    StepUnreachableError,
    StopAtStepHook,
)
from asynchooks._engine.base import Slot
from asynchooks._engine.current import use_engine
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.simulation import Simulation
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..hooks.preemptions import Counter, handlers_are_kept, saved_counts, saving, train
from ..simulation.engines import on_every_engine
from ..support.helpers import counting_creator, settle
from ..support.threads import own_threads, threads_left
from ..support.virtual_kernel import Trampoline

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def no_cycles() -> Iterator[None]:
    """What is dropped is freed at once: the garbage collector is not needed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def wait_for_threads() -> None:
    """None of ours is left, within some seconds."""
    for thread in own_threads():
        thread.join(10)
        assert not thread.is_alive(), thread.name


def is_free(directory: Path) -> bool:
    other = CheckpointDirectory(directory)
    other.open()
    other.close()
    return True


async def opened(hooks: list[Any], creator: Any) -> Any:
    session = MonitoredSession(hooks, creator, step_runner="thread")
    await session.__aenter__()
    await session.run([])
    return session


async def test_it_warns_and_gives_back_its_thread_its_directory_and_the_signals(
    tmp_path: Path,
) -> None:
    model = Counter()
    kept = [PreemptionHook(), saving(tmp_path, model), StepCounterHook(), StopAtStepHook(9)]
    with handlers_are_kept():
        session = await opened(kept, FunctionSessionCreator(model.step))
        assert threads_left("asynchooks-step")
        before = signal.getsignal(signal.SIGTERM)
        words = "<MonitoredSession open, .* was dropped without being closed: .*`async with`, or"
        with pytest.warns(ResourceWarning, match=words):
            del session
        assert signal.getsignal(signal.SIGTERM) != before
    wait_for_threads()
    assert is_free(tmp_path)
    # the very hooks, again: they are in no other session's hands
    async with MonitoredSession(kept, FunctionSessionCreator(model.step)) as session:
        await session.run([])
    assert max(saved_counts(tmp_path)) == session.global_step.value


async def test_one_of_several_on_a_model_leaves_the_others_at_work() -> None:
    hook = PreemptionHook()
    creator = SharedSessionCreator(counting_creator())
    with handlers_are_kept():
        first = await opened([hook], creator)
        async with MonitoredSession([hook], creator) as second:
            with pytest.warns(ResourceWarning):
                del first
            await second.run([])
            hook.preempt()
            await train(second)


class WaitsBeforeItsRun(SessionRunHook):
    async def before_run(self, run_context: SessionRunContext) -> None:
        await run_context.global_step.wait_for(5)


@pytest.mark.parametrize("num_workers", [None, 2])
async def test_a_wait_for_its_steps_ends(num_workers: int | None) -> None:
    creator = SharedSessionCreator(counting_creator(), num_workers)
    first = await opened([], creator)

    async def wait() -> None:
        with pytest.raises(StepUnreachableError, match="1 open, 2 opened"):
            async with MonitoredSession([WaitsBeforeItsRun()], creator) as second:
                await second.run([])

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            while first.global_step.statistics().tasks_waiting_for_step < 1:
                await settle()
            with pytest.warns(ResourceWarning):
                del first
    assert creator.handle().global_step.statistics().workers_open == 0


async def test_the_last_one_that_closes_closes_the_model_without_it() -> None:
    creator = SharedSessionCreator(counting_creator())
    first = await opened([], creator)
    async with MonitoredSession([], creator) as second:
        raw = second.raw_session()
        with pytest.warns(ResourceWarning):
            del first
    assert raw is not None
    assert raw.is_retired
    async with MonitoredSession([], creator) as third:
        assert third.raw_session() is not raw


async def test_side_tasks_do_not_keep_it() -> None:
    async def wait() -> None:
        await anyio.sleep_forever()

    session = await opened([], counting_creator())
    session.start_soon(wait)
    await anyio.lowlevel.checkpoint()
    seen = weakref.ref(session)
    with pytest.warns(ResourceWarning):
        del session
    assert seen() is None


async def test_a_save_in_the_background_keeps_the_directory_until_it_is_written(
    tmp_path: Path,
) -> None:
    model, held = Counter(), threading.Event()
    hook = saving(tmp_path, model, background=True)
    session = await opened([hook], FunctionSessionCreator(model.step))
    saver = hook.checkpointer
    write = saver.write

    async def slow(*args: Any) -> bool:
        while not held.is_set():
            await anyio.lowlevel.checkpoint()
        return bool(await write(*args))

    saver.write = slow
    await saver.save(session.raw_session(), may_stop=False)
    with pytest.warns(ResourceWarning):
        del session
    with pytest.raises(RuntimeError, match="is in use by|uses it already"):
        is_free(tmp_path)
    held.set()
    with anyio.fail_after(10):
        await saver.wait_idle()
        while saver.is_writing:
            await anyio.lowlevel.checkpoint()
        await settle()
    assert saved_counts(tmp_path) == {0: 0, 1: 1}


async def test_what_is_closed_or_was_never_opened_is_silent(recwarn: Any) -> None:
    async with MonitoredSession([], counting_creator()) as session:
        await session.run([])
    del session
    MonitoredSession([], counting_creator())
    with pytest.raises(ValueError, match="stop_grace_period_secs is -1"):
        MonitoredSession([], counting_creator(), stop_grace_period_secs=-1)
    with pytest.raises(LookupError):
        async with MonitoredSession([], counting_creator()):
            raise LookupError
    assert [each for each in recwarn if each.category is ResourceWarning] == []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_session_whose_event_loop_has_ended_is_noticed(tmp_path: Path, backend: str) -> None:
    model, held = Counter(), list[Any]()

    async def main() -> None:
        hooks = [PreemptionHook(), saving(tmp_path, model)]
        held.append(await opened(hooks, FunctionSessionCreator(model.step)))

    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    try:
        anyio.run(main, backend=backend)
        with pytest.warns(ResourceWarning, match="was dropped without being closed"):
            held.clear()
        assert signal.getsignal(signal.SIGTERM) == before[1]
    finally:
        signal.signal(signal.SIGINT, before[0])  # the loop's own, which ended before ours
    wait_for_threads()
    assert is_free(tmp_path)


def test_one_that_is_thrown_away_while_its_raw_session_closes_calls_on_drop() -> None:
    log: list[str] = []

    class Drops(RecordingHook):
        def on_drop(self) -> None:
            log.append("on_drop")

    class Raw(ScriptedSession):
        async def close(self) -> None:  # type: ignore[override]
            log.append("close")
            await engine.park(Slot(engine, "nothing"))

    async def main() -> None:
        async with MonitoredSession([Drops("a")], ScriptedSessionCreator([Raw()])) as session:
            await session.run([])

    engine = Trampoline()
    with use_engine(engine):
        task = engine.start(main)
        while engine.fire_next():
            pass
        assert (log, task.is_done) == (["close"], False)
        task.body.close()
    assert log == ["close", "on_drop"]


def test_one_that_another_thread_drops_gives_back_what_it_holds(tmp_path: Path) -> None:
    model, held = Counter(), list[Any]()

    async def main() -> None:
        held.append(await opened([saving(tmp_path, model)], FunctionSessionCreator(model.step)))
        with pytest.warns(ResourceWarning):
            await asyncio.to_thread(held.clear)
        assert is_free(tmp_path)

    asyncio.run(main())
    wait_for_threads()


def test_in_a_simulation_it_is_silent(recwarn: Any) -> None:
    async def main() -> None:
        await opened([], counting_creator())

    Simulation(seed=1).run(main)
    assert [each for each in recwarn if each.category is ResourceWarning] == []


@on_every_engine
def test_in_a_simulation_a_wait_for_its_steps_ends(backend: Any) -> None:
    simulation = Simulation(seed=1, backend=backend)
    creator = SharedSessionCreator(counting_creator())

    async def main() -> None:
        first = await opened([], creator)

        async def drop() -> None:
            nonlocal first
            await simulation.sleep(1.0)
            first = None

        simulation.start(drop)
        with pytest.raises(StepUnreachableError):
            async with MonitoredSession([WaitsBeforeItsRun()], creator) as second:
                await second.run([])
        assert simulation.now == 1.0

    simulation.run(main)


def test_a_directory_that_is_dropped_is_free_again(tmp_path: Path) -> None:
    def take(path: Path) -> None:
        CheckpointDirectory(path).open()

    steps: list[Callable[[Path], Any]] = [take, take, is_free]
    for step in steps:
        step(tmp_path)


async def test_the_garbage_collector_may_drop_it_while_its_step_is_locked() -> None:
    creator = SharedSessionCreator(counting_creator())
    async with MonitoredSession([], creator) as other:
        session = await opened([], creator)
        session.is_its_own = session  # so that the garbage collector drops it
        seen = weakref.ref(session)
        del session
        step, may_wait = other.global_step, threading.Event()
        assert step.statistics().workers_open == 2

        def collect() -> None:
            with step.gate.lock:  # as where the collector comes in the midst of a change of it
                with pytest.warns(ResourceWarning, match="open, at step 1, of"):
                    gc.collect()
            may_wait.set()

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        assert await anyio.to_thread.run_sync(may_wait.wait, 10)
        assert seen() is None
        with anyio.fail_after(10):  # a thread takes it off that waits for the lock
            while step.statistics().workers_open == 2:
                await anyio.lowlevel.checkpoint()
