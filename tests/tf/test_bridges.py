"""Coroutine hooks in loops of others: HooksCallback in Keras's fit, sync_hook in TensorFlow's."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import numpy as np
import pytest

import asynchooks
from asynchooks import (
    FeedFnHook,
    GlobalStepWaiterHook,
    NanLossDuringTrainingError,
    NanTensorHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    StepUnreachableError,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.testing import RecordingHook

from ..support.threads import own_threads
from .models import Model, counting_model, saver_of
from .test_event_files import read

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
v1 = tf.compat.v1
HooksCallback = asynchooks.HooksCallback
sync_hook = asynchooks.sync_hook
pytestmark = pytest.mark.tensorflow

INPUTS = np.random.default_rng(0).random((320, 4), dtype=np.float32)  # 10 batches of 32
TARGETS = INPUTS.sum(axis=1)


def linear_model(**options: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"], **options)
    return model


def fit(model: Any, hooks: list[Any], epochs: int = 1, **options: Any) -> Any:
    callback = HooksCallback(hooks, **options)
    return model.fit(INPUTS, TARGETS, epochs=epochs, verbose=0, callbacks=[callback])


def train(model: Model, hooks: list[Any], runs: int = 100) -> list[int]:
    """The steps that the runs returned, under TensorFlow's own session."""
    steps: list[int] = []
    with model.graph.as_default(), v1.train.MonitoredSession(hooks=hooks) as session:
        while not session.should_stop() and len(steps) < runs:
            steps.append(session.run(model.train_op))
    return steps


def hook_threads() -> list[threading.Thread]:
    return own_threads("asynchooks-hooks")


@pytest.fixture(autouse=True)
def event_loops_end_with_their_hooks() -> Iterator[None]:
    """TensorFlow calls no `end` after an error: then the event loop ends with the hook."""
    yield
    if hook_threads():
        gc.collect()
    for thread in hook_threads():
        thread.join(10)
    assert not hook_threads()


def train_keras(hooks: list[Any]) -> int:
    """How many steps were made."""
    model = linear_model()
    fit(model, hooks, epochs=3)
    return int(model.optimizer.iterations)


def train_tensorflow(hooks: list[Any]) -> int:
    return len(train(counting_model(), [sync_hook(hook) for hook in hooks]))


Train = Callable[[list[Any]], int]
in_both = pytest.mark.parametrize("train_with", [train_keras, train_tensorflow])


@in_both
def test_a_hook_that_asks_to_stop_ends_training(train_with: Train) -> None:
    class Stop(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            if run_context.global_step.value == 3:
                run_context.request_stop()

    other = RecordingHook("other")
    assert train_with([Stop(), other]) == 3
    assert other.log[-1] == ("other", "end")


@in_both
def test_the_end_of_a_hook_s_input_ends_training_without_the_run(train_with: Train) -> None:
    class Input(SessionRunHook):
        def __init__(self) -> None:
            self.items = iter([1, 2])

        async def before_run(self, run_context: Any) -> None:
            next(self.items)

    other = RecordingHook("other")
    warns: Any = nullcontext()
    if train_with is train_keras:
        warns = pytest.warns(UserWarning, match="Your input ran out of data")  # Keras's words
    with warns:
        assert train_with([Input(), other]) == 2
    assert other.log[-1] == ("other", "end")


@in_both
def test_an_error_of_a_hook_leaves_as_itself_with_a_note(train_with: Train) -> None:
    class Faulty(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            raise ZeroDivisionError("bad")

    other = RecordingHook("other")
    with pytest.raises(ZeroDivisionError, match="bad") as caught:
        train_with([other, Faulty()])
    assert "in after_run of Faulty" in caught.value.__notes__
    assert ("other", "end") not in other.log
    assert other.errors == ([caught.value] if train_with is train_keras else [])


@in_both
def test_an_error_of_a_side_task_ends_training_and_leaves_after_end(train_with: Train) -> None:
    class Sides(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            coord.start_soon(self.fail)

        async def fail(self) -> None:
            raise ZeroDivisionError("in a side task")

        async def before_run(self, run_context: Any) -> None:
            await anyio.wait_all_tasks_blocked()

    other = RecordingHook("other")
    with pytest.raises(ZeroDivisionError, match="in a side task"):
        train_with([other, Sides()])
    num_runs = other.log.count(("other", "after_run"))
    assert num_runs == 1 or (train_with is train_tensorflow and num_runs == 0)
    assert ("other", "end") in other.log


class Works(SessionRunHook):
    """Has a side task, and notes when that begins and ends."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def after_create_session(self, session: Any, coord: Any) -> None:
        coord.start_soon(self.work, coord)

    async def work(self, coord: Any) -> None:
        self.log.append("started")
        await coord.wait_stopped()
        self.log.append("stopped")

    async def end(self, session: Any) -> None:
        self.log.append("end")


@in_both
def test_side_tasks_run_beside_training_and_end_with_it(train_with: Train) -> None:
    hook = Works()
    train_with([hook, StopAtStepHook(last_step=2)])
    assert hook.log == ["started", "end", "stopped"]


@in_both
def test_the_event_loop_ends_also_when_the_end_fails(train_with: Train) -> None:
    class Faulty(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            coord.start_soon(self.fail, coord)

        async def fail(self, coord: Any) -> None:
            await coord.wait_stopped()
            raise ZeroDivisionError("in a side task, at the end")

    with pytest.raises(ZeroDivisionError, match="in a side task, at the end"):
        train_with([Faulty()])
    assert not hook_threads()


@in_both
@pytest.mark.parametrize("waits_for", ["a step", "what another library gives"])
def test_a_stop_while_a_hook_waits_ends_training_cleanly(train_with: Train, waits_for: str) -> None:
    class Waits(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            self.coord = coord

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            self.coord.request_stop()
            if waits_for == "a step":
                await run_context.global_step.wait_for(1000)
            await self.coord.or_stop(anyio.sleep_forever)

    other = RecordingHook("other")
    assert train_with([Waits(), other]) == 1
    assert other.log[-1] == ("other", "end")


class Losses(SessionRunHook):
    def __init__(self, fetches: Any) -> None:
        self.fetches = fetches
        self.seen: list[tuple[int, Any]] = []

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        await anyio.lowlevel.checkpoint()
        return SessionRunArgs(self.fetches)

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        await anyio.lowlevel.checkpoint()
        self.seen.append((run_context.global_step.value, run_values.results))


@pytest.mark.parametrize("backend", ["own", "asyncio", "trio"])
def test_hooks_are_called_around_each_batch_in_order(backend: Any) -> None:
    log: list[tuple[str, str]] = []
    hooks = [RecordingHook("a", log), RecordingHook("b", log)]
    if backend == "own":
        fit(linear_model(), hooks, epochs=2)
    else:
        with anyio.from_thread.start_blocking_portal(backend) as portal:
            fit(linear_model(), hooks, epochs=2, portal=portal)
    runs = ["before_run", "after_run"] * 20
    moments = ["begin", "after_create_session", *runs, "end"]
    assert log == [(name, moment) for moment in moments for name in "ab"]
    assert not hook_threads()


def test_fetches_are_keras_s_logs_and_the_step_counts_iterations() -> None:
    hook = Losses({"both": ["loss", "mae"]})
    history = fit(linear_model(), [hook], epochs=2)
    assert [step for step, _ in hook.seen] == list(range(1, 21))
    for epoch in (0, 1):
        loss, mae = hook.seen[10 * epoch + 9][1]["both"]
        assert loss == pytest.approx(history.history["loss"][epoch])
        assert mae == pytest.approx(history.history["mae"][epoch])


def test_a_stop_at_step_hook_ends_fit_exactly_there() -> None:
    model = linear_model()
    fit(model, [StopAtStepHook(last_step=13)], epochs=5)
    assert int(model.optimizer.iterations) == 13
    other = RecordingHook("other")
    with pytest.warns(UserWarning, match="Your input ran out of data"):  # Keras's words for it
        fit(model, [StopAtStepHook(last_step=13), other], epochs=5)
    assert int(model.optimizer.iterations) == 13, "not one batch more"
    assert other.log[-1] == ("other", "end")
    fit(model, [StopAtStepHook(num_steps=4)], epochs=5)
    assert int(model.optimizer.iterations) == 17


def test_several_steps_per_execution_are_counted() -> None:
    model = linear_model(steps_per_execution=5)
    hook = Losses("loss")
    fit(model, [hook])
    assert [step for step, _ in hook.seen] == [5, 10]


def test_a_loss_of_nan_is_an_error_of_fit() -> None:
    model = linear_model()
    model.layers[0].build((None, 4))
    model.layers[0].kernel.assign(np.full((4, 1), math.nan))
    with pytest.raises(NanLossDuringTrainingError) as caught:
        fit(model, [NanTensorHook("loss")])
    assert "in after_run of NanTensorHook" in caught.value.__notes__
    assert not hook_threads()


class Bad(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raise ZeroDivisionError("of Keras")


def test_as_a_context_manager_it_passes_errors_of_fit_to_hooks() -> None:
    hook = RecordingHook("a")
    with pytest.raises(ZeroDivisionError), HooksCallback([hook]) as callback:
        linear_model().fit(INPUTS, TARGETS, verbose=0, callbacks=[Bad(), callback])
    assert [repr(error) for error in hook.errors] == ["ZeroDivisionError('of Keras')"]


@pytest.mark.parametrize("fails", ["end", "after_close", "nothing"])
def test_after_close_comes_once_however_fit_ends(fails: str) -> None:
    class Closing(SessionRunHook):
        def __init__(self) -> None:
            self.log: list[str] = []

        async def end(self, session: Any) -> None:
            self.log.append("end")
            if fails == "end":
                raise ZeroDivisionError("of end")

        async def on_error(self, session: Any, exception: BaseException) -> None:
            self.log.append(f"on_error {exception}")

        async def after_close(self, exception: BaseException | None) -> None:
            self.log.append(f"after_close {exception}")
            if fails == "after_close":
                raise ZeroDivisionError("of after_close")

    hook = Closing()
    if fails == "nothing":
        fit(linear_model(), [hook])
    else:
        with pytest.raises(ZeroDivisionError, match=f"of {fails}"):
            fit(linear_model(), [hook])
    expected = ["on_error of end", "after_close of end"] if fails == "end" else ["after_close None"]
    assert hook.log == ["end", *expected]


def test_plain_hooks_and_a_second_fit_work() -> None:
    class Plain(SessionRunHook):
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.num_begun = 0

        def begin(self) -> None:
            self.num_begun += 1

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.steps.append(run_context.global_step.value)

    model, hook = linear_model(), Plain()
    callback = HooksCallback([hook])
    for _ in range(2):
        model.fit(INPUTS, TARGETS, verbose=0, callbacks=[callback])
    assert hook.steps == list(range(1, 21))
    assert hook.num_begun == 2


def test_each_fit_runs_so_many_steps() -> None:
    model, callback = linear_model(), HooksCallback([StopAtStepHook(num_steps=4)])
    for num in (1, 2, 3):
        model.fit(INPUTS, TARGETS, verbose=0, callbacks=[callback])
        assert int(model.optimizer.iterations) == 4 * num


def test_wrong_requests_are_errors() -> None:
    with pytest.raises(asynchooks.FetchError, match="'nope' is not among") as caught:
        fit(linear_model(), [Losses("nope")])
    assert "fetched in before_run of Losses" in caught.value.__notes__
    with pytest.raises(ValueError, match="Keras feeds its batches itself"):
        fit(linear_model(), [FeedFnHook(lambda: {"x": 1})])
    with pytest.raises(StepUnreachableError):
        fit(linear_model(), [asynchooks.GlobalStepWaiterHook(5)])
    with pytest.raises(TypeError, match="hooks is the hook"):
        HooksCallback(RecordingHook("a"))  # type: ignore[arg-type]


def test_a_fit_that_failed_outside_the_hooks_is_ended_by_the_next_one() -> None:
    model, other = linear_model(), RecordingHook("other")
    works = Works()
    callback = HooksCallback([works, other])
    with pytest.raises(ZeroDivisionError):
        model.fit(INPUTS, TARGETS, verbose=0, callbacks=[Bad(), callback])
    assert works.log == ["started"]
    model.fit(INPUTS, TARGETS, verbose=0, callbacks=[callback])
    assert works.log == ["started", "stopped", "started", "end", "stopped"]
    assert [str(error) for error in other.errors] == [
        "the fit before this one failed, which Keras reports to no callback"
    ]


class Warm(SessionRunHook):
    async def after_create_session(self, session: Any, coord: Any) -> None:
        session.model.optimizer.iterations.assign(100)


def test_a_step_that_a_hook_moves_is_the_step_from_there_on() -> None:
    model = linear_model()
    for _ in range(2):  # the second time it goes back
        fit(model, [Warm(), StopAtStepHook(num_steps=3)])
        assert int(model.optimizer.iterations) == 103


class Awaiting(SessionRunHook):
    """Suspends at every moment, and looks at what surrounds it afterwards."""

    def __init__(self, model: Model, fetches: Any) -> None:
        self.model, self.fetches = model, fetches
        self.log: list[str] = []
        self.results: list[Any] = []
        self.steps: list[int] = []

    async def note(self, moment: str) -> None:
        await anyio.lowlevel.checkpoint()
        assert v1.get_default_graph() is self.model.graph
        self.log.append(moment)

    async def begin(self) -> None:
        await self.note("begin")

    async def after_create_session(self, session: Any, coord: Any) -> None:
        assert session.global_step.value == session.run(self.model.step)
        await self.note("after_create_session")

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        await self.note("before_run")
        return SessionRunArgs(self.fetches)

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        await self.note("after_run")
        self.results.append(run_values.results)
        self.steps.append(run_context.global_step.value)

    async def end(self, session: Any) -> None:
        assert session.run(self.model.step) == self.steps[-1]
        await self.note("end")


@pytest.mark.parametrize("backend", ["own", "asyncio", "trio"])
def test_every_moment_is_awaited_in_the_session_s_graph(backend: Any) -> None:
    model = counting_model()
    with model.graph.as_default():
        constant = tf.constant(7.0)
    hook = Awaiting(model, {"x": [constant]})
    with ExitStack() as stack:
        portal = None
        if backend != "own":
            portal = stack.enter_context(anyio.from_thread.start_blocking_portal(backend))
        theirs = sync_hook(hook, portal=portal)
        for _ in range(2):
            assert train(model, [theirs], runs=2) == [1, 2]
            assert portal or not hook_threads(), "the event loop has ended with `end`"
    runs = ["before_run", "after_run"] * 2
    assert hook.log == ["begin", "after_create_session", *runs, "end"] * 2
    assert hook.results == [{"x": [7.0]}] * 4
    assert hook.steps == [1, 2] * 2


def test_a_stop_at_step_hook_stops_tensorflow_s_session() -> None:
    model, other = counting_model(), RecordingHook("other")
    assert train(model, [sync_hook(StopAtStepHook(last_step=5)), sync_hook(other)])[-1] == 5
    assert other.log.count(("other", "before_run")) == 5, "no run was begun in vain"


def test_checkpoints_are_saved(tmp_path: Path) -> None:
    model = counting_model()
    saved: list[int] = []

    class Listener(asynchooks.CheckpointSaverListener):
        async def after_save(self, session: Any, global_step_value: int) -> None:
            saved.append(global_step_value)

    hook = asynchooks.CheckpointSaverHook(
        str(tmp_path), save_steps=2, saver=saver_of(model), listeners=[Listener()]
    )
    train(model, [sync_hook(hook)], runs=5)
    assert saved == [0, 2, 4, 5]
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-5")


def test_a_hook_knows_in_after_run_that_the_step_is_made() -> None:
    known: list[bool] = []

    class Asks(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            known.append(run_context.step_is_made)

        async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            known.append(run_context.step_is_made)

    train(counting_model(), [sync_hook(Asks())], runs=2)
    assert known == [False, True] * 2


def test_a_waiter_sees_steps_that_others_make() -> None:
    """Two of TensorFlow's sessions in two threads, on one in-process server."""
    server = v1.train.Server.create_local_server()
    model = counting_model()
    started: list[int] = []

    def waiting_worker() -> None:
        with model.graph.as_default():
            creator = v1.train.ChiefSessionCreator(master=server.target)
            hooks = [sync_hook(GlobalStepWaiterHook(3))]
            with v1.train.MonitoredSession(creator, hooks) as session:
                started.append(session.run(model.step))

    with model.graph.as_default(), v1.Session(server.target) as session:
        session.run(v1.global_variables_initializer())
        thread = threading.Thread(target=waiting_worker)
        thread.start()
        while not started and thread.is_alive():
            session.run(model.train_op)
        thread.join()
    assert started
    assert started[0] >= 3


def test_a_wait_ends_when_tensorflow_s_coordinator_is_stopped() -> None:
    model = counting_model()
    stopped: list[type] = []

    class Waits(SessionRunHook):
        async def before_run(self, run_context: Any) -> None:
            try:
                await run_context.global_step.wait_for(1000)
            except StopTraining:
                stopped.append(StopTraining)
                raise

    class StopFirst(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
        def after_create_session(self, session: Any, coord: Any) -> None:
            coord.request_stop()

    hooks = [StopFirst(), sync_hook(Waits())]
    with model.graph.as_default(), v1.train.MonitoredSession(hooks=hooks) as session:
        session.run(model.train_op)
    assert stopped == [StopTraining]


def test_without_a_global_step_a_hook_that_needs_one_says_so() -> None:
    graph = tf.Graph()
    with graph.as_default():
        model = Model(graph, None, tf.no_op())
    with pytest.raises(RuntimeError, match="should be created to use StopAtStepHook"):
        train(model, [sync_hook(StopAtStepHook(last_step=5))])


@pytest.mark.parametrize("wrong", [None, StopAtStepHook, v1.train.StopAtStepHook(last_step=3)])
def test_what_is_no_hook_of_ours_is_refused_and_what_is_no_portal(wrong: Any) -> None:
    with pytest.raises(TypeError, match="give an instance of asynchooks.SessionRunHook"):
        sync_hook(wrong)
    with pytest.raises(TypeError, match="start_blocking_portal"):
        sync_hook(StopAtStepHook(last_step=3), portal="trio")  # type: ignore[arg-type]


def test_a_feed_fn_may_be_async() -> None:
    graph = tf.Graph()
    with graph.as_default():
        fed = v1.placeholder(tf.int64, [])
        step = v1.train.get_or_create_global_step()
        model = Model(graph, step, v1.assign_add(step, fed))

    async def feed() -> dict[Any, int]:
        await anyio.lowlevel.checkpoint()
        return {fed: 5}

    assert train(model, [sync_hook(asynchooks.FeedFnHook(feed))], runs=3) == [5, 10, 15]


def test_an_interruption_cancels_the_coroutine_that_is_waited_for() -> None:
    cancelled = threading.Event()

    class Waits(SessionRunHook):
        async def before_run(self, run_context: Any) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                cancelled.set()

    def interrupt() -> None:
        raise KeyboardInterrupt

    hook = sync_hook(Waits())
    hook._poll = interrupt
    with pytest.raises(KeyboardInterrupt):
        train(counting_model(), [hook])
    assert cancelled.wait(10)


def test_the_step_counter_s_tag_has_the_name_of_the_step(tmp_path: Path) -> None:
    with tf.Graph().as_default():
        with v1.variable_scope("training"):
            step = v1.train.create_global_step()
        train_op = v1.assign_add(step, 1)
        hook = asynchooks.StepCounterHook(1, output_dir=str(tmp_path))
        with v1.train.MonitoredSession(hooks=[sync_hook(hook)]) as session:
            for _ in range(3):
                session.run(train_op)
    events = read(tmp_path)
    assert events.Tags()["scalars"] == [f"{step.op.name}/sec"] == ["training/global_step/sec"]


class TheirRequest(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Asks for a stop in one moment of the first run, and notes whether one was asked for."""

    def __init__(self, moment: str = "") -> None:
        self._moment = moment
        self.seen: list[bool] = []

    def before_run(self, run_context: Any) -> None:
        self._look("before_run", run_context)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._look("after_run", run_context)

    def _look(self, moment: str, run_context: Any) -> None:
        self.seen.append(run_context.stop_requested)
        if moment == self._moment:
            run_context.request_stop()


class OurRequest(SessionRunHook):
    """The same in coroutines."""

    def __init__(self, moment: str = "") -> None:
        self._theirs = TheirRequest(moment)
        self.seen = self._theirs.seen

    async def before_run(self, run_context: Any) -> None:
        self._theirs.before_run(run_context)

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self._theirs.after_run(run_context, run_values)
        assert run_context.stop_requested or self._theirs._moment != "after_run"


@pytest.mark.parametrize("moment", ["before_run", "after_run"])
@pytest.mark.parametrize("asks", [TheirRequest, OurRequest])
@pytest.mark.parametrize("looks", [TheirRequest, OurRequest])
def test_a_stop_that_one_hook_asks_for_is_seen_by_all_in_that_run(
    looks: Any, asks: Any, moment: str
) -> None:
    model = counting_model()
    first, asking, last = looks(), asks(moment), looks()
    hooks = [
        sync_hook(each) if isinstance(each, OurRequest) else each for each in (first, asking, last)
    ]
    assert train(model, hooks) == [1]
    is_early = moment == "before_run"
    assert first.seen == [False, is_early]
    assert last.seen == [is_early, True]
    assert asking.seen == [False, is_early]
