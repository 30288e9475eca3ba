"""One run from before_run to after_run: what hooks see and get, whatever they are and ask for."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    SessionCreator,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopTraining,
)
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

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


async def test_the_caller_s_feeds_and_the_hooks_are_merged_in_each_run_anew() -> None:
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
async def test_every_step_runs_where_the_session_was_told_to(step_runner: Any) -> None:
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
