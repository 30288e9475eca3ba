"""One run from before_run to after_run: what hooks see and get; runs that fail or begin again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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

NUM_RUNS = 6
BACKENDS = ["function", "async function", "function sometimes async", "scripted"]


def outputs_of(run: int) -> dict[str, Any]:
    return {"a": run, "b": [run], "c": f"run {run}"}


def creator_of(backend: str) -> SessionCreator:
    """Makes sessions whose n-th run, counted from 1, gives `outputs_of(n)`."""
    if backend == "scripted":
        return ScriptedSessionCreator([ScriptedSession(map(outputs_of, range(1, 50)))])
    count = 0

    def step(feed: object = None) -> Any:
        nonlocal count
        count += 1
        if backend == "function sometimes async" and count % 2:
            return later(count)
        return outputs_of(count)

    async def later(run: int) -> dict[str, Any]:
        return outputs_of(run)

    async def async_step(feed: object = None) -> Any:
        return step()

    return FunctionSessionCreator(async_step if backend == "async function" else step)


def picked(fetches: Any, run: int) -> Any:
    """What these fetches give in that run."""
    if isinstance(fetches, str):
        return outputs_of(run)[fetches]
    if isinstance(fetches, dict):
        return {key: picked(each, run) for key, each in fetches.items()}
    return type(fetches)(picked(each, run) for each in fetches)


class Seen(NamedTuple):
    """What a hook saw at one moment."""

    original_args: SessionRunArgs
    session: Any
    step: int
    stop_requested: bool


class Asks:
    """Asks in each run for what the plan says, and writes down what it sees and gets."""

    def __init__(self, plan: list[Any]) -> None:
        self.plan = plan
        self.contexts: list[SessionRunContext] = []
        self.seen: list[Seen] = []
        self.values: list[SessionRunValues] = []

    def look(self, context: SessionRunContext) -> None:
        self.contexts.append(context)
        step = context.global_step.value
        self.seen.append(Seen(context.original_args, context.session, step, context.stop_requested))

    def ask(self, context: SessionRunContext) -> SessionRunArgs | None:
        self.look(context)
        fetches = self.plan[len(self.values)]
        return None if fetches is None else SessionRunArgs(fetches)

    def take(self, context: SessionRunContext, values: SessionRunValues) -> None:
        self.look(context)
        self.values.append(values)


class AsyncHook(Asks, SessionRunHook):
    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        return self.ask(run_context)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.take(run_context, run_values)


class PlainHook(Asks, SessionRunHook):
    def before_run(self, run_context: SessionRunContext) -> Any:
        return self.ask(run_context)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> Any:
        self.take(run_context, run_values)


class MixedHook(AsyncHook):
    def before_run(self, run_context: SessionRunContext) -> Any:
        return self.ask(run_context)


class AwaitableHook(PlainHook):
    """Plain methods that return what is to be awaited."""

    def before_run(self, run_context: SessionRunContext) -> Any:
        async def later() -> Any:
            return self.ask(run_context)

        return later()

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> Any:
        async def later() -> None:
            self.take(run_context, run_values)

        return later()


KINDS: list[type[Any]] = [AsyncHook, PlainHook, MixedHook, AwaitableHook]
FETCHES = [None, "a", "b", ["a"], ["b", "c"], ("c", "a"), {"x": "a", "y": ["b"]}, []]


def one_for_each_run(asked: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(asked, min_size=NUM_RUNS, max_size=NUM_RUNS)


@given(
    backend=st.sampled_from(BACKENDS),
    step_runner=st.sampled_from(["auto", "inline", "thread"]),
    asking=st.lists(
        st.tuples(st.sampled_from(KINDS), one_for_each_run(st.sampled_from(FETCHES))), max_size=4
    ),
    callers=one_for_each_run(st.sampled_from(FETCHES[1:])),
)
async def test_every_hook_gets_what_it_asks_for_in_every_run_and_mixture(
    backend: str, step_runner: Any, asking: list[tuple[type[Any], list[Any]]], callers: list[Any]
) -> None:
    hooks = [kind(plan) for kind, plan in asking]
    async with MonitoredSession(hooks, creator_of(backend), step_runner=step_runner) as session:
        for run, fetches in enumerate(callers, 1):
            assert await session.run(fetches) == picked(fetches, run)
            assert session.global_step.value == run
        raw = session.raw_session()
    for hook in hooks:
        expected = [fetches and picked(fetches, run) for run, fetches in enumerate(hook.plan, 1)]
        assert [values.results for values in hook.values] == expected
        assert [values[1:] for values in hook.values] == [(None, None)] * NUM_RUNS
        assert hook.seen == [
            Seen(SessionRunArgs(fetches), raw, step, stop_requested=False)
            for run, fetches in enumerate(callers, 1)
            for step in (run - 1, run)
        ]
        assert hook.contexts[::2] == hook.contexts[1::2]  # the same object at both moments
        assert len(set(map(id, hook.contexts))) == NUM_RUNS
        assert [id(each) for each in hook.contexts] == [id(each) for each in hooks[0].contexts]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fetches", ["b", ["b"], ("b", "a"), {"x": "b"}])
async def test_a_request_made_of_the_same_objects_gives_fresh_results_each_time(
    backend: str, fetches: Any
) -> None:
    hooks: list[Any] = [
        AsyncHook([fetches] * 20),
        AsyncHook([None] * 20),
        PlainHook([fetches] * 20),
    ]
    async with MonitoredSession(hooks, creator_of(backend)) as session:
        for run in range(1, 21):
            assert await session.run(fetches) == picked(fetches, run)
    for hook in (hooks[0], hooks[2]):
        assert [each.results for each in hook.values] == [picked(fetches, n) for n in range(1, 21)]
    assert [each.results for each in hooks[1].values] == [None] * 20


@pytest.mark.parametrize("backend", BACKENDS)
async def test_lists_that_are_changed_between_runs_give_what_they_hold_then(backend: str) -> None:
    asked: list[str] = ["a"]
    hook = AsyncHook([asked] * 3)
    async with MonitoredSession([hook], creator_of(backend)) as session:
        assert await session.run(asked) == [1]
        asked[0] = "c"
        assert await session.run(asked) == ["run 2"]
        asked.append("b")
        assert await session.run(asked) == ["run 3", [3]]
    assert [each.results for each in hook.values] == [[1], ["run 2"], ["run 3", [3]]]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stop_asked_for_is_seen_by_later_hooks_and_ends_after_the_run(
    kind: type[Any],
) -> None:
    class Stops(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            if run_context.global_step.value == 1:
                run_context.request_stop()

    hooks = [kind([None] * 9), Stops(), kind(["a"] * 9)]
    async with MonitoredSession(hooks, creator_of("function")) as session:
        assert [await session.run("a"), session.should_stop()] == [1, False]
        assert [await session.run("a"), session.should_stop()] == [2, True]
        with pytest.raises(StopTraining, match="no run begins after a stop, by before_run of St"):
            await session.run("a")
    assert [each.stop_requested for each in hooks[0].seen] == [False] * 3 + [True]
    assert [each.stop_requested for each in hooks[2].seen] == [False] * 2 + [True] * 2
    assert [each.results for each in hooks[2].values] == [1, 2]


async def test_the_caller_s_feeds_and_the_hooks_are_merged_again_in_each_run() -> None:
    fed: list[Any] = []

    def step(**feeds: Any) -> dict[str, Any]:
        fed.append(feeds)
        return {"a": len(fed)}

    class Feeds(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
            count = len(fed)
            return SessionRunArgs(None, {"x": count}) if count % 2 else None

    callers = {"y": "caller"}
    async with MonitoredSession([Feeds()], FunctionSessionCreator(step)) as session:
        for _ in range(3):
            await session.run("a", callers)
        await session.run("a")
    assert callers == {"y": "caller"}
    assert fed == [{"y": "caller"}, {"x": 1, "y": "caller"}, {"y": "caller"}, {"x": 3}]


@pytest.mark.parametrize("step_runner", ["inline", "thread"])
async def test_every_step_runs_where_the_session_says(step_runner: Any) -> None:
    threads: list[int] = []

    def step() -> dict[str, int]:
        threads.append(threading.get_ident())
        return {"a": 1}

    beside = MonitoredSession([], creator_of("function"), step_runner="inline")
    creator = FunctionSessionCreator(step)
    async with beside, MonitoredSession([], creator, step_runner=step_runner) as session:
        for _ in range(20):
            await beside.run("a")  # has just had its turn: what follows may run at once
            await session.run("a")
    assert len(set(threads)) == 1
    assert (threads[0] == threading.get_ident()) == (step_runner == "inline")


async def test_an_async_step_holds_its_raw_session_until_it_has_ended() -> None:
    async def step() -> dict[str, int]:
        assert raw.retire() is False  # a worker that shares it gives it up, and must not close it
        raw.is_retired = False
        return {"a": 1}

    async with MonitoredSession([], FunctionSessionCreator(step)) as session:
        raw = session.raw_session()
        assert [await session.run("a") for _ in range(3)] == [1] * 3
        assert raw.retire() is True


async def test_a_hook_with_one_of_the_two_methods_is_called_at_that_one() -> None:
    log: list[Any] = []

    class OnlyBefore(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
            return SessionRunArgs("c")

    class OnlyAfter(SessionRunHook):
        async def after_run(
            self, run_context: SessionRunContext, run_values: SessionRunValues
        ) -> None:
            log.append(run_values.results)

    for hooks in ([OnlyBefore(), OnlyAfter()], [OnlyAfter()]):
        async with MonitoredSession(hooks, creator_of("scripted")) as session:
            assert [await session.run("a"), await session.run(["b"])] == [1, [[2]]]
    assert log == [None] * 4


Actions = dict[tuple[str, int], Any]
"""What is raised, called and awaited at (moment, number of the run, counted from 1)."""
RUNNERS = pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])


class ActsAt(SessionRunHook):
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


class PlainActsAt(ActsAt):
    def act(self, moment: str) -> Any:
        action = self.actions.get((moment, self.num_runs))
        if action is not None:
            raise action

    def before_run(self, run_context: SessionRunContext) -> Any:
        self.num_runs += 1
        self.act("before_run")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> Any:
        self.act("after_run")


def failing_creator(backend: str, actions: Actions) -> SessionCreator:
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


FAILING = pytest.mark.parametrize("backend", ["function", "async function", "scripted"])
ACTING = pytest.mark.parametrize("kind", [ActsAt, PlainActsAt])


@FAILING
@ACTING
@RUNNERS
@pytest.mark.parametrize("ended", [StopIteration, StopAsyncIteration])
async def test_the_end_of_an_input_ends_training_but_not_out_of_after_run(
    backend: str, kind: Any, step_runner: Any, ended: type[Exception]
) -> None:
    name = kind.__name__
    hook_actions = {("before_run", 1): ended(), ("after_run", 3): ended()}
    hooks = [RecordingHook("a"), kind(hook_actions), RecordingHook("b")]
    creator = failing_creator(backend, {("step", 1): ended()})
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


@FAILING
@ACTING
@RUNNERS
async def test_an_error_names_hook_and_moment_and_leaves_the_next_run_clean(
    backend: str, kind: Any, step_runner: Any
) -> None:
    class Second(kind):  # type: ignore[misc]
        """A later hook."""

    errors = [ValueError(str(n)) for n in range(5)]
    first = kind({("before_run", 1): errors[0], ("after_run", 4): errors[3]})
    second = Second({("after_run", 1): errors[1], ("before_run", 4): errors[4]})
    # the first run calls neither the second hook nor the step
    creator = failing_creator(backend, {("step", 2): errors[2]})
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
    hook = ActsAt({(moment, 1): ValueError("the hook's")})
    async with MonitoredSession([hook], failing_creator("function", {})) as session:
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

    hook = ActsAt({(moment, 1): run})
    async with MonitoredSession([hook], failing_creator("function", {})) as session:
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
    creator = failing_creator(
        "function", {("step", 1): ValueError("1"), ("step", 2): ValueError("2")}
    )
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

    hook = ActsAt({(place, 1): wait_for_ever})
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


@ACTING
@pytest.mark.parametrize("moment", ["before_run", "step", "after_run"])
async def test_a_lost_session_runs_its_hooks_again(moment: str, kind: Any) -> None:
    actions: Actions = {(moment, 2): PreemptionError("lost"), (moment, 3): PreemptionError("again")}
    script = [{"x": 1}] + [actions.get(("step", run), {"x": run}) for run in (2, 3, 4, 5)]
    sessions = [ScriptedSession(script[:2]), ScriptedSession(script[2:3]), ScriptedSession()]
    sessions[2] = ScriptedSession(script[3:])
    hook, log = kind(actions), RecordingHook("a")
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


@pytest.mark.parametrize("in_creation", [False, True])
async def test_attempts_are_bounded_and_counted_from_zero_after_a_run_that_worked(
    in_creation: bool,
) -> None:
    """Every second attempt is lost in its run, or in the creation of its raw session."""

    def loses(number: int) -> Any:
        error = PreemptionError(f"lost {number}")
        return error if in_creation else ScriptedSession([error])

    works_once = ScriptedSession([{"x": 1}, PreemptionError("lost 2")])
    first, last = (ScriptedSession([PreemptionError(f"lost {n}")]) for n in (0, 4))
    creator = ScriptedSessionCreator([first, loses(1), works_once, loses(3), last])
    hook = ActsAt({})
    recovery = Recovery(max_attempts=2, first_pause_secs=0)
    async with MonitoredSession([hook], creator, recovery=recovery) as session:
        assert (await session.run("x"), hook.num_runs) == (1, 2 if in_creation else 3)
        with pytest.raises(PreemptionError, match="lost 4") as raised:
            await session.run("x")
        assert "given up after 2 attempts" in raised.value.__notes__[-1]
        assert (hook.num_runs, session.should_stop()) == (4 if in_creation else 6, True)
        assert session.global_step.statistics().tickets == 0
    assert last.is_closed


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
