"""One step function under several creators: its calls take turns, and two steps are warned of."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from asynchooks import (
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    PreemptionError,
    SessionCreator,
    SessionRunHook,
    SharedSessionCreator,
)
from asynchooks.simulation import Simulation

from ..support.loops import anyio_backend as anyio_backend

pytestmark = pytest.mark.anyio

StepFunction = Callable[..., Any]


class Meter:
    """A step that notes how many calls of it are under way at once; calls end some ms later."""

    # models are told apart by their identity, not by what users define
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Meter)

    def __init__(self) -> None:
        self.num_calls = self.most_at_once = self._num_now = 0
        self._mutex, self._second = threading.Lock(), threading.Event()

    def __call__(self, number: int = 0) -> dict[str, float]:
        with self._mutex:
            self.num_calls += 1
            self._num_now += 1
            self.most_at_once = max(self.most_at_once, self._num_now)
            if self._num_now > 1:
                self._second.set()
        self._second.wait(0.02)
        with self._mutex:
            self._num_now -= 1
        return {"loss": 0.5}

    def step(self, number: int = 0) -> dict[str, float]:
        return self(number)

    def other_step(self) -> dict[str, float]:
        return self()


def as_function(meter: Meter) -> list[StepFunction]:
    def step() -> dict[str, float]:
        return meter()

    return [step, step]


def as_wrapped_functions(meter: Meter) -> list[StepFunction]:
    (step, _) = as_function(meter)

    def decorated() -> StepFunction:
        @functools.wraps(step)
        def call() -> Any:
            return step()

        return call

    return [decorated(), decorated(), step]


class Compiled:
    """An object that stands for a function, as a compiler makes one."""

    def __init__(self, step: StepFunction) -> None:
        functools.update_wrapper(self, step)
        self._step = step

    def __call__(self) -> Any:
        return self._step()


def as_wrapping_objects(meter: Meter) -> list[StepFunction]:
    (step, _) = as_function(meter)
    return [Compiled(step), Compiled(step), functools.lru_cache(0)(step), step]


KINDS: list[Callable[[Meter], list[StepFunction]]] = [
    as_function,
    as_wrapped_functions,
    as_wrapping_objects,
    lambda meter: [meter, meter, meter.__call__],
    lambda meter: [meter.step, meter.step],
    lambda meter: [meter.step, meter.other_step, meter],
    lambda meter: [functools.partial(meter.step, 1), functools.partial(meter.step, 2), meter.step],
    lambda meter: [functools.partial(functools.partial(meter), number=2), meter],
]


async def train(creator: SessionCreator, num_steps: int = 2) -> None:
    async with MonitoredSession([], creator, step_runner="thread") as session:
        for _ in range(num_steps):
            await session.run("loss")


@pytest.mark.parametrize("kind", range(len(KINDS)))
async def test_calls_of_one_function_never_overlap_whoever_made_the_creator(kind: int) -> None:
    meter = Meter()
    step_functions = KINDS[kind](meter)
    async with anyio.create_task_group() as group:
        for each in step_functions:
            group.start_soon(train, FunctionSessionCreator(each))
    assert meter.num_calls == 2 * len(step_functions)
    assert meter.most_at_once == 1


async def test_calls_of_one_function_never_overlap_on_several_event_loops() -> None:
    meter = Meter()

    def elsewhere() -> None:
        anyio.run(train, FunctionSessionCreator(meter.step))

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, elsewhere)
        group.start_soon(anyio.to_thread.run_sync, elsewhere)
        await train(FunctionSessionCreator(meter.step))
    assert (meter.num_calls, meter.most_at_once) == (6, 1)


async def test_a_plain_hook_waits_for_another_creators_step() -> None:
    meter = Meter()

    async def evaluate() -> None:
        async with MonitoredSession(
            [], FunctionSessionCreator(meter.step), step_runner="thread"
        ) as session:
            await session.run_step_fn(lambda step_context: meter())

    async with anyio.create_task_group() as group:
        group.start_soon(evaluate)
        group.start_soon(train, FunctionSessionCreator(meter.step))
    assert (meter.num_calls, meter.most_at_once) == (3, 1)


async def test_thread_safe_calls_of_several_creators_overlap() -> None:
    both = threading.Barrier(2, timeout=30)

    def step() -> dict[str, float]:
        both.wait()
        return {"loss": 0.5}

    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(train, FunctionSessionCreator(step, thread_safe=True))


async def test_methods_of_two_objects_and_closures_overlap() -> None:
    both = threading.Barrier(2, timeout=30)

    class Model:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Model)

        def step(self) -> dict[str, float]:
            both.wait()
            return {"loss": 0.5}

    def closure() -> StepFunction:
        def step() -> dict[str, float]:
            both.wait()
            return {"loss": 0.5}

        return step

    for first, second in ((Model().step, Model().step), (closure(), closure())):
        async with anyio.create_task_group() as group:
            group.start_soon(train, FunctionSessionCreator(first))
            group.start_soon(train, FunctionSessionCreator(second))


@pytest.mark.parametrize("is_same_creator", [True, False])
async def test_a_step_that_runs_a_session_of_itself_does_not_wait_for_its_own_end(
    is_same_creator: bool,
) -> None:
    depths: list[int] = []

    def step(depth: int) -> dict[str, int]:
        depths.append(depth)
        if depth < 3:
            anyio.run(descend, depth + 1)
        return {"depth": depth}

    creator = FunctionSessionCreator(step)

    async def descend(depth: int) -> None:
        used = creator if is_same_creator else FunctionSessionCreator(step)
        async with MonitoredSession([], used, step_runner="thread") as session:
            await session.run("depth", {"depth": depth})

    with anyio.fail_after(30):
        await descend(0)
    assert depths == [0, 1, 2, 3]


async def test_a_step_may_wait_for_a_session_of_itself_on_the_event_loop() -> None:
    depths: list[int] = []

    async def descend(depth: int) -> None:
        creator = FunctionSessionCreator(step)
        async with MonitoredSession([], creator, step_runner="thread") as session:
            await session.run("depth", {"depth": depth})

    async with anyio.from_thread.BlockingPortal() as portal:

        def step(depth: int) -> dict[str, int]:
            depths.append(depth)
            if depth < 2:
                portal.call(descend, depth + 1)
            return {"depth": depth}

        with anyio.fail_after(30):
            await descend(0)
    assert depths == [0, 1, 2]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "asynchooks"]


def counting(is_async: bool = False) -> StepFunction:
    def step() -> dict[str, float]:
        return {"loss": 0.5}

    async def async_step() -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return {"loss": 0.5}

    return async_step if is_async else step


@pytest.mark.parametrize("thread_safe", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_one_creator", [False, True])
async def test_sessions_of_one_function_with_a_step_each_are_warned_of_once(
    caplog: pytest.LogCaptureFixture, is_one_creator: bool, is_async: bool, thread_safe: bool
) -> None:
    step = counting(is_async)

    def creator() -> FunctionSessionCreator:
        return FunctionSessionCreator(step, thread_safe=thread_safe)

    first = creator()
    async with MonitoredSession([], first):
        assert not said(caplog)
        for _ in range(2):
            async with (
                MonitoredSession([], first if is_one_creator else creator()),
                MonitoredSession([], first if is_one_creator else creator()),
            ):
                pass
    assert len(said(caplog)) == 1
    assert "SharedSessionCreator(step)" in said(caplog)[0]


async def test_partials_and_methods_of_one_model_with_a_step_each_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for wrap in (lambda fn: fn, lambda fn: functools.partial(fn, 1)):
        caplog.clear()
        meter = Meter()
        async with (
            MonitoredSession([], FunctionSessionCreator(meter.step)),
            MonitoredSession([], FunctionSessionCreator(wrap(meter.step))),
        ):
            assert len(said(caplog)) == 1


async def test_what_counts_one_step_or_runs_one_after_the_other_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step, meter, global_step = counting(), Meter(), GlobalStep()
    for _ in range(2):
        async with MonitoredSession([], FunctionSessionCreator(step)) as session:
            await session.run("loss")
    shared = SharedSessionCreator(FunctionSessionCreator(step))
    async with MonitoredSession([], shared), MonitoredSession([], shared):
        pass
    async with (
        MonitoredSession([], FunctionSessionCreator(step, global_step=global_step)),
        MonitoredSession([], FunctionSessionCreator(step, global_step=global_step)),
    ):
        pass
    async with (
        MonitoredSession([], FunctionSessionCreator(counting())),
        MonitoredSession([], FunctionSessionCreator(counting())),
        MonitoredSession([], FunctionSessionCreator(Meter().step)),
        MonitoredSession([], FunctionSessionCreator(meter.step)),
        MonitoredSession([], FunctionSessionCreator(meter.other_step)),  # such as an evaluation
    ):
        pass
    assert not said(caplog)


class KeepsSession(SessionRunHook):
    """Holds the raw session for ever."""

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self.session = session


async def test_a_session_that_recovered_or_was_dropped_is_not_taken_for_another_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = [PreemptionError("lost")]

    def step() -> dict[str, float]:
        if failures:
            raise failures.pop()
        return {"loss": 0.5}

    creator = FunctionSessionCreator(step)
    async with MonitoredSession([], creator) as session:
        await session.run("loss")
    held = KeepsSession()  # as a display of sessions does until its next look
    dropped = MonitoredSession([held], creator)
    await dropped.open()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del dropped
        gc.collect()
    async with MonitoredSession([], creator) as session:
        await session.run("loss")
    assert not [each for each in said(caplog) if "SharedSessionCreator" in each]


async def test_a_step_function_lives_no_longer_than_its_creators_and_sessions() -> None:
    meter, step = Meter(), counting()
    weak: list[weakref.ref[Any]] = [weakref.ref(meter), weakref.ref(step)]
    step_functions: list[StepFunction] = [meter.step, step]
    for step_function in step_functions:
        async with MonitoredSession([], FunctionSessionCreator(step_function)) as session:
            await session.run("loss")
    del meter, step, step_functions, step_function, session
    gc.collect()
    assert [each() for each in weak] == [None, None]


@pytest.mark.parametrize("backend", ["asyncio", "trio", "turbo"])
def test_thousands_of_simulated_sessions_of_one_function_run_side_by_side(
    backend: Any,
) -> None:
    simulation, step = Simulation(backend=backend), counting()

    async def worker() -> None:
        async with MonitoredSession([], FunctionSessionCreator(step)) as session:
            for _ in range(2):
                await session.run("loss")
                await simulation.sleep(1.0)

    async def main() -> None:
        tasks = [simulation.start(worker) for _ in range(1000)]
        for each in tasks:
            await each.wait()

    simulation.run(main)
    assert simulation.now == 2.0


def _train_in_child(step: StepFunction, results: Any) -> None:
    anyio.run(train, FunctionSessionCreator(step))
    results.put("trained")


@pytest.mark.faults
def test_a_forked_child_does_not_wait_for_a_call_of_its_parent() -> None:
    begun, release = threading.Event(), threading.Event()
    parent = threading.get_ident()

    def step() -> dict[str, float]:
        if threading.get_ident() != parent and not begun.is_set():
            begun.set()
            assert release.wait(30)
        return {"loss": 0.5}

    thread = threading.Thread(target=anyio.run, args=(train, FunctionSessionCreator(step)))
    thread.start()
    assert begun.wait(30)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_train_in_child, args=(step, results))
    try:
        child.start()
        assert results.get(timeout=30) == "trained"
    finally:
        release.set()
        child.kill()
        child.join()
        thread.join()


async def test_decorated_methods_of_two_models_overlap() -> None:
    meet = threading.Barrier(2)

    def decorated(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*args: Any) -> Any:
            return fn(*args)

        return call

    class Model:
        @decorated
        def step(self) -> dict[str, float]:
            meet.wait(20)  # for the other one
            return {"loss": 0.5}

    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(train, FunctionSessionCreator(Model().step))
    assert not meet.broken
