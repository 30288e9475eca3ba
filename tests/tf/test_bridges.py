"""Coroutine hooks in loops of others: HooksCallback in Keras's fit, sync_hook in TensorFlow's.

What every library's loop has in common is tested in tests/adapters.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import anyio
import anyio.from_thread
import numpy as np
import pytest

from asynchooks import (
    FeedFnHook,
    FetchError,
    GlobalStepWaiterHook,
    HooksCallback,
    MetricsHook,
    SessionRunArgs,
    SessionRunHook,
    StepUnreachableError,
    StopAtStepHook,
    StopTraining,
    sync_hook,
)
from asynchooks.testing import RecordingHook

from ..support.moments import at
from ..support.threads import own_threads
from .models import Model, TheirMoments, counting_model, raising, tf, v1
from .servers import listening

keras = pytest.importorskip("keras")

INPUTS = np.random.default_rng(0).random((40, 4), dtype=np.float32)  # 10 batches of 4
TARGETS = INPUTS.sum(axis=1)


def linear_model(**options: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"], **options)
    return model


def fit(model: Any, callbacks: list[Any], epochs: int = 1) -> Any:
    """With hooks, or with Keras's own callbacks."""
    if not any(isinstance(each, keras.callbacks.Callback) for each in callbacks):
        callbacks = [HooksCallback(callbacks)]
    return model.fit(
        INPUTS, TARGETS, batch_size=4, epochs=epochs, verbose=0, callbacks=callbacks
    ).history


def train(model: Model, hooks: list[Any], runs: int = 100) -> list[int]:
    """The steps that the runs returned, under TensorFlow's own session."""
    steps: list[int] = []
    hooks = [sync_hook(each) if isinstance(each, SessionRunHook) else each for each in hooks]
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


class Waits(SessionRunHook):
    """Asks for a stop, and then waits for what will not come."""

    def __init__(self, waits_for: str) -> None:
        self.waits_for = waits_for

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self.coord = coord

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        if self.waits_for == "nothing":
            run_context.request_stop()
            return
        self.coord.request_stop()
        if self.waits_for == "a step":
            await run_context.global_step.wait_for(1000)
        await self.coord.or_stop(anyio.sleep_forever)


@pytest.mark.parametrize(
    "hook",
    [
        *map(Waits, ["nothing", "a step", "what another library gives"]),
        at(before_run=raising(None, StopAsyncIteration())),
    ],
)
def test_a_hook_that_asks_to_stop_or_has_no_input_ends_training_cleanly(hook: Any) -> None:
    other = RecordingHook("other")
    assert train(counting_model(), [hook, other]) == [1]
    assert other.log[-1] == ("other", "end")


def test_an_error_of_a_hook_leaves_as_itself_with_a_note() -> None:
    other = RecordingHook("other")
    with pytest.raises(ZeroDivisionError) as caught:
        train(counting_model(), [other, at(after_run=raising(ZeroDivisionError()))])
    assert "in after_run of At" in caught.value.__notes__
    assert ("other", "end") not in other.log
    assert other.errors == [], "TensorFlow tells hooks of none"


class Side(SessionRunHook):
    """Has a side task that notes when it begins and ends, and may fail."""

    def __init__(self, fails: str = "") -> None:
        self.log: list[str] = []
        self.fails = fails

    async def after_create_session(self, session: Any, coord: Any) -> None:
        coord.start_soon(self.work, coord)

    async def work(self, coord: Any) -> None:
        self.log.append("started")
        if self.fails != "at once":
            await coord.wait_stopped()
        self.log.append("stopped")
        if self.fails:
            raise ZeroDivisionError("in a side task")

    async def before_run(self, run_context: Any) -> None:
        await anyio.wait_all_tasks_blocked()

    async def end(self, session: Any) -> None:
        self.log.append("end")


@pytest.mark.parametrize("fails", ["", "at once", "at the end"])
def test_side_tasks_run_beside_training_and_end_with_it_and_their_errors_leave_after_end(
    fails: str,
) -> None:
    hook, other = Side(fails), RecordingHook("other")
    with pytest.raises(ZeroDivisionError, match="in a side task") if fails else nullcontext():
        train(counting_model(), [other, hook], runs=5)
    last = ["stopped", "end"] if fails == "at once" else ["end", "stopped"]
    assert hook.log == ["started", *last]
    assert (other.log.count(("other", "after_run")) <= 1) == (fails == "at once")
    assert ("other", "end") in other.log


class Losses(SessionRunHook):
    def __init__(self, fetches: Any) -> None:
        self.fetches, self.seen = fetches, []  # type: ignore[var-annotated]

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        return SessionRunArgs(self.fetches)

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.seen.append((run_context.global_step.value, run_values.results))


def test_keras_calls_hooks_around_each_batch_in_order_with_its_logs_and_iterations() -> None:
    log: list[tuple[str, str]] = []
    hook = Losses({"both": ["loss", "mae"]})
    hooks = [RecordingHook("a", log), hook, RecordingHook("b", log)]
    history = fit(linear_model(), hooks, epochs=2)
    moments = ["begin", "after_create_session", *["before_run", "after_run"] * 20, "end"]
    assert log == [(name, moment) for moment in moments for name in "ab"]
    assert [step for step, _ in hook.seen] == list(range(1, 21))
    for epoch in (0, 1):
        found = hook.seen[10 * epoch + 9][1]["both"]
        assert found == pytest.approx([history["loss"][epoch], history["mae"][epoch]])
    points: list[Any] = []
    metrics = MetricsHook(lambda step, values: points.append((step, values)), "loss")
    several = Losses("loss")
    fit(linear_model(steps_per_execution=5), [several, metrics])
    assert [step for step, _ in several.seen] == [5, 10]
    assert points[-1] == (10, {"loss": pytest.approx(several.seen[-1][1])})


def test_a_stop_at_step_hook_ends_each_fit_exactly_there() -> None:
    model, other = linear_model(), RecordingHook("other")
    by_step = HooksCallback([StopAtStepHook(last_step=13), other])
    fit(model, [by_step], epochs=5)
    assert int(model.optimizer.iterations) == 13
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        fit(model, [by_step], epochs=5)
    assert int(model.optimizer.iterations) == 13, "not one batch more"
    assert other.log[-1] == ("other", "end")
    by_number = HooksCallback([StopAtStepHook(num_steps=4)])
    for expected in (17, 21):
        fit(model, [by_number], epochs=5)
        assert int(model.optimizer.iterations) == expected


def test_the_step_is_keras_s_wherever_hooks_move_it() -> None:
    model, seen = linear_model(), []  # type: tuple[Any, list[int]]

    def move(session: Any, coord: Any) -> None:
        session.model.optimizer.iterations.assign(100)

    def go_back(run_context: Any, run_values: Any) -> None:
        seen.append(run_context.global_step.value)
        if len(seen) == 2:
            run_context.session.model.optimizer.iterations.assign(0)

    for _ in range(2):  # the second time it goes back
        fit(model, [at(after_create_session=move), StopAtStepHook(num_steps=3)])
        assert int(model.optimizer.iterations) == 103
    fit(model, [at(after_run=go_back), StopAtStepHook(last_step=106)])
    assert seen == [104, 105, 1, 2, 3, 4, 5, 6, 7, 8]


class Bad(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raise ZeroDivisionError("of Keras")


def test_an_error_of_keras_reaches_hooks_by_the_block_or_at_the_next_fit() -> None:
    other, works, model = RecordingHook("other"), Side(), linear_model()
    with pytest.raises(ZeroDivisionError), HooksCallback([other]) as callback:
        fit(model, [Bad(), callback])
    callback = HooksCallback([works, other])
    with pytest.raises(ZeroDivisionError):
        fit(model, [Bad(), callback])
    fit(model, [callback])
    assert works.log == ["started", "stopped", "started", "end", "stopped"]
    of_keras, before = map(str, other.errors)
    assert of_keras == "of Keras"
    assert "the fit before this one failed" in before


@pytest.mark.parametrize("fails", ["end", "after_close", "nothing"])
def test_after_close_comes_once_however_fit_ends(fails: str) -> None:
    log: list[str] = []

    def note(moment: str, exception: object) -> None:
        log.append(f"{moment} {exception}")
        if fails == moment:
            raise ZeroDivisionError(f"of {moment}")

    hook = at(
        end=lambda session: note("end", None),
        after_close=lambda exception: note("after_close", exception),
    )
    with nullcontext() if fails == "nothing" else pytest.raises(ZeroDivisionError, match=fails):
        fit(linear_model(), [hook])
    assert log == ["end None", f"after_close {'of end' if fails == 'end' else None}"]


def test_what_hooks_raise_and_wrong_requests_are_errors_of_fit() -> None:
    for hook, error, message in (
        (at(after_run=raising(ZeroDivisionError("bad"))), ZeroDivisionError, "bad"),
        (Losses("nope"), FetchError, "'nope' is not among"),
        (FeedFnHook(lambda: {"x": 1}), ValueError, "Keras feeds its batches itself"),
        (GlobalStepWaiterHook(5), StepUnreachableError, "5"),
    ):
        with pytest.raises(error, match=message) as caught:
            fit(linear_model(), [hook])
        if error is ZeroDivisionError:
            assert "in after_run of At" in caught.value.__notes__
    with pytest.raises(TypeError, match="hooks is the hook"):
        HooksCallback(RecordingHook("a"))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["own", "asyncio", "trio"])
def test_every_moment_is_awaited_in_the_session_s_graph(backend: Any) -> None:
    model, log = counting_model(), []  # type: tuple[Model, list[Any]]

    async def note(*what: Any) -> None:
        await anyio.lowlevel.checkpoint()
        assert v1.get_default_graph() is model.graph
        log.append(what)

    async def before_run(run_context: Any) -> SessionRunArgs:
        await note(run_context.step_is_made)
        return SessionRunArgs({"x": [model.train_op]})

    hook = at(
        begin=lambda: note("begin"),
        after_create_session=lambda raw, coord: note(raw.global_step.value, raw.run(model.step)),
        before_run=before_run,
        after_run=lambda context, values: note(context.step_is_made, values.results, context.step),
        end=lambda session: note("end", session.run(model.step)),
    )
    with ExitStack() as stack:
        portal = None
        if backend != "own":
            portal = stack.enter_context(anyio.from_thread.start_blocking_portal(backend))
        theirs = sync_hook(hook, portal=portal)
        for _ in range(2):
            assert train(model, [theirs], runs=2) == [1, 2]
            assert portal or not hook_threads(), "the event loop has ended with `end`"
    runs = [(False,), (True, {"x": [1]}, 1), (False,), (True, {"x": [2]}, 2)]
    assert log == [("begin",), (0, 0), *runs, ("end", 2)] * 2


def test_a_waiter_sees_steps_that_others_make() -> None:
    """Two of TensorFlow's sessions in two threads, on one in-process server."""
    server, model, started = v1.train.Server.create_local_server(), counting_model(), []

    def waiting_worker() -> None:
        with model.graph.as_default():
            creator = v1.train.ChiefSessionCreator(master=server.target)
            hooks = [sync_hook(GlobalStepWaiterHook(3))]
            with v1.train.MonitoredSession(creator, hooks) as session:
                started.append(session.run(model.step))

    waits, thread = threading.Event(), threading.Thread(target=waiting_worker)
    with model.graph.as_default(), v1.Session(server.target) as session:
        with listening("Waiting for global step 3", waits.set):
            thread.start()
            assert waits.wait(60)
        while thread.is_alive():
            session.run(model.train_op)
    assert started[0] >= 3


def test_a_wait_ends_when_tensorflow_s_coordinator_is_stopped() -> None:
    stopped: list[bool] = []

    async def wait(run_context: Any) -> None:
        try:
            await run_context.global_step.wait_for(1000)
        except StopTraining:
            stopped.append(True)
            raise

    stops = TheirMoments(after_create_session=lambda session, coord: coord.request_stop())
    model, hooks = counting_model(), [stops, sync_hook(at(before_run=wait))]
    with model.graph.as_default(), v1.train.MonitoredSession(hooks=hooks) as session:
        session.run(model.train_op)
    assert stopped == [True]


def test_what_sync_hook_cannot_use_is_refused() -> None:
    graph = tf.Graph()
    with graph.as_default():
        model = Model(graph, None, tf.no_op())
    with pytest.raises(RuntimeError, match="should be created to use StopAtStepHook"):
        train(model, [StopAtStepHook(last_step=5)])
    wrong: Any
    for wrong in (None, StopAtStepHook, v1.train.StopAtStepHook(last_step=3)):
        with pytest.raises(TypeError, match="give an instance of asynchooks.SessionRunHook"):
            sync_hook(wrong)
    with pytest.raises(TypeError, match="start_blocking_portal"):
        sync_hook(StopAtStepHook(last_step=3), portal="trio")  # type: ignore[arg-type]


def request(kind: Any, moment: str = "") -> Any:
    """A hook that asks for a stop in one moment, and notes whether one was asked for."""
    seen: list[bool] = []

    def look(now: str) -> Callable[..., None]:
        def play(run_context: Any, run_values: Any = None) -> None:
            seen.append(run_context.stop_requested)
            if now == moment:
                run_context.request_stop()

        return play

    hook = kind(before_run=look("before_run"), after_run=look("after_run"))
    hook.seen = seen
    return hook


@pytest.mark.parametrize("moment", ["before_run", "after_run"])
@pytest.mark.parametrize("asks", [TheirMoments, at])
@pytest.mark.parametrize("looks", [TheirMoments, at])
def test_a_stop_that_one_hook_asks_for_is_seen_by_all_in_that_run(
    looks: Any, asks: Any, moment: str
) -> None:
    hooks = [request(looks), request(asks, moment), request(looks)]
    assert train(counting_model(), hooks) == [1]
    is_early = moment == "before_run"
    assert [each.seen for each in hooks] == [[False, is_early]] * 2 + [[is_early, True]]
