"""HooksCallback: coroutine hooks in Keras's fit."""

from __future__ import annotations

import math
import threading
from typing import Any

import anyio
import anyio.from_thread
import numpy as np
import pytest

import asynchooks
from asynchooks import (
    FeedFnHook,
    NanLossDuringTrainingError,
    NanTensorHook,
    SessionRunArgs,
    SessionRunHook,
    StepUnreachableError,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook

pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
HooksCallback = asynchooks.HooksCallback
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
    assert not [each for each in threading.enumerate() if each.name == "asynchooks-hooks"]


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


def test_a_hook_that_asks_to_stop_ends_fit() -> None:
    class Stop(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            if run_context.global_step.value == 3:
                run_context.request_stop()

    model = linear_model()
    other = RecordingHook("other")
    fit(model, [Stop(), other], epochs=3)
    assert int(model.optimizer.iterations) == 3
    assert other.log[-1] == ("other", "end")


def test_an_error_of_a_hook_leaves_fit_as_itself() -> None:
    model = linear_model()
    other = RecordingHook("other")
    model.layers[0].build((None, 4))
    model.layers[0].kernel.assign(np.full((4, 1), math.nan))
    with pytest.raises(NanLossDuringTrainingError) as caught:
        fit(model, [other, NanTensorHook("loss")])
    assert "in after_run of NanTensorHook" in caught.value.__notes__
    assert other.errors == [caught.value]
    assert ("other", "end") not in other.log
    assert not [each for each in threading.enumerate() if each.name == "asynchooks-hooks"]


def test_as_a_context_manager_it_passes_errors_of_fit_to_hooks() -> None:
    class Bad(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise ZeroDivisionError("of Keras")

    hook = RecordingHook("a")
    with pytest.raises(ZeroDivisionError), HooksCallback([hook]) as callback:
        linear_model().fit(INPUTS, TARGETS, verbose=0, callbacks=[Bad(), callback])
    assert [repr(error) for error in hook.errors] == ["ZeroDivisionError('of Keras')"]


def test_an_error_of_a_side_task_ends_fit_and_leaves_after_end() -> None:
    class Sides(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            coord.start_soon(self.fail)

        async def fail(self) -> None:
            raise ZeroDivisionError("in a side task")

        async def before_run(self, run_context: Any) -> None:
            await anyio.wait_all_tasks_blocked()

    model = linear_model()
    other = RecordingHook("other")
    with pytest.raises(ZeroDivisionError, match="in a side task"):
        fit(model, [Sides(), other], epochs=3)
    assert int(model.optimizer.iterations) == 1
    assert ("other", "end") in other.log


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


def test_the_end_of_a_hook_s_input_ends_fit_without_the_batch() -> None:
    class Input(SessionRunHook):
        def __init__(self) -> None:
            self.items = iter([1, 2])

        async def before_run(self, run_context: Any) -> None:
            next(self.items)

    model = linear_model()
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        fit(model, [Input()], epochs=3)
    assert int(model.optimizer.iterations) == 2


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


def test_a_stop_while_a_hook_waits_ends_fit_cleanly() -> None:
    class Waits(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            self.coord = coord

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            self.coord.request_stop()
            await run_context.global_step.wait_for(1000)

    model = linear_model()
    other = RecordingHook("other")
    fit(model, [Waits(), other], epochs=3)
    assert int(model.optimizer.iterations) == 1
    assert other.log[-1] == ("other", "end")


def test_a_fit_that_failed_outside_the_hooks_is_ended_by_the_next_one() -> None:
    class Bad(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise ZeroDivisionError("of Keras")

    running: list[int] = []

    class Sides(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            coord.start_soon(self.work, coord)

        async def work(self, coord: Any) -> None:
            running.append(1)
            await coord.wait_stopped()
            running.pop()

    model, other = linear_model(), RecordingHook("other")
    callback = HooksCallback([Sides(), other])
    with pytest.raises(ZeroDivisionError):
        model.fit(INPUTS, TARGETS, verbose=0, callbacks=[Bad(), callback])
    assert running == [1]
    model.fit(INPUTS, TARGETS, verbose=0, callbacks=[callback])
    assert running == []
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
