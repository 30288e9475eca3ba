"""One step function under several creators: its calls take turns, and two steps are warned of."""

import functools
import gc
import multiprocessing
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from asynchooks import (
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    SessionCreator,
    SharedSessionCreator,
)

from ..support.moments import HeldStep, at, losing_step, together
from .uses import Used

StepFunction = Callable[..., Any]


class Meter(Used):
    """A model that may be called itself."""

    def __call__(self, number: int = 0) -> dict[str, float]:
        return self.step()

    def other_step(self) -> dict[str, float]:
        return self.step()


def decorated(step: StepFunction) -> StepFunction:
    @functools.wraps(step)
    def call(*args: Any) -> Any:
        return step(*args)

    return call


class Compiled:
    """An object that stands for a function, as a compiler makes one."""

    def __init__(self, step: StepFunction) -> None:
        functools.update_wrapper(self, step)
        self._step = step

    def __call__(self) -> Any:
        return self._step()


def closure(fn: Callable[[], Any]) -> StepFunction:
    """A function of its own that calls it."""
    return lambda: fn()


def wrapped(*wraps: Callable[[StepFunction], StepFunction]) -> Callable[[Meter], Any]:
    """One function, and what these make of it."""

    def make(meter: Meter) -> list[StepFunction]:
        step = closure(meter)
        return [step, *(wrap(step) for wrap in wraps)]

    return make


KINDS: dict[str, Callable[[Meter], list[StepFunction]]] = {
    "function": wrapped(lambda step: step),
    "wrapped functions": wrapped(decorated, decorated),
    "wrapping objects": wrapped(Compiled, Compiled, functools.lru_cache(0)),
    "object": lambda meter: [meter, meter.__call__],
    "methods": lambda meter: [meter.step, meter.step, meter.other_step, meter],
    "partials": lambda meter: [partial(meter.step, 1), partial(meter.step, 2), meter.step],
    "nested partial": lambda meter: [partial(partial(meter), number=2), meter],
}


async def train(creator: SessionCreator) -> None:
    async with MonitoredSession([], creator, step_runner="thread") as session:
        for _ in range(2):
            await session.run("loss")


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_of_one_function_never_overlap_whoever_made_the_creator(kind: str) -> None:
    meter = Meter()
    step_functions = KINDS[kind](meter)
    await together(*(partial(train, FunctionSessionCreator(each)) for each in step_functions))
    assert (meter.num_uses["step"], meter.overlaps) == (2 * len(step_functions), set())


async def test_calls_never_overlap_on_several_event_loops_nor_a_plain_step_fn() -> None:
    meter = Meter()

    async def elsewhere() -> None:
        await anyio.to_thread.run_sync(anyio.run, train, FunctionSessionCreator(meter.step))

    async def run_step_fn() -> None:
        creator = FunctionSessionCreator(meter.step)
        async with MonitoredSession([], creator, step_runner="thread") as session:
            await session.run_step_fn(lambda step_context: meter())

    await together(
        elsewhere, elsewhere, run_step_fn, lambda: train(FunctionSessionCreator(meter.step))
    )
    assert (meter.num_uses["step"], meter.overlaps) == (7, set())


@pytest.mark.parametrize("kind", ["thread-safe", "methods", "decorated methods", "closures"])
async def test_thread_safe_calls_and_those_of_different_models_overlap(kind: str) -> None:
    both = threading.Barrier(2, timeout=30)

    def meet() -> dict[str, float]:
        both.wait()
        return {"loss": 0.5}

    class Model(Used):
        def step(self, number: int = 0) -> dict[str, float]:
            return meet()

        decorated_step = decorated(step)

    make: dict[str, Callable[[], StepFunction]] = {
        "thread-safe": lambda: meet,
        "methods": lambda: Model().step,
        "decorated methods": lambda: Model().decorated_step,
        "closures": lambda: closure(meet),
    }
    creators = [FunctionSessionCreator(make[kind](), thread_safe=kind[0] == "t") for _ in range(2)]
    await together(*(partial(train, each) for each in creators))


@pytest.mark.parametrize("where", ["the same creator", "another creator", "the event loop"])
async def test_a_step_that_runs_a_session_of_itself_does_not_wait_for_its_own_end(
    where: str,
) -> None:
    depths: list[int] = []

    async def descend(depth: int) -> None:
        used = creator if where == "the same creator" else FunctionSessionCreator(step)
        async with MonitoredSession([], used, step_runner="thread") as session:
            await session.run("depth", {"depth": depth})

    async with anyio.from_thread.BlockingPortal() as portal:

        def step(depth: int) -> dict[str, int]:
            depths.append(depth)
            if depth < 3:
                (portal.call if where == "the event loop" else anyio.run)(descend, depth + 1)
            return {"depth": depth}

        creator = FunctionSessionCreator(step)
        with anyio.fail_after(30):
            await descend(0)
    assert depths == [0, 1, 2, 3]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "asynchooks"]


@pytest.mark.parametrize(
    ("kind", "is_one_creator", "thread_safe"),
    [
        ("function", False, False),
        ("async function", True, False),
        ("method", False, True),
        ("partial", True, True),
    ],
)
async def test_sessions_of_one_function_with_a_step_each_are_warned_of_once(
    caplog: pytest.LogCaptureFixture, is_one_creator: bool, kind: str, thread_safe: bool
) -> None:
    meter, plain = Meter(), closure(dict)

    async def in_coroutine() -> dict[str, float]:
        return {}

    def creator() -> FunctionSessionCreator:
        steps: dict[str, Any] = {
            "function": plain,
            "async function": in_coroutine,
            "method": meter.step,
            "partial": partial(meter.step, 1),
        }
        return FunctionSessionCreator(steps[kind], thread_safe=thread_safe)

    first = creator()
    async with MonitoredSession([], first):
        assert not said(caplog)
        for _ in range(2):
            used = [first if is_one_creator else creator() for _ in range(2)]
            async with MonitoredSession([], used[0]), MonitoredSession([], used[1]):
                pass
    [words] = said(caplog)
    assert "SharedSessionCreator(step)" in words


async def test_what_counts_one_step_or_runs_one_after_the_other_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step, meter, global_step = closure(dict), Meter(), GlobalStep()
    shared = SharedSessionCreator(step)
    pairs: list[list[Any]] = [
        [FunctionSessionCreator(step)],
        [FunctionSessionCreator(step)],
        [shared, shared],
        [FunctionSessionCreator(step, global_step=global_step) for _ in range(2)],
        [closure(dict), closure(dict)],
        [Meter().step, meter.step],
        [meter.step, meter.other_step],  # such as an evaluation
    ]
    for creators in pairs:
        sessions = [MonitoredSession([], each) for each in creators]
        for session in sessions:
            await session.open()
        for session in sessions:
            await session.close()
    assert not said(caplog)


async def test_a_session_that_recovered_or_was_dropped_is_not_taken_for_another_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    creator, held = FunctionSessionCreator(losing_step(1)), list[Any]()
    async with MonitoredSession([], creator) as session:
        await session.run([])
    # as a display of sessions holds the raw session until its next look
    keeps = at(after_create_session=lambda raw, coord: held.append(raw))
    dropped = MonitoredSession([keeps], creator)
    await dropped.open()
    with pytest.warns(ResourceWarning):
        del dropped
    gc.collect()
    async with MonitoredSession([], creator) as session:
        await session.run([])
    assert not [each for each in said(caplog) if "SharedSessionCreator" in each]


async def test_a_step_function_lives_no_longer_than_its_creators_and_sessions() -> None:
    weak: list[weakref.ref[Any]] = []
    for step in (Meter().step, closure(dict)):
        weak.append(weakref.ref(getattr(step, "__self__", step)))
        async with MonitoredSession([], step) as session:
            await session.run([])
    del step, session
    gc.collect()
    assert [each() for each in weak] == [None, None]


def _train_in_child(step: StepFunction, results: Any) -> None:
    anyio.run(train, FunctionSessionCreator(step))
    results.put("trained")


@pytest.mark.faults
def test_a_forked_child_does_not_wait_for_a_call_of_its_parent() -> None:
    held, parent = HeldStep(dict), threading.get_ident()

    def step() -> dict[str, float]:
        if threading.get_ident() != parent and not held.begun.is_set():
            held()
        return {"loss": 0.5}

    thread = threading.Thread(target=anyio.run, args=(train, FunctionSessionCreator(step)))
    thread.start()
    assert held.begun.wait(30)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_train_in_child, args=(step, results))
    try:
        child.start()
        assert results.get(timeout=30) == "trained"
    finally:
        held.may_end.set()
        child.kill()
        child.join()
        thread.join()
