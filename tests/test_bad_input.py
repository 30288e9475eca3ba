"""Misuse: each a typed error that says what was got, what was expected and what to do."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    GlobalStep,
    GlobalStepWaiterHook,
    MonitoredSession,
    SessionRunArgs,
    SessionRunHook,
    SharedSessionCreator,
    StepContext,
    StepUnreachableError,
    StopTraining,
)

from .support.helpers import counting_creator, settle

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([3], r"hooks\[0\] is 3 of type int; expected an instance"),
        ([SessionRunHook(), SessionRunHook], r"is the class SessionRunHook; give an instance"),
        (SessionRunHook(), "give a list of hooks"),
        (3, "give an iterable of SessionRunHook"),
        (counting_creator(), "Hooks come first here"),
    ],
)
def test_hooks_that_are_none_are_refused(hooks: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        MonitoredSession(hooks, counting_creator())


def hook_with(*names: str) -> SessionRunHook:
    """A hook that has plain methods of these names."""
    kind = type("Mine", (SessionRunHook,), {name: lambda self, *args: None for name in names})
    made: SessionRunHook = kind()
    return made


MISSPELT = {
    "after_run": "afterrun after_runs atfer_run afterRun on_after_run on_run_end after_step "
    "on_step_end",
    "before_run": "before_runs befor_run beforeRun before_step on_train_batch_start",
    "on_error": "on_eror onError an_error on_exception",
    "after_create_session": "after_create_sesion after_created_session AfterCreateSession "
    "on_session_created",
    "begin": "Begin on_train_begin",
    "end": "End on_end on_train_end",
    "state_dict": "state_dct stateDict",
    "load_state_dict": "load_state_dcit load_state",
}


@pytest.mark.parametrize("meant", MISSPELT)
def test_a_misspelt_method_is_warned_of_once_with_the_name_meant(meant: str) -> None:
    for name in MISSPELT[meant].split():
        hook = hook_with(name)
        expected = f"Mine has a method '{name}', .* '{meant}'"
        with pytest.warns(UserWarning, match=expected) as warned:
            MonitoredSession([hook, type(hook)()], counting_creator())
        assert [Path(each.filename) for each in warned] == [Path(__file__)]


def test_helper_methods_of_hooks_are_not_warned_of() -> None:
    helpers = (
        "send bend ends ended begins begun run runs error errors before after after_run_all "
        "run_after on_stop end_of_epoch on_epoch_end restore_weights load_data load save state "
        "states state_path save_state get_state reset_state dict step steps on_save on_err "
        "create_session after_session log_error _afterrun __afterrun after_fun_run restore_run "
        "state_dict load_state_dict"
    )

    class Inherits(type(hook_with("after_run"))):  # type: ignore[misc]
        def after_runs(self) -> None:
            """A helper."""

        on_errors: Any = None

    class Callback:
        def on_train_end(self) -> None:
            """What another library calls."""

    class Both(SessionRunHook, Callback):
        def on_train_end(self) -> None:
            """What that library calls, too."""

    for hook in (
        hook_with(*helpers.split()), hook_with("after_run", "after_runs", "after_step"),
        hook_with("load_state_dict", "load_state"), Inherits(), Both(),
    ):  # fmt: skip
        MonitoredSession([hook], counting_creator())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"session_creator": 3}, TypeError, "give an asynchooks.SessionCreator"),
        ({"session_creator": FunctionSessionCreator}, TypeError, "that is the class; give an"),
        ({"recovery": 3}, TypeError, "recovery is 3; give a Recovery"),
        ({"stop_grace_period_secs": "thread"}, ValueError, "are given by keyword"),
        ({"stop_grace_period_secs": -1}, ValueError, "is -1; give seconds >= 0"),
        ({"stop_grace_period_secs": float("nan")}, ValueError, "is nan; give seconds >= 0"),
        ({"step_runner": "fast"}, ValueError, "'fast'; give one of auto, inline, thread"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        MonitoredSession([], **{"session_creator": counting_creator(), **arguments})


def test_bad_arguments_of_creators_and_of_stops_are_refused() -> None:
    what = "give it what the workers are to share, such as a step function"
    with pytest.raises(TypeError, match=what):
        SharedSessionCreator(SharedSessionCreator(counting_creator()))
    with pytest.raises(ValueError, match="num_workers is 0"):
        SharedSessionCreator(counting_creator(), num_workers=0)
    for initial_step in (-1, "5", 1.5):
        expected = "initial_step is .*; give an integer >= 0"
        with pytest.raises((TypeError, ValueError), match=expected):
            FunctionSessionCreator(dict, initial_step=initial_step)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="give a text, an exception, or nothing"):
        MonitoredSession([], counting_creator()).request_stop(3)  # type: ignore[arg-type]


async def test_use_before_entering_or_after_leaving_is_refused() -> None:
    session = MonitoredSession([], counting_creator())

    async def check(message: str) -> None:
        for call in (session.run("calls"), session.run_step_fn(step_fn), session.or_stop(settle)):
            with pytest.raises(RuntimeError, match=message):
                await call

    await check("before the session was opened")
    with pytest.raises(RuntimeError, match="before the session was opened"):
        await session.close()
    assert not session.should_stop()
    async with session:
        with pytest.raises(RuntimeError, match="the session is open already"):
            await session.__aenter__()
        assert await session.run("calls") == 1
    await check("after the session was closed")
    with pytest.raises(RuntimeError, match="can be opened only once"):
        await session.__aenter__()


async def test_the_second_of_two_runs_at_once_is_refused_and_the_first_goes_on() -> None:
    gate = anyio.Event()

    async def step() -> dict[str, int]:
        await gate.wait()
        return {"x": 1}

    async def nested(step_context: StepContext) -> None:
        await session.run("x")

    async with MonitoredSession([], FunctionSessionCreator(step)) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, "x")
            await settle()
            with pytest.raises(RuntimeError, match="another run of this session is under way"):
                await session.run("x")
            with pytest.raises(RuntimeError, match="a run is under way"):
                await session.close()
            gate.set()
        assert await session.run("x") == 1
        with pytest.raises(RuntimeError, match="use step_context.run_with_hooks"):
            await session.run_step_fn(nested)


class Asks(SessionRunHook):
    def __init__(self, returned: Any) -> None:
        self.returned = returned

    async def before_run(self, run_context: Any) -> Any:
        return self.returned


@pytest.mark.parametrize("returned", [3, "loss", ["loss"], {"fetches": "loss"}])
async def test_before_run_that_returns_something_else_is_refused(returned: Any) -> None:
    async with MonitoredSession([Asks(returned)], counting_creator()) as session:
        with pytest.raises(TypeError, match="Asks.before_run returned .* expected SessionRunArgs"):
            await session.run("calls")


async def test_feeds_that_clash_are_refused() -> None:
    creator = FunctionSessionCreator(lambda x=0, y=0: {"sum": x + y})
    two, three = (Asks(SessionRunArgs(None, {"y": y})) for y in (2, 3))
    feed_dict = {"x": 1}
    async with MonitoredSession([two], creator) as session:
        assert await session.run("sum", feed_dict) == 3
        with pytest.raises(RuntimeError, match=r"Same tensor is fed by a SessionRunHook and user"):
            await session.run("sum", {"y": 1})
    assert feed_dict == {"x": 1}
    async with MonitoredSession([two, three], creator) as session:
        with pytest.raises(RuntimeError, match=r"Same tensor is fed by two hooks.*: y"):
            await session.run("sum")


async def test_a_waiter_whose_step_can_never_come_gets_an_error() -> None:
    creator = SharedSessionCreator(counting_creator(), num_workers=1)
    with pytest.raises(StepUnreachableError, match="global_step 5 can no longer come"):
        async with MonitoredSession([GlobalStepWaiterHook(5)], creator) as session:
            await session.run("calls")


async def step_fn(step_context: StepContext) -> Any:
    return await step_context.run_with_hooks("calls")


class HasStep:
    async def method(self, step_context: StepContext) -> Any:
        return await step_context.run_with_hooks("calls")

    __call__ = method


async def with_more(number: int, step_context: StepContext, flag: bool = True) -> Any:
    return await step_context.run_with_hooks("calls")


async def test_a_step_fn_takes_exactly_step_context() -> None:
    good: list[Any] = [
        step_fn, HasStep().method, HasStep(), functools.partial(with_more, 3, flag=False),
        lambda step_context: step_context.run_with_hooks("calls"),
    ]  # fmt: skip
    bad: list[Any] = [
        lambda: None, lambda context: None, with_more, lambda step_context, other: None,
        lambda step_context=None, *args: None, functools.partial(with_more, 3),
    ]  # fmt: skip
    message = r"takes \[.*\]; it must take exactly `step_context` \(plus `self` for a method\)"
    async with MonitoredSession([], counting_creator()) as session:
        for each in bad:
            with pytest.raises(ValueError, match=message):
                await session.run_step_fn(each)
        with pytest.raises(ValueError, match="step_fn is 3, .*; give a function with the one para"):
            await session.run_step_fn(3)  # type: ignore[arg-type]
        assert session.global_step.value == 0
        assert [await session.run_step_fn(each) for each in good] == [1, 2, 3, 4, 5]


async def test_step_fn_s_request_stop_reaches_the_caller_and_leaves_a_block_cleanly() -> None:
    def stops(step_context: StepContext) -> None:
        step_context.request_stop()

    async with MonitoredSession([], counting_creator()) as session:
        with pytest.raises(StopTraining, match="step_fn has requested the iterations to stop"):
            await session.run_step_fn(stops)
        assert not session.should_stop()
        await session.run_step_fn(stops)
        raise AssertionError("not reached")


async def test_waits_with_odd_arguments_are_refused() -> None:
    step: Any = GlobalStep()
    for odd in (1.5, "10", None):
        with pytest.raises(TypeError, match="give the global step to wait for, an integer"):
            await step.wait_for(odd)
    with pytest.raises(ValueError, match="timeout is -1; give seconds >= 0"):
        await step.wait_for(3, timeout=-1)
    with pytest.raises(TypeError, match="value is 'a'; give an integer"):
        GlobalStep("a")  # type: ignore[arg-type]


async def test_what_is_no_function_or_no_feed_is_refused() -> None:
    batch = [np.zeros((32, 784)), np.zeros(32)]  # as a loader gives it
    called: Any = anyio.sleep(1)
    three: Any = 3
    async with MonitoredSession([], counting_creator()) as session:
        with pytest.raises(TypeError, match=r"fn is the coroutine sleep\(\.\.\.\), which has been"):
            await session.or_stop(called)
        with pytest.raises(TypeError, match="give the function, then its arguments: sleep, "):
            session.start_soon(called)
        with pytest.raises(TypeError, match="feed_dict is 3; give a mapping"):
            await session.run("calls", three)
        with pytest.raises(TypeError, match=r'such as \{"batch": batch\} for a step fun') as raised:
            await session.run("calls", batch)
        assert len(str(raised.value)) < 400
        with pytest.raises(TypeError, match="fn is 3; give an async function"):
            await session.or_stop(three)
    with pytest.raises(TypeError, match="fn is 3; give an async function"):
        Coordinator().start_soon(three)
