"""One run from before_run to after_run: what hooks see and get; runs that fail or begin again."""

import copy
from contextlib import nullcontext
from itertools import cycle
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import (
    FetchError,
    FunctionSessionCreator,
    MonitoredSession,
    Recovery,
    SessionCreator,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.faults import covering
from ..support.helpers import cancelled_when_settled
from ..support.moments import HeldStep, at, losing, lost, moments_of

NUM_RUNS = 6
BACKENDS = ["function", "async function", "function sometimes async", "scripted"]
RUNNERS: list[Any] = ["auto", "inline", "thread"]


def outputs_of(run: int) -> dict[str, Any]:
    return {"a": run, "b": [run], "c": f"run {run}"}


def creator_of(backend: str, errors: dict[int, Exception] | None = None) -> SessionCreator:
    """Makes sessions whose n-th run, counted from 1, gives `outputs_of(n)`, or raises an error."""
    given = [(errors or {}).get(run, outputs_of(run)) for run in range(1, 50)]
    if backend == "scripted":
        return ScriptedSessionCreator([ScriptedSession(given)])
    is_async = cycle([True, False])

    def step() -> Any:
        output = given.pop(0)
        if isinstance(output, Exception):
            raise output
        return output

    async def async_step() -> Any:
        return step()

    steps: dict[str, Any] = {
        "function": step,
        "async function": async_step,
        "function sometimes async": lambda: async_step() if next(is_async) else step(),
    }
    return FunctionSessionCreator(steps[backend])


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


def in_coroutine(fn: Any) -> Any:
    async def method(hook: Any, *given: Any) -> Any:
        return fn(hook, *given)

    return method


def later(fn: Any) -> Any:
    """A plain method that returns what is to be awaited."""
    return lambda hook, *given: in_coroutine(fn)(hook, *given)


def kind_of(before: Any, after: Any) -> type[Any]:
    return type("Hook", (Asks, SessionRunHook), {"before_run": before, "after_run": after})


AsyncHook = kind_of(in_coroutine(Asks.ask), in_coroutine(Asks.take))
KINDS: list[type[Any]] = [
    AsyncHook, kind_of(Asks.ask, Asks.take), kind_of(Asks.ask, in_coroutine(Asks.take)),
    kind_of(later(Asks.ask), Asks.take),
]  # fmt: skip
FETCHES = [None, "a", "b", ["a"], ["b", "c"], ("c", "a"), {"x": "a", "y": ["b"]}, []]


def one_for_each_run(asked: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(asked, min_size=NUM_RUNS, max_size=NUM_RUNS)


@settings(max_examples=60)
@given(
    backend=st.sampled_from(BACKENDS),
    step_runner=st.sampled_from(RUNNERS),
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


FEEDS = st.none() | st.dictionaries(st.sampled_from("uvwxyz"), st.integers(), max_size=2)


@settings(max_examples=60)
@given(feeds=FEEDS, asked=st.lists(st.tuples(st.sampled_from(FETCHES), FEEDS), max_size=4))
async def test_feeds_of_all_meet_in_the_run_or_clash_and_no_argument_is_changed(
    feeds: Any, asked: list[Any]
) -> None:
    before, seen = copy.deepcopy((feeds, asked)), dict[str, int]()
    all_feeds = [fed or {} for fed in (feeds, *(fed for _, fed in asked))]
    merged = {name: value for fed in all_feeds for name, value in fed.items()}
    is_clash = sum(map(len, all_feeds)) > len(merged)

    def step(**fed: int) -> dict[str, Any]:
        seen.update(fed)
        return outputs_of(1)

    hooks = [at(before_run=lambda _, args=args: SessionRunArgs(*args)) for args in asked]
    async with MonitoredSession(hooks, step) as session:
        with pytest.raises(RuntimeError, match="Same tensor is fed") if is_clash else nullcontext():
            await session.run([], feeds)
    assert seen == ({} if is_clash else merged)
    assert (feeds, asked) == before


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


Actions = dict[tuple[str, int], Any]
"""What is raised, or called, at (moment, number of the run, counted from 1)."""


class PlainActsAt(SessionRunHook):
    """Does at its moments what was said; each run begins with its before_run."""

    def __init__(self, actions: Actions) -> None:
        self.actions = actions
        self.num_runs = 0

    def act(self, moment: str) -> Any:
        action = self.actions.get((moment, self.num_runs))
        if isinstance(action, BaseException):
            raise action
        return None if action is None else action()

    def before_run(self, run_context: SessionRunContext) -> Any:
        self.num_runs += 1
        return self.act("before_run")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> Any:
        return self.act("after_run")


class ActsAt(PlainActsAt):
    async def before_run(self, run_context: SessionRunContext) -> Any:
        result = super().before_run(run_context)
        return result and await result

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> Any:
        result = super().after_run(run_context, run_values)
        return result and await result


@pytest.mark.parametrize(
    ("backend", "kind", "step_runner"),
    covering(["function", "async function", "scripted"], [ActsAt, PlainActsAt], RUNNERS),
)
async def test_an_end_of_input_and_an_error_name_their_place_and_leave_the_next_run_clean(
    backend: str, kind: Any, step_runner: Any
) -> None:
    """An input ends training, but not out of after_run; no ticket is left."""
    name, errors = kind.__name__, [ValueError(str(n)) for n in range(3)]
    actions = {
        ("before_run", 1): StopIteration(), ("after_run", 3): StopAsyncIteration(),
        ("before_run", 4): errors[0], ("after_run", 6): errors[2],
    }  # fmt: skip
    hooks = [RecordingHook("a"), kind(actions), RecordingHook("b")]
    creator = creator_of(backend, {1: StopAsyncIteration(), 3: errors[1]})
    expected: list[tuple[type[Exception], str, str | None]] = [
        (StopTraining, f"ended in before_run of {name}$", None),
        (StopTraining, "the input ended in the step", None),
        (RuntimeError, f"after_run of {name} raised StopAsyncIteration", None),
        (ValueError, "0", f"in before_run of {name}"),
        (ValueError, "1", None),
        (ValueError, "2", f"in after_run of {name}"),
    ]
    async with MonitoredSession(hooks, creator, step_runner=step_runner) as session:
        for error, match, note in expected:
            with pytest.raises(error, match=match) as raised:
                await session.run("a")
            if error is ValueError:
                assert raised.value in errors
                assert getattr(raised.value, "__notes__", []) == ([note] if note else [])
            assert session.global_step.statistics().tickets == 0
        assert not session.should_stop()
        assert await session.run("a") == 5
        with pytest.raises(TypeError, match="feed_dict is 3; give a mapping") as raised:
            await session.run("a", feed_dict=3)
        assert getattr(raised.value, "__notes__", []) == [], "that is no fault of a hook"
        assert session.global_step.value == 3
    assert [moments_of(hook).count("before_run") for hook in (hooks[0], hooks[2])] == [7, 5]
    assert [moments_of(hook).count("after_run") for hook in (hooks[0], hooks[2])] == [3, 1]
    assert hooks[0].log[-1] == ("a", "end")


@pytest.mark.parametrize(
    "place", ["before_run", "after_run", "an async step", "a ticket", "a thread"]
)
async def test_a_cancelled_run_leaves_no_ticket_and_the_next_one_runs(place: str) -> None:
    held, calls = HeldStep(lambda: {"x": 1}), list[int]()

    def step() -> Any:
        calls.append(1)
        if len(calls) == 1 and place == "an async step":
            return anyio.sleep_forever()
        return held() if place == "a thread" else {"x": 1}

    hook, contexts = ActsAt({(place, 1): anyio.sleep_forever}), list[SessionRunContext]()
    hooks = [at(before_run=contexts.append), hook]
    runner: Any = "thread" if place == "a thread" else "inline"
    async with MonitoredSession(hooks, step, step_runner=runner) as session:
        if place == "a ticket":
            release = await session.global_step.take_exclusive()
        if place == "a thread":
            await held.cancel_in(session.run, "x")
        else:
            assert await cancelled_when_settled(session.run, "x")
        if place == "a ticket":
            release()
        statistics = session.global_step.statistics()
        assert (statistics.tickets, statistics.tasks_waiting_for_ticket) == (0, 0)
        assert statistics.value == (place in ("after_run", "a thread"))
        assert contexts[0].step_is_made == (statistics.value == 1)
        assert await session.run("x") == 1
        assert session.global_step.value == statistics.value + 1


async def test_attempts_are_bounded_and_counted_from_zero_after_a_run_that_worked() -> None:
    """Attempts are lost in their runs, and in the creation of a raw session."""
    works_once = ScriptedSession([{"x": 1}, lost()])
    last, fresh = ScriptedSession([lost("the last")]), ScriptedSession([{"x": 2}])
    creator = ScriptedSessionCreator([*losing()[:1], lost(), works_once, lost(), last, fresh])
    recovery = Recovery(max_attempts=2, first_pause_secs=0)
    async with MonitoredSession([], creator, recovery=recovery) as session:
        assert await session.run("x") == 1
        with pytest.raises(type(lost()), match="the last") as raised:
            await session.run("x")
        assert "given up after 2 attempts" in raised.value.__notes__[-1]
        assert session.should_stop()
        assert session.global_step.statistics().tickets == 0
        assert (await session.run("x"), session.should_stop()) == (2, False)
    assert last.is_closed


async def test_a_fetch_that_is_no_name_does_not_hide_which_one_is_missing() -> None:
    arrays = np.zeros(2)  # comparing that one gives an array
    hooks = [at(before_run=lambda _, each=each: SessionRunArgs([each])) for each in ("no", arrays)]
    async with MonitoredSession(hooks, lambda: {"loss": 1.0}) as session:
        with pytest.raises(FetchError, match="'no' is not among") as caught:
            await session.run("loss")
    assert caught.value.__notes__ == ["fetched in before_run of At"]


async def test_a_method_that_a_class_gets_between_two_sessions_is_called() -> None:
    """As by a notebook that loads its module again."""
    calls: list[int] = []

    class Hook(SessionRunHook):
        pass

    async def after_run(self: Any, run_context: Any, run_values: Any) -> None:
        calls.append(run_context.step)

    for _ in range(2):
        async with MonitoredSession([Hook()], dict) as session:
            await session.run([])
        Hook.after_run = after_run  # type: ignore[method-assign]
    assert calls == [1]
