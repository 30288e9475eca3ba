"""What newcomers write who have read no more than the first pages, and what they are told.

Each mistake that nothing would tell of by itself is answered by what to write instead.
"""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asynchooks import (
    Coordinator,
    EarlyStoppingHook,
    EvaluationHook,
    FeedFnHook,
    FeedHook,
    FetchError,
    GlobalStepWaiterHook,
    LoggingTensorHook,
    MetricsHook,
    MonitoredSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepFunctionError,
    StopAtStepHook,
    data,
)
from asynchooks._stopping import session_stop

from ..support.helpers import cancelled_when_settled, settle, turns
from ..support.moments import at


def step() -> dict[str, float]:
    return {"loss": 0.5}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_loop_of_runs_that_are_not_awaited_ends_with_an_error(is_kept: bool) -> None:
    num_turns, run = 0, None
    with pytest.raises(RuntimeError, match=r"each one is to be awaited, `await session\.run"):
        async with MonitoredSession([StopAtStepHook(last_step=3)], step) as session:
            while not session.should_stop():
                num_turns += 1
                run = session.run("loss")
                run = run if is_kept else None
    assert num_turns == 2
    run = None  # within this test, Python warns of it


async def test_a_run_whose_task_was_cancelled_before_it_began_is_no_mistake() -> None:
    async with MonitoredSession([], step) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, "loss")
            group.cancel_scope.cancel()
        session.run("loss").close()
        assert await session.run("loss") == 0.5


async def test_a_loop_that_swallows_the_end_is_told_of_once_and_lets_others_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_turns, others = 0, list[int]()

    async def other() -> None:
        others.append(await session.global_step.wait_for(3))

    async with MonitoredSession([StopAtStepHook(last_step=3)], step) as session:
        async with anyio.create_task_group() as group:
            group.start_soon(other)
            while not others or num_turns < 50:
                num_turns += 1
                try:
                    await session.run("loss")
                except Exception:
                    continue
    assert caplog.text.count("runs have raised StopTraining, which ends the block") == 1
    assert "while not session.should_stop():" in caplog.text


@pytest.mark.parametrize("is_in_thread", [False, True])
async def test_a_wait_in_the_body_after_a_stop_is_told_of_once(
    is_in_thread: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # private: ten seconds are no time for a test, and no clock of the event loops is ours
    monkeypatch.setattr(session_stop, "_PATIENCE_SECS", 0.0)
    async with MonitoredSession([], step) as session:
        if is_in_thread:
            await anyio.to_thread.run_sync(session.request_stop, "enough")
        else:
            session.request_stop("enough")
        with anyio.fail_after(20):
            while not caplog.text:  # as `await queue.get()`, which nobody fills any more
                await turns()
        session.request_stop("once more")
        await settle()
    assert caplog.text.count("`await session.or_stop(queue.get)`") == 1
    assert "by session.request_stop" in caplog.text


async def test_what_watches_a_body_after_a_stop_ends_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_tasks = len(anyio.get_running_tasks())
    async with MonitoredSession([], step) as session:
        session.request_stop("enough")
        await settle()
        assert len(anyio.get_running_tasks()) == num_tasks + 1
    await settle()
    assert len(anyio.get_running_tasks()) == num_tasks
    assert "or_stop" not in caplog.text


async def test_a_lone_waiter_is_told_who_may_bring_its_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with MonitoredSession([GlobalStepWaiterHook(5)], step) as session:
        assert await cancelled_when_settled(session.run, "loss")
    assert "All open workers wait for global_step 5" in caplog.text
    assert "no GlobalStepWaiterHook in its hooks" in caplog.text


def prints_loss(run_context: SessionRunContext, run_values: SessionRunValues) -> None:
    print(run_values.results["loss"])


def stops(run_context: SessionRunContext, run_values: SessionRunValues) -> None:
    run_context.session.request_stop()


@pytest.mark.parametrize(
    ("after_run", "words"),
    [
        (prints_loss, 'its before_run asked for nothing; return SessionRunArgs({"loss": "loss"})'),
        (stops, "request_stop is a method of run_context and of coord"),
    ],
)
async def test_an_error_of_a_hook_says_what_it_should_have_asked(
    after_run: Callable[..., None], words: str
) -> None:
    with pytest.raises((TypeError, AttributeError)) as raised:
        async with MonitoredSession([at(after_run=after_run)], step) as session:
            await session.run("loss")
    assert words in " / ".join(raised.value.__notes__)


async def two(first: object, second: object) -> None: ...


async def more_by_choice(self: Any, *args: Any, loud: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("moment", "method", "expected"),
    [
        ("begin", two, r"begin of hooks\[0\], a Mine, takes .*second.* write begin\(self\)"),
        ("after_run", two, r"write after_run\(self, run_context, run_values\)"),
        ("end", lambda self: None, r"takes \(\) beside self; write end\(self, session\)"),
        ("on_drop", two, r"write on_drop\(self\)"),
        ("after_run", more_by_choice, None),
    ],
)
def test_a_method_of_another_signature_is_refused_with_the_right_one(
    moment: str, method: Any, expected: str | None
) -> None:
    hook: SessionRunHook = type("Mine", (SessionRunHook,), {moment: method})()
    if expected is None:
        MonitoredSession([hook], step)
        return
    with pytest.raises(TypeError, match=expected):
        MonitoredSession([hook], step)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EvaluationHook(lambda step: {}, every_n_steps=1),  # type: ignore[arg-type, misc]
        lambda: FeedHook([1], "x", after_epoch=lambda epoch: None),  # type: ignore[arg-type, misc]
        lambda: FeedFnHook(lambda context: {}),  # type: ignore[arg-type, misc]
        lambda: LoggingTensorHook(["loss"], 1, formatter=lambda: ""),  # type: ignore[arg-type, misc]
        lambda: MetricsHook(lambda values: None, "loss"),  # type: ignore[arg-type]
        lambda: data.map([1], lambda: 1),  # type: ignore[arg-type, misc]
        lambda: data.filter([1], lambda item, place: True),  # type: ignore[arg-type, misc]
    ],
)
def test_a_function_of_another_signature_is_refused_where_it_is_given(
    make: Callable[[], object],
) -> None:
    with pytest.raises(TypeError, match=r"lambda.*, which takes \(.*\), and is called with \d arg"):
        make()


async def test_no_private_name_is_suggested_for_a_misspelt_one() -> None:
    async with MonitoredSession([], step) as session:
        context = SessionRunContext(SessionRunArgs("loss"), session.raw_session())
        for each in (session, context, session.raw_session(), LoggingTensorHook(["loss"], 1)):
            names = dir(each)
            assert [name for name in names if name[0] == "_" and name[-2:] != "__"] == []
        assert "global_step" in dir(session)


async def test_should_stop_without_a_call_is_refused_as_a_condition() -> None:
    async with MonitoredSession([StopAtStepHook(last_step=2)], step) as session:
        with pytest.raises(TypeError, match=r"call it: should_stop\(\)"):
            while not session.should_stop:  # type: ignore[truthy-function]
                await session.run([])
        while not session.should_stop():
            await session.run([])
        assert session.global_step.value == 2
    with pytest.raises(TypeError, match=r"call it: should_stop\(\)"):
        bool(Coordinator().should_stop)


async def test_a_step_that_names_one_global_step_for_ever_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with MonitoredSession([], lambda: {"global_step": 7}) as session:
        for _ in range(1000):
            await session.run([])
        assert not caplog.messages
        for _ in range(2000):
            await session.run([])
    [told] = caplog.messages
    assert "has been 7 in 1000 runs" in told
    assert "Return the step after the run" in told


async def test_what_a_generator_function_returned_is_shown_as_that() -> None:
    def generates() -> Any:
        yield {"loss": 1.0}

    with pytest.raises(StepFunctionError, match="returned <generator object"):
        async with MonitoredSession([], generates) as session:
            await session.run([])


async def test_a_metric_that_no_step_returns_is_perhaps_that_of_an_evaluation() -> None:
    with pytest.raises(FetchError, match="val_loss") as caught:
        async with MonitoredSession([EarlyStoppingHook("val_loss", patience=1)], step) as session:
            await session.run([])
    assert any("evaluation.metric(name)" in note for note in caught.value.__notes__)


async def evaluate(session: Any, global_step: int) -> dict[str, float]:
    return {"accuracy": 1.0}


async def steps() -> dict[str, Any]:
    return {"loss": 0.5}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: EvaluationHook(evaluate(None, 1), every_n_steps=1),  # type: ignore[arg-type]
            "give the function: evaluate in place of evaluate",
        ),
        (lambda: MonitoredSession([], step()), "what a step returns; give the step function wit"),  # type: ignore[arg-type]
        (lambda: MonitoredSession([], steps()), "give the function: steps in place of steps"),  # type: ignore[arg-type]
    ],
)
def test_a_function_that_was_called_already_is_refused(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        make()
