"""Runs that fail, are cancelled or begin again: what is said, what is left, what goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    FetchError,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionCreator,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepContext,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.helpers import settle

pytestmark = pytest.mark.anyio

Actions = dict[tuple[str, int], Any]
"""What is raised, called and awaited at (moment, number of the run, counted from 1)."""
RUNNERS = pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])


class Fails(SessionRunHook):
    """Does at its moments what was said; each run begins with its before_run."""

    def __init__(self, actions: Actions) -> None:
        self.actions = actions
        self.num_runs = 0

    async def act(self, moment: str) -> None:
        action = self.actions.get((moment, self.num_runs))
        if isinstance(action, BaseException):
            raise action
        if action is not None:
            await action()

    async def before_run(self, run_context: SessionRunContext) -> None:
        self.num_runs += 1
        await self.act("before_run")

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await self.act("after_run")


class PlainFails(Fails):
    def act(self, moment: str) -> Any:
        action = self.actions.get((moment, self.num_runs))
        if action is not None:
            raise action

    def before_run(self, run_context: SessionRunContext) -> Any:
        self.num_runs += 1
        self.act("before_run")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> Any:
        self.act("after_run")


def creator_of(backend: str, actions: Actions) -> SessionCreator:
    """Makes sessions whose n-th run raises what the actions say."""
    errors = [actions.get(("step", run)) for run in range(1, 9)]
    if backend == "scripted":
        return ScriptedSessionCreator([ScriptedSession(each or {"x": 1} for each in errors)])

    def step() -> dict[str, int]:
        error = errors.pop(0)
        if error is not None:
            raise error
        return {"x": 1}

    async def async_step() -> dict[str, int]:
        return step()

    return FunctionSessionCreator(step if backend == "function" else async_step)


BACKENDS = pytest.mark.parametrize("backend", ["function", "async function", "scripted"])
KINDS = pytest.mark.parametrize("kind", [Fails, PlainFails])


@BACKENDS
@KINDS
@RUNNERS
@pytest.mark.parametrize("ended", [StopIteration, StopAsyncIteration])
async def test_the_end_of_an_input_ends_training_but_not_out_of_after_run(
    backend: str, kind: Any, step_runner: Any, ended: type[Exception]
) -> None:
    name = kind.__name__
    hook_actions = {("before_run", 1): ended(), ("after_run", 3): ended()}
    hooks = [RecordingHook("a"), kind(hook_actions), RecordingHook("b")]
    creator = creator_of(backend, {("step", 1): ended()})
    async with MonitoredSession(hooks, creator, step_runner=step_runner) as session:
        with pytest.raises(StopTraining, match=f"ended in before_run of {name}$"):
            await session.run("x")
        with pytest.raises(StopTraining, match="the input ended in the step"):
            await session.run("x")
        with pytest.raises(RuntimeError, match=f"after_run of {name} raised {ended.__name__}"):
            await session.run("x")
        assert not session.should_stop()
        assert session.global_step.statistics().tickets == 0
        assert await session.run("x") == 1
    assert hooks[0].log.count(("a", "after_run")) == 2
    assert hooks[2].log.count(("b", "after_run")) == 1


@BACKENDS
@KINDS
@RUNNERS
async def test_an_error_names_hook_and_moment_and_leaves_the_next_run_clean(
    backend: str, kind: Any, step_runner: Any
) -> None:
    class Second(kind):  # type: ignore[misc]
        """A later hook."""

    errors = [ValueError(str(n)) for n in range(5)]
    first = kind({("before_run", 1): errors[0], ("after_run", 4): errors[3]})
    second = Second({("after_run", 1): errors[1], ("before_run", 4): errors[4]})
    # neither it nor the step hears of the first run
    creator = creator_of(backend, {("step", 2): errors[2]})
    expected = [
        f"in before_run of {kind.__name__}",
        "in after_run of Second",
        None,  # the step's own
        f"in after_run of {kind.__name__}",
        "in before_run of Second",
    ]
    hooks = [RecordingHook("a"), first, second]
    async with MonitoredSession(hooks, creator, step_runner=step_runner) as session:
        for error, note in zip(errors, expected, strict=True):
            with pytest.raises(ValueError, match=f"^{error}") as raised:
                await session.run("x")
            assert raised.value is error
            assert getattr(error, "__notes__", []) == ([] if note is None else [note])
            assert session.global_step.statistics().tickets == 0
        assert await session.run("x") == 1
        assert session.global_step.value == 3
        assert not session.should_stop()
    assert hooks[0].log[-1] == ("a", "end")


@pytest.mark.parametrize("moment", ["before_run", "after_run"])
async def test_what_the_caller_got_wrong_is_not_blamed_on_the_hook_that_failed_last(
    moment: str,
) -> None:
    hook = Fails({(moment, 1): ValueError("the hook's")})
    async with MonitoredSession([hook], creator_of("function", {})) as session:
        with pytest.raises(ValueError, match="the hook's"):
            await session.run("x")
        with pytest.raises(TypeError, match="feed_dict is 3; give a mapping") as raised:
            await session.run("x", feed_dict=3)
        assert getattr(raised.value, "__notes__", []) == []


@pytest.mark.parametrize("moment", ["before_run", "after_run"])
async def test_a_run_within_a_hook_is_refused_and_the_outer_run_goes_on(moment: str) -> None:
    async def run() -> None:
        with pytest.raises(RuntimeError, match=r"run\(\) while another run of this session"):
            await session.run("x")

    hook = Fails({(moment, 1): run})
    async with MonitoredSession([hook], creator_of("function", {})) as session:
        assert [await session.run("x"), await session.run("x")] == [1, 1]
        assert session.global_step.value == hook.num_runs == 2


async def test_a_run_within_a_step_or_beside_it_is_refused_and_the_step_goes_on() -> None:
    goes_on = anyio.Event()
    refused: list[int] = []

    async def run() -> None:
        with pytest.raises(RuntimeError, match=r"run\(\) while another run of this session"):
            await session.run("x")
        refused.append(1)

    async def step() -> dict[str, int]:
        await run()
        await goes_on.wait()
        return {"x": 1}

    async with MonitoredSession([], FunctionSessionCreator(step)) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, "x")
            await settle()
            await run()
            goes_on.set()
        assert (refused, session.global_step.value) == ([1, 1], 1)


@RUNNERS
async def test_run_with_hooks_works_after_a_run_that_failed(step_runner: Any) -> None:
    creator = creator_of("function", {("step", 1): ValueError("1"), ("step", 2): ValueError("2")})
    hook = RecordingHook("a")

    async def step_fn(step_context: StepContext) -> Any:
        with pytest.raises(ValueError, match="2"):
            await step_context.run_with_hooks("x")
        return await step_context.run_with_hooks("x")

    async with MonitoredSession([hook], creator, step_runner=step_runner) as session:
        with pytest.raises(ValueError, match="1"):
            await session.run("x")
        assert await session.run_step_fn(step_fn) == 1
        assert await session.run("x") == 1
        assert (session.global_step.value, session.global_step.statistics().tickets) == (2, 0)
    assert [hook.log.count(("a", each)) for each in ("before_run", "after_run")] == [4, 2]


async def wait_for_ever() -> None:
    await anyio.Event().wait()


@pytest.mark.parametrize(
    "place", ["before_run", "after_run", "an async step", "a ticket", "a thread"]
)
async def test_a_cancelled_run_leaves_no_ticket_and_the_next_one_runs(place: str) -> None:
    begun, released = threading.Event(), threading.Event()
    calls: list[int] = []

    def step() -> Any:
        calls.append(1)
        if len(calls) == 1 and place == "an async step":
            return wait_for_ever()
        if len(calls) == 1 and place == "a thread":
            begun.set()
            released.wait()
        return {"x": 1}

    hook = Fails({(place, 1): wait_for_ever})
    runner: Any = "thread" if place == "a thread" else "inline"
    async with MonitoredSession(
        [hook], FunctionSessionCreator(step), step_runner=runner
    ) as session:
        release: Callable[[], object] = lambda: None  # noqa: E731
        if place == "a ticket":
            release = await session.global_step.take_exclusive()
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, "x")
            await settle()
            if place == "a thread":
                begun.wait()
                threading.Thread(target=released.set).start()
            group.cancel_scope.cancel()
        release()
        assert session.global_step.statistics().tickets == 0
        assert session.global_step.statistics().tasks_waiting_for_ticket == 0
        counted = session.global_step.value
        assert counted == (place in ("after_run", "a thread"))
        assert await session.run("x") == 1
        assert session.global_step.value == counted + 1
    with pytest.raises(RuntimeError, match="closed"):
        await session.run("x")


@pytest.mark.parametrize("moment", ["before_run", "step", "after_run"])
async def test_a_lost_session_runs_its_hooks_again(moment: str) -> None:
    actions: Actions = {(moment, 2): PreemptionError("lost"), (moment, 3): PreemptionError("again")}
    script = [{"x": 1}] + [actions.get(("step", run), {"x": run}) for run in (2, 3, 4, 5)]
    sessions = [ScriptedSession(script[:2]), ScriptedSession(script[2:3]), ScriptedSession()]
    sessions[2] = ScriptedSession(script[3:])
    hook, log = Fails(actions), RecordingHook("a")
    recovery = Recovery(max_attempts=2, first_pause_secs=0)
    async with MonitoredSession(
        [log, hook], ScriptedSessionCreator(sessions), recovery=recovery
    ) as session:
        assert [await session.run("x") for _ in range(3)] == [1, 4, 5]
        assert hook.num_runs == 5
        assert session.raw_session() is sessions[2]
        assert session.global_step.statistics().tickets == 0
    assert log.log.count(("a", "before_run")) == 5
    assert log.log.count(("a", "after_run")) == (5 if moment == "after_run" else 3)
    assert [each.is_closed for each in sessions] == [True] * 3


async def test_attempts_are_bounded_and_counted_anew_after_a_run_that_worked() -> None:
    lost = [PreemptionError(f"lost {n}") for n in range(5)]
    scripts: list[list[Any]] = [
        [lost[0]], [lost[1]], [{"x": 1}, lost[2]], [lost[3]], [lost[4]],
    ]  # fmt: skip
    hook, creator = Fails({}), ScriptedSessionCreator(map(ScriptedSession, scripts))
    recovery = Recovery(max_attempts=2, first_pause_secs=0)
    async with MonitoredSession([hook], creator, recovery=recovery) as session:
        assert (await session.run("x"), hook.num_runs) == (1, 3)
        with pytest.raises(PreemptionError, match="lost 4") as raised:
            await session.run("x")
        assert "given up after 2 attempts" in raised.value.__notes__[-1]
        assert (hook.num_runs, session.should_stop()) == (6, True)
        assert session.global_step.statistics().tickets == 0


async def test_a_fetch_that_is_no_name_does_not_hide_which_one_is_missing() -> None:
    class Asks(SessionRunHook):
        def __init__(self, fetches: Any) -> None:
            self._args = SessionRunArgs(fetches)

        async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
            return self._args

    creator = FunctionSessionCreator(lambda: {"loss": 1.0})
    hooks = [Asks(["missing"]), Asks([np.zeros(2)])]  # comparing that one gives an array
    async with MonitoredSession(hooks, creator) as session:
        with pytest.raises(FetchError, match="'missing' is not among") as caught:
            await session.run("loss")
    assert caught.value.__notes__ == ["fetched in before_run of Asks"]
