"""A session that is dropped without being closed says so, and gives back what it holds."""

import asyncio
import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionHook,
    SessionRunHook,
    SharedSessionCreator,
    StepCounterHook,
    StepUnreachableError,
    StopAtStepHook,
)
from asynchooks.simulation import Simulation
from asynchooks.testing import ScriptedSession

from ..hooks.preemptions import Counter, handlers_are_kept, saved_counts, saving, train
from ..hooks.savers import is_free
from ..simulation.engines import on_every_engine
from ..support.helpers import counting_creator, turns
from ..support.moments import at, counting, scripted
from ..support.threads import own_threads, threads_left


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
    async with MonitoredSession(kept, model.step) as session:
        await session.run([])
    assert max(saved_counts(tmp_path)) == session.global_step.value


async def test_one_of_several_on_a_model_leaves_the_others_at_work_and_the_last_closes_it() -> None:
    hook, creator = PreemptionHook(), SharedSessionCreator(counting_creator())
    with handlers_are_kept():
        first = await opened([hook], creator)
        async with MonitoredSession([hook], creator) as second:
            raw = second.raw_session()
            with pytest.warns(ResourceWarning):
                del first
            await second.run([])
            hook.preempt()
            await train(second)
    assert raw is not None
    assert raw.is_retired


async def test_side_tasks_do_not_keep_it() -> None:
    session = await opened([], counting_creator())
    session.start_soon(anyio.sleep_forever)
    await turns()
    seen = weakref.ref(session)
    with pytest.warns(ResourceWarning):
        del session
    assert seen() is None


async def test_what_is_closed_or_was_never_opened_is_silent(recwarn: Any) -> None:
    with pytest.raises(LookupError):
        async with counting():
            raise LookupError
    counting()
    with pytest.raises(ValueError, match="stop_grace_period_secs is -1"):
        MonitoredSession([], counting_creator(), stop_grace_period_secs=-1)
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
    log, closes = list[str](), asyncio.Event()

    class Raw(ScriptedSession):
        async def close(self) -> None:  # type: ignore[override]
            log.append("close")
            closes.set()
            await anyio.sleep_forever()

    async def main() -> None:
        async with scripted([Raw()], hook):
            """It closes the raw session."""

    async def throw_away() -> None:
        coroutine = main()
        task = asyncio.create_task(coroutine)
        await closes.wait()
        coroutine.close()
        assert log == ["close", "on_drop"]
        task.cancel()
        await asyncio.wait([task])

    hook: Any = type("Drops", (SessionRunHook,), {"on_drop": lambda self: log.append("on_drop")})()
    asyncio.run(throw_away())


@on_every_engine
def test_in_a_simulation_it_is_silent_and_a_wait_for_its_steps_ends(
    backend: Any, recwarn: Any
) -> None:
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
            async with MonitoredSession(
                [at(before_run=lambda context: context.global_step.wait_for(5))], creator
            ) as second:
                await second.run([])
        assert simulation.now == 1.0
        await opened([], counting_creator())

    simulation.run(main)
    assert [each for each in recwarn if each.category is ResourceWarning] == []


async def test_the_garbage_collector_may_drop_it_while_its_step_is_locked() -> None:
    creator = SharedSessionCreator(counting_creator())
    async with MonitoredSession([], creator) as other:
        session = await opened([], creator)
        session.is_its_own = session  # so that the garbage collector drops it
        del session
        step, has_collected = other.global_step, threading.Event()

        def collect() -> None:
            with step.gate.lock:  # as where the collector comes in the midst of a change of it
                with pytest.warns(ResourceWarning, match="open, at step 1, of"):
                    gc.collect()
            has_collected.set()

        threading.Thread(target=collect, daemon=True).start()
        assert await anyio.to_thread.run_sync(has_collected.wait, 10)
        with anyio.fail_after(10):  # a thread takes it off that waits for the lock
            while step.statistics().workers_open == 2:
                await turns()
