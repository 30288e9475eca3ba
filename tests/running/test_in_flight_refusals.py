"""Steps in flight: what is refused, and what fits."""

from __future__ import annotations

from typing import Any

import pytest

from asynchooks import (
    FeedFnHook,
    FunctionSessionCreator,
    LoggingTensorHook,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
    StepFunctionError,
)
from asynchooks.simulation import Simulation

from ..simulation.engines import simulated
from .service import Service, assert_nothing_left


@pytest.mark.parametrize("in_flight", [0, -1, 1.5, True, "2", None])
def test_in_flight_is_a_positive_integer(in_flight: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="in_flight"):
        FunctionSessionCreator(dict, in_flight=in_flight)


def test_a_creator_shows_how_many_steps_it_has_in_flight() -> None:
    async def step() -> Any: ...

    assert repr(FunctionSessionCreator(step, in_flight=2)).endswith("step, in_flight=2)")
    assert SharedSessionCreator(FunctionSessionCreator(step, in_flight=2)).in_flight == 2
    assert FunctionSessionCreator(step).in_flight == 1


async def one_phase() -> dict[str, Any]:
    return {"loss": 0.5}


def sync_phase() -> dict[str, Any]:
    return {"loss": 0.5}


def sync_submission() -> Any:
    return one_phase()


async def counting() -> Any:
    async def outputs() -> Any:
        return {"loss": 0.5, "global_step": 7}

    return outputs()


async def no_mapping() -> Any:
    async def outputs() -> Any:
        return 0.5

    return outputs()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (one_phase, "returns an awaitable of its outputs"),
        (sync_phase, "returns an awaitable of its outputs"),
        (sync_submission, "sync_submission is not async, and returned an awaitable of {'loss': 0"),
        (sync_submission, r"Define it with async def, so that"),
        (counting, "leave that output out, or in_flight"),
        (no_mapping, "expected a mapping of named outputs"),
    ],
)
async def test_a_step_function_that_does_not_fit_says_so(step: Any, message: str) -> None:
    session = MonitoredSession([], FunctionSessionCreator(step, in_flight=2))
    with pytest.raises(StepFunctionError, match=message):
        async with session:
            await session.run("loss")
    assert_nothing_left(session.global_step)


@simulated
async def test_a_function_of_two_phases_runs_with_one_step_in_flight(
    simulation: Simulation,
) -> None:
    service = Service(simulation)
    async with MonitoredSession([], FunctionSessionCreator(service.step)) as session:
        async for item in session.batches(range(2)):
            assert await session.run("items", {"items": item}) == item
    assert service.updates == [0, 1]


@simulated
async def test_a_function_around_an_async_step_function_submits_as_that(
    simulation: Simulation,
) -> None:
    service = Service(simulation)
    creator = FunctionSessionCreator(lambda items=0: service.step(items), in_flight=2)
    async with MonitoredSession([], creator) as session:
        assert await session.run("items") == 0
        assert service.num_requests == 2


@pytest.mark.anyio
async def test_what_a_session_does_not_do_with_steps_in_flight_is_refused() -> None:
    async def step(items: int = 0) -> Any:
        return one_phase()

    async def step_fn(step_context: Any) -> None: ...

    async with MonitoredSession([], FunctionSessionCreator(step, in_flight=2)) as session:
        with pytest.raises(ValueError, match=r"Have a hook feed each step: FeedHook\("):
            await session.run("loss", {"items": 1})
        with pytest.raises(ValueError, match="leave them out"):
            await session.run("loss", options=object())
        with pytest.raises(RuntimeError, match=r"run_step_fn\(\) in a session with several steps"):
            await session.run_step_fn(step_fn)
        with pytest.raises(RuntimeError, match=r"feed the steps by a hook, FeedHook\("):
            session.batches(range(3))
        async with session.global_step.exclusive():
            with pytest.raises(RuntimeError, match="it would wait for itself"):
                await session.run("loss")
        assert await session.run("loss", {}) == 0.5


@pytest.mark.anyio
async def test_a_step_that_asks_for_exclusive_access_is_refused() -> None:
    async def step() -> Any:
        async def outputs() -> Any:
            async with session.global_step.exclusive():
                return {}

        return outputs()

    session = MonitoredSession([], FunctionSessionCreator(step, in_flight=2))
    with pytest.raises(RuntimeError, match="this task is in a step"):
        async with session:
            await session.run([])
    assert_nothing_left(session.global_step)


class Both(SessionRunHook):
    async def before_run(self, run_context: Any) -> None: ...

    async def after_run(self, run_context: Any, run_values: Any) -> None: ...


class SaysSo(Both):
    may_overlap = True


class OverridesOne(SaysSo):
    async def after_run(self, run_context: Any, run_values: Any) -> None: ...


class ChangedLogging(LoggingTensorHook):
    async def before_run(self, run_context: Any) -> None: ...


class OnlyAfter(SessionRunHook):
    async def after_run(self, run_context: Any, run_values: Any) -> None: ...


class Inherits(SaysSo):
    pass


async def two_phases() -> Any:
    return one_phase()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "hook", [Both(), OverridesOne(), ChangedLogging(["loss"], 1), FeedFnHook(dict)]
)
async def test_a_hook_that_does_not_say_that_it_may_overlap_is_refused(hook: Any) -> None:
    session = MonitoredSession([hook], FunctionSessionCreator(two_phases, in_flight=2))
    with pytest.raises(RuntimeError, match=type(hook).__name__):
        await session.__aenter__()
    async with MonitoredSession([hook], FunctionSessionCreator(two_phases)) as session:
        if not isinstance(hook, ChangedLogging):
            assert await session.run("loss") == 0.5


@pytest.mark.anyio
async def test_hooks_that_may_overlap_are_taken() -> None:
    by_instance = Both()
    by_instance.may_overlap = True
    hooks = [SaysSo(), Inherits(), OnlyAfter(), by_instance]
    async with MonitoredSession(hooks, FunctionSessionCreator(two_phases, in_flight=2)) as session:
        assert await session.run("loss") == 0.5


@pytest.mark.tensorflow
@pytest.mark.anyio
async def test_hooks_of_tensorflow_are_refused() -> None:
    tf = pytest.importorskip("tensorflow")
    hook = tf.compat.v1.train.StopAtStepHook(last_step=3)
    session = MonitoredSession([hook], FunctionSessionCreator(two_phases, in_flight=2))
    with pytest.raises(RuntimeError, match="StopAtStepHook.*knows one run at a time"):
        await session.__aenter__()
