"""The life of a session on a real graph: moments, what a run returns, closing."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import asynchooks
from asynchooks import (
    CheckpointSaverHook,
    Coordinator,
    FinalOpsHook,
    LoggingTensorHook,
    MonitoredSession,
    SessionRunArgs,
    SharedSessionCreator,
    StopTraining,
)
from asynchooks.testing import RecordingHook

from .models import (
    ChiefSessionCreator,
    Model,
    Moments,
    aborted,
    counting_model,
    monitored,
    out_of_range,
    raising,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


async def test_moments_come_in_order_around_real_runs() -> None:
    model = counting_model()
    hook = RecordingHook("a", fetches=model.step)
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        await session.run(model.train_op)
    assert hook.log == [
        ("a", "begin"),
        ("a", "after_create_session"),
        *[("a", "before_run"), ("a", "after_run")] * 2,
        ("a", "end"),
    ]


async def test_default_creator_runs_the_graph_that_was_default_when_the_session_was_made() -> None:
    model = counting_model()
    with model.graph.as_default():
        session = MonitoredSession()
    with tf.Graph().as_default():
        await session.__aenter__()
    assert session.graph is model.graph
    assert await session.run(model.train_op) == 1
    await session.close()


async def test_raw_session_and_contexts_session_are_the_tensorflow_session() -> None:
    model = counting_model()
    seen: list[Any] = []
    hook = Moments(
        created=lambda session, coord: seen.append(session),
        before_run=lambda context: seen.append(context.session),
        end=seen.append,
    )
    async with monitored(model.graph, [hook]) as session:
        raw = session.raw_session()
        await session.run(model.train_op)
    assert isinstance(raw, v1.Session)
    assert seen == [raw] * 3


async def test_a_run_on_the_contexts_session_bypasses_hooks() -> None:
    model = counting_model()
    recorder = RecordingHook("a")
    hook = Moments(before_run=lambda context: context.session.run(model.train_op) and None)
    async with monitored(model.graph, [recorder, hook]) as session:
        assert await session.run(model.train_op) == 2
    assert recorder.log.count(("a", "before_run")) == 1


async def test_in_end_the_session_is_still_open() -> None:
    model = counting_model()
    read: list[int] = []
    hook = Moments(end=lambda session: read.append(session.run(model.step)))
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
    assert read == [1]


async def test_after_close_the_session_is_empty_and_the_raw_one_closed() -> None:
    model = counting_model()
    async with monitored(model.graph) as session:
        raw = session.raw_session()
    assert session.graph is None
    assert session.raw_session() is None
    assert session.should_stop()
    with pytest.raises(RuntimeError, match="Session is already closed"):
        await session.run(model.train_op)
    with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
        raw.run(model.step)
    with pytest.raises(RuntimeError, match=r"^Session is already closed\.$"):
        await session.close()


async def test_a_session_without_hooks_needs_no_global_step() -> None:
    graph = tf.Graph()
    with graph.as_default():
        seven = tf.constant(7)
    async with monitored(graph) as session:
        assert await session.run(seven) == 7
        assert session.global_step.value == 0


async def test_a_fetch_of_another_graph_is_tensorflows_error_and_the_session_goes_on() -> None:
    model, other = counting_model(), counting_model()
    async with monitored(model.graph) as session:
        with pytest.raises(ValueError, match="is not an element of this graph"):
            await session.run(other.train_op)
        assert await session.run(model.train_op) == 1


async def test_an_error_of_a_real_step_leaves_as_itself_and_no_after_run_is_called() -> None:
    model = counting_model()
    with model.graph.as_default():
        x = v1.placeholder(tf.float32, [], name="x")
        checked = v1.debugging.check_numerics(x, "x is bad")
    hooks = [RecordingHook("a"), RecordingHook("b")]
    session = monitored(model.graph, hooks)
    async with session:
        with pytest.raises(tf.errors.InvalidArgumentError, match="x is bad"):
            await session.run(checked, {x: float("nan")})
        assert not session.should_stop()
        assert await session.run(checked, {x: 2.0}) == 2.0
    for hook in hooks:
        assert [moment for _, moment in hook.log].count("after_run") == 1
        assert [moment for _, moment in hook.log].count("end") == 1


async def test_an_error_of_the_body_leaves_without_end_and_closes_the_session() -> None:
    model = counting_model()
    hook = RecordingHook("a")
    session = monitored(model.graph, [hook])
    await session.__aenter__()
    raw = session.raw_session()
    error = ZeroDivisionError("body")
    assert not await session.__aexit__(ZeroDivisionError, error, None), "the error goes on"
    assert hook.errors == [error]
    assert [moment for _, moment in hook.log] == ["begin", "after_create_session", "on_error"]
    with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
        raw.run(model.step)


@pytest.mark.parametrize("moment", ["begin", "created"])
async def test_an_error_while_opening_closes_the_raw_session_and_unfinalizes(moment: str) -> None:
    model = counting_model()
    session = monitored(model.graph, [Moments(**{moment: raising(ZeroDivisionError(moment))})])
    with pytest.raises(ZeroDivisionError, match=moment):
        await session.__aenter__()
    assert session.raw_session() is None
    assert not model.graph.finalized


async def test_after_an_error_in_after_run_the_session_stays_usable() -> None:
    model = counting_model()
    log: list[tuple[str, str]] = []
    failing = Moments(after_run=raising(ZeroDivisionError("once")))
    asking = Moments(after_run=lambda context, values: context.request_stop())
    hooks = [RecordingHook("a", log), failing, RecordingHook("b", log)]
    async with monitored(model.graph, [asking, *hooks]) as session:
        with pytest.raises(ZeroDivisionError, match="once"):
            await session.run(model.train_op)
        assert not session.should_stop(), "the stop asked for in that run is lost"
        assert await session.run(model.train_op) == 2
        assert session.should_stop()
    assert log.count(("a", "after_run")) == 2
    assert log.count(("b", "after_run")) == 1


async def test_run_after_a_hooks_stop_is_refused() -> None:
    model = counting_model()
    hook = Moments(before_run=lambda context: context.request_stop())
    async with monitored(model.graph, [hook]) as session:
        assert await session.run(model.train_op) == 1
        assert session.should_stop()
        with pytest.raises(StopTraining, match="no run begins after a stop"):
            await session.run(model.train_op)


async def test_a_hook_listed_twice_is_called_twice() -> None:
    model = counting_model()
    hook = RecordingHook("a", fetches=model.step)
    async with monitored(model.graph, iter([hook, hook])) as session:
        await session.run([])
    assert [moment for _, moment in hook.log] == [
        moment
        for moment in ("begin", "after_create_session", "before_run", "after_run", "end")
        for _ in range(2)
    ]
    assert hook.results == [0, 0]


@pytest.mark.parametrize("error", [StopIteration(), StopAsyncIteration(), out_of_range()])
async def test_the_end_of_an_input_in_the_body_is_a_clean_end(error: BaseException) -> None:
    model = counting_model()
    hook = RecordingHook("a")
    async with monitored(model.graph, [hook]):
        raising(error)()
    assert hook.log[-1] == ("a", "end")


async def test_several_shared_workers_see_one_raw_session() -> None:
    model = counting_model()
    with model.graph.as_default():
        creator = SharedSessionCreator(ChiefSessionCreator())
    async with monitored(model.graph, None, creator) as one:
        async with monitored(model.graph, None, creator) as two:
            assert one.raw_session() is two.raw_session()
            await one.run(model.train_op)
            assert await two.run(model.train_op) == 2
            assert one.global_step.value == two.global_step.value == 2
        assert await one.run(model.train_op) == 3, "the last to leave closes it"


async def test_a_hook_that_fetches_what_the_caller_fetches_gets_the_same_value() -> None:
    model = counting_model()
    got: list[Any] = []
    hook = Moments(
        before_run=lambda context: SessionRunArgs(model.train_op),
        after_run=lambda context, values: got.append(values.results),
    )
    async with monitored(model.graph, [hook]) as session:
        assert await session.run(model.train_op) == 1
    assert got == [1]


async def test_aborted_in_begin_leaves_at_once() -> None:
    model = counting_model()
    hook = RecordingHook("a")
    with pytest.raises(tf.errors.AbortedError, match="the server restarted"):
        async with monitored(model.graph, [hook, Moments(begin=raising(aborted()))]):
            pass
    assert [moment for _, moment in hook.log] == ["begin", "on_error"]


MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "end"]


async def run_times(model: Model, hooks: list[Any], times: int, creator: Any = None) -> None:
    async with monitored(model.graph, hooks, creator) as session:
        for _ in range(times):
            await session.run(model.train_op)


def events_in(directory: Path) -> list[tuple[int, str]]:
    v1.summary.FileWriterCache.clear()
    return [
        (event.step, event.WhichOneof("what"))
        for path in directory.glob("events.out.*")
        for event in v1.train.summary_iterator(str(path))
        if event.WhichOneof("what") in ("summary", "session_log")
    ]


def messages(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == name]


async def test_end_is_not_called_after_an_error_in_the_block() -> None:
    model, hook = counting_model(), RecordingHook("a")
    final = FinalOpsHook(model.step)
    with pytest.raises(ZeroDivisionError, match="body"):
        async with monitored(model.graph, [hook, final]):
            raise ZeroDivisionError("body")
    assert ("a", "end") not in hook.log
    assert final.final_ops_values is None


@pytest.mark.parametrize("error", [ZeroDivisionError("in end"), out_of_range()])
async def test_an_error_in_end_is_not_swallowed(error: Exception) -> None:
    model, hook = counting_model(), RecordingHook("a")
    with pytest.raises(type(error)) as caught:
        await run_times(model, [Moments(end=raising(error)), hook], 1)
    assert caught.value is error
    assert "in end of Moments" in error.__notes__
    assert hook.log[-2:] == [("a", "end"), ("a", "on_error")]
    assert not model.graph.finalized


async def test_an_error_in_end_is_not_swallowed_after_an_end_of_input_either() -> None:
    model = counting_model()
    with pytest.raises(ZeroDivisionError, match="in end"):
        async with monitored(model.graph, [Moments(end=raising(ZeroDivisionError("in end")))]):
            raise out_of_range()


async def test_begin_is_not_repeated_on_recovery_while_after_create_session_is() -> None:
    model = counting_model()
    coords: list[Coordinator] = []
    sessions: list[Any] = []

    def note(session: Any, coord: Coordinator) -> None:
        sessions.append(session)
        coords.append(coord)

    begun: list[str] = []
    hook = Moments(
        begin=lambda: begun.append("begin"), created=note, before_run=raising(None, aborted())
    )
    await run_times(model, [hook], 2)
    assert begun == ["begin"]
    assert len(set(map(id, sessions))) == len(set(map(id, coords))) == 2


async def test_logging_tensor_hook_resets_its_timer_in_begin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = counting_model()
    with model.graph.as_default():
        seven = tf.constant(7)
    hook = LoggingTensorHook({"x": seven}, every_n_iter=3)
    with caplog.at_level(logging.INFO, "asynchooks"):
        await run_times(model, [hook], 5)
        await run_times(model, [hook], 1)
    logged = messages(caplog, "asynchooks")
    assert [message.split(" (")[0] for message in logged] == ["x = 7"] * 3
    assert ["sec)" in message for message in logged] == [False, True, False]


@pytest.mark.parametrize("train", [asynchooks, v1.train], ids=["ours", "theirs"])
async def test_step_counter_hook_keeps_its_timer_for_a_second_session(
    train: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = counting_model()
    with model.graph.as_default():
        scaffold = v1.train.Scaffold()
        saver = CheckpointSaverHook(str(tmp_path), save_steps=100, scaffold=scaffold)
        counter = train.StepCounterHook(5, output_dir=str(tmp_path))
    creator = ChiefSessionCreator(scaffold, checkpoint_dir=str(tmp_path))
    await run_times(model, [saver, counter], 8, creator)
    await run_times(model, [saver, counter], 4, creator)
    counted = [step for step, what in events_in(tmp_path) if what == "summary"]
    assert counted == [6, 11], "11 is five steps after 6, over the end of the first session"


@pytest.mark.parametrize("train", [asynchooks, v1.train], ids=["ours", "theirs"])
async def test_a_new_session_is_a_first_one_for_hooks_whatever_their_timers_say(
    train: Any, tmp_path: Path
) -> None:
    model, directory = counting_model(), str(tmp_path)
    with model.graph.as_default():
        v1.summary.scalar("value", tf.constant(1.0))
        scaffold = v1.train.Scaffold()
        hooks = [
            train.CheckpointSaverHook(directory, save_steps=100, scaffold=scaffold),
            train.SummarySaverHook(save_steps=100, output_dir=directory, scaffold=scaffold),
            train.ProfilerHook(save_steps=2, output_dir=directory),
        ]
    for _ in range(2):
        creator = ChiefSessionCreator(scaffold, checkpoint_dir=directory)
        await run_times(model, hooks, 3, creator)
    log, summary = "session_log", "summary"
    first = [(0, log), (1, log), (1, summary), (3, log)]
    assert events_in(tmp_path) == [*first, (3, log), (4, log), (4, summary), (6, log)]
    traces = {name for name in os.listdir(directory) if name.startswith("timeline")}
    assert traces == {"timeline-2.json", "timeline-5.json"}, "4 was the first of its session"


@pytest.mark.parametrize("moment", ["before_run", "after_run"])
async def test_after_run_of_every_hook_runs_once_one_of_them_asked_to_stop(moment: str) -> None:
    model, first, last = counting_model(), RecordingHook("a"), RecordingHook("c")
    ask: dict[str, Any] = {moment: lambda context, *_: context.request_stop()}
    asking = Moments(**ask)
    async with monitored(model.graph, [first, asking, last]) as session:
        assert await session.run(model.train_op) == 1
        assert session.should_stop()
    assert first.log.count(("a", "after_run")) == last.log.count(("c", "after_run")) == 1


async def test_an_end_of_input_that_is_reported_to_the_coordinator_leaves() -> None:
    model, error = counting_model(), out_of_range()
    coords: list[Coordinator] = []
    recorder = RecordingHook("a")
    hooks = [recorder, Moments(created=lambda session, coord: coords.append(coord))]
    with pytest.raises(tf.errors.OutOfRangeError) as caught:
        async with monitored(model.graph, hooks) as session:
            coords[0].request_stop(error)
            assert session.should_stop()
    assert caught.value is error
    assert ("a", "end") in recorder.log, "the body was clean"


async def test_live_registered_threads_do_not_fail_a_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, released = counting_model(), threading.Event()
    thread = threading.Thread(target=released.wait, args=(60,), name="stubborn", daemon=True)

    def start(session: Any, coord: Coordinator) -> None:
        thread.start()
        coord.register_thread(thread)

    with caplog.at_level(logging.INFO, "asynchooks"):
        hooks = [Moments(created=start)]
        async with monitored(model.graph, hooks, stop_grace_period_secs=0.01) as session:
            pass
    assert thread.is_alive()
    assert session.raw_session() is None
    assert any("stubborn" in message for message in messages(caplog, "asynchooks"))
    released.set()
    thread.join()


@pytest.mark.parametrize("train", [asynchooks, v1.train], ids=["ours", "theirs"])
async def test_nan_tensor_hook_fails_or_stops(train: Any) -> None:
    for fails in (True, False):
        model = counting_model()
        with model.graph.as_default():
            x = v1.placeholder_with_default(1.0, shape=())
        async with monitored(model.graph, [train.NanTensorHook(x, fails)]) as session:
            await session.run(model.train_op, {x: float("inf")})
            assert not session.should_stop()
            if fails:
                with pytest.raises(RuntimeError, match="NaN loss during training"):
                    await session.run(model.train_op, {x: float("nan")})
            else:
                assert await session.run(model.train_op, {x: float("nan")}) == 2
            assert session.should_stop() is not fails


async def test_hooks_keep_their_order_at_every_moment_also_through_a_recovery() -> None:
    model = counting_model()
    log: list[tuple[str, str]] = []
    losing = Moments(after_run=raising(aborted()))
    hooks = [RecordingHook("a", log), RecordingHook("b", log), losing, RecordingHook("c", log)]
    await run_times(model, hooks, 1)
    lost = [(name, moment) for moment in MOMENTS[:3] for name in "abc"]
    whole = [(name, moment) for moment in MOMENTS[1:] for name in "abc"]
    assert log == [*lost, ("a", "after_run"), ("b", "after_run"), *whole]


@pytest.mark.parametrize("body", [ZeroDivisionError("body"), out_of_range()])
async def test_the_coordinators_error_goes_before_the_bodys(body: Exception) -> None:
    model, held = counting_model(), OSError("a thread")
    hook = Moments(created=lambda session, coord: coord.request_stop(held))
    with pytest.raises(OSError, match="a thread") as caught:
        async with monitored(model.graph, [hook]):
            raise body
    assert caught.value is held
    assert held.__context__ is body


async def test_the_coordinators_error_goes_before_that_of_an_end() -> None:
    model, held, late = counting_model(), OSError("a thread"), ZeroDivisionError("in end")
    hook = Moments(created=lambda session, coord: coord.request_stop(held), end=raising(late))
    with pytest.raises(OSError, match="a thread"):
        await run_times(model, [hook], 0)
    assert held.__context__ is late
