"""Misuse: each a typed error that says what was got, what was expected and what to do."""

import re
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
    StepContext,
    StopTraining,
)

from .support.helpers import counting_creator, hook_of, settle


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
def test_each_misspelt_method_is_warned_of_once_with_the_name_meant(meant: str) -> None:
    hook = hook_with(*MISSPELT[meant].split())
    with pytest.warns(UserWarning, match="has a method") as warned:
        MonitoredSession([hook, type(hook)()], counting_creator())
    assert {each.filename for each in warned} == {__file__}
    said = "\n".join(str(each.message) for each in warned)
    found = re.findall(rf"^Mine has a method '(\w+)', .* if '{meant}' is meant", said, re.M)
    assert found == sorted(MISSPELT[meant].split())


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


step: Any = counting_creator()
new_session: Any = MonitoredSession


def starting_at(initial_step: Any) -> None:
    FunctionSessionCreator(dict, initial_step=initial_step)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (MonitoredSession, [[3], step], r"hooks\[0\] is 3 of type int; expected an instance"),
        (MonitoredSession, [[SessionRunHook], step], "is the class SessionRunHook; give an insta"),
        (MonitoredSession, [SessionRunHook(), step], "give a list of hooks"),
        (MonitoredSession, [3, step], "give an iterable of SessionRunHook"),
        (MonitoredSession, [step, step], "Hooks come first here"),
        (MonitoredSession, [[], 3], "give an asynchooks.SessionCreator"),
        (MonitoredSession, [[], FunctionSessionCreator], "that is the class; give an"),
        (MonitoredSession, [[], step, "thread"], "are given by keyword"),
        (MonitoredSession, [[], step, -1], "is -1; give seconds >= 0"),
        (MonitoredSession, [[], step, float("nan")], "is nan; give seconds >= 0"),
        (partial(new_session, recovery=3), [[], step], "recovery is 3; give a Recovery"),
        (partial(new_session, step_runner="fast"), [[], step], "give one of auto, inline, thread"),
        (SharedSessionCreator, [SharedSessionCreator(step)], "give it what the workers are to sh"),
        (SharedSessionCreator, [step, 0], "num_workers is 0"),
        (starting_at, [-1], "initial_step is -1; give an integer >= 0"),
        (starting_at, ["5"], "initial_step is '5'; give an integer >= 0"),
        (starting_at, [1.5], "initial_step is 1.5; give an integer >= 0"),
        (MonitoredSession([], step).request_stop, [3], "give a text, an exception, or nothing"),
        (GlobalStep, ["a"], "value is 'a'; give an integer"),
        (Coordinator().start_soon, [3], "fn is 3; give an async function"),
    ],
)
def test_bad_arguments_are_refused(make: Any, arguments: list[Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(*arguments)


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

    async with MonitoredSession([], step) as session:
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


@pytest.mark.parametrize("returned", [3, "loss", ["loss"], {"fetches": "loss"}])
async def test_before_run_that_returns_something_else_is_refused(returned: Any) -> None:
    asks = hook_of("Asks", {"before_run": lambda run_context: returned})
    async with MonitoredSession([asks], counting_creator()) as session:
        with pytest.raises(TypeError, match="Asks.before_run returned .* expected SessionRunArgs"):
            await session.run("calls")


async def step_fn(step_context: StepContext) -> Any:
    return await step_context.run_with_hooks("calls")


class HasStep:
    def __call__(self, step_context: StepContext) -> Any:
        return step_fn(step_context)


async def with_more(number: int, step_context: StepContext, flag: bool = True) -> Any:
    return await step_fn(step_context)


async def test_a_step_fn_takes_exactly_step_context() -> None:
    good: list[Any] = [
        step_fn, HasStep().__call__, HasStep(), partial(with_more, 3, flag=False),
        lambda step_context: step_fn(step_context),
    ]  # fmt: skip
    bad: list[Any] = [
        lambda: None, lambda context: None, with_more, lambda step_context, other: None,
        lambda step_context=None, *args: None, partial(with_more, 3),
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


async def test_a_wait_for_what_is_no_step_is_refused() -> None:
    for odd in (1.5, "10", None):
        with pytest.raises(TypeError, match="give the global step to wait for, an integer"):
            await GlobalStep().wait_for(odd)  # type: ignore[arg-type]


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
