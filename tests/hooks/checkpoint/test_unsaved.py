"""CheckpointSaverHook: what is said where trained steps are in no checkpoint, and are replaced."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from anyio.abc import TaskStatus

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    FunctionSessionCreator,
    MonitoredSession,
    NanLossDuringTrainingError,
    NanTensorHook,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
)

pytestmark = pytest.mark.anyio

ADVICE = (
    "end training by session.request_stop(), or by a Ctrl-C or signal that a PreemptionHook() "
    "handles: both save the last step"
)


class Model:
    """Weights that count the steps."""

    def __init__(self) -> None:
        self.w = np.zeros(1)

    def step(self) -> dict[str, float]:
        self.w += 1.0
        return {"loss": 0.5}

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w.copy()}

    def load_state_dict(self, state: Any) -> None:
        self.w[:] = state["w"]


class OwnSaver:
    """A saver that is the program's."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def save(self, path: str) -> None:
        Path(path).write_text(str(self.model.w[0]))

    def restore(self, path: str) -> None:
        self.model.w[:] = float(Path(path).read_text())


class TangledSaver(OwnSaver):
    """What it holds holds itself."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.parts: dict[str, Any] = {"model": model}
        self.parts["all"] = [self.parts]


SAVERS: dict[str, Callable[[Model], Any]] = {
    "an object": lambda model: StateDictSaver(model=model),
    "arrays": lambda model: StateDictSaver(state={"w": model.w, "nested": {"parts": [model.w]}}),
    "a saver of the program": OwnSaver,
    "one that holds itself": TangledSaver,
}
savers = pytest.mark.parametrize("saver_of", SAVERS.values(), ids=SAVERS)


def saving(directory: Path, model: Model, save_steps: int = 10, **options: Any) -> Any:
    saver = options.pop("saver", None) or StateDictSaver(model=model)
    return CheckpointSaverHook(directory, save_steps=save_steps, saver=saver, **options)


def session_of(model: Model, *hooks: Any) -> MonitoredSession:
    return MonitoredSession(hooks, FunctionSessionCreator(model.step))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "asynchooks" and record.levelno >= logging.WARNING
    ]


async def interrupted(session: MonitoredSession, num_steps: int) -> None:
    """Run steps; then cancel the task, as a notebook's stop button does."""
    with anyio.CancelScope() as scope:
        async with session:
            for _ in range(num_steps):
                await session.run([])
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_cancellation_says_how_many_steps_are_not_saved_and_what_saves_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    await interrupted(session_of(model, saving(tmp_path, model)), 13)
    assert warnings(caplog) == [
        f"Training was cancelled at step 13. The newest checkpoint in {tmp_path} is of step 10: 3 "
        f"steps are not saved. To keep such steps, {ADVICE}"
    ]


EXITS = [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), ValueError("diverged")]


@pytest.mark.parametrize("error", EXITS, ids=repr)
async def test_any_other_end_names_what_ended_training(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    with pytest.raises(type(error)):
        async with session_of(model, saving(tmp_path, model)) as session:
            await session.run([])
            raise error
    advice = f"To keep such steps, {ADVICE}"
    if isinstance(error, Exception):
        advice = "Save more often to lose fewer"
    assert warnings(caplog) == [
        f"Training was ended by {error!r} at step 1. The newest checkpoint in {tmp_path} is of "
        f"step 0: 1 step is not saved. {advice}"
    ]


async def test_a_generator_that_is_closed_says_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()

    async def losses() -> AsyncIterator[float]:
        async with session_of(model, saving(tmp_path, model)) as session:
            while True:
                yield await session.run("loss")

    generator = losses()
    assert await anext(generator) == 0.5
    await generator.aclose()  # type: ignore[attr-defined]
    [warning] = warnings(caplog)
    assert warning.startswith("Training was ended by GeneratorExit() at step 1.")


async def test_a_dropped_session_says_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    sessions = [await session_of(model, saving(tmp_path, model)).open()]
    await sessions[0].run([])
    with pytest.warns(ResourceWarning, match="nothing was saved at the end"):
        sessions.clear()
    [warning] = warnings(caplog)
    assert warning.startswith("A session was dropped at step 1. The newest checkpoint in")
    assert warning.endswith("open sessions by `async with`, or `await session.close()`")


class FailsAtEnd(SessionRunHook):
    async def end(self, session: Any) -> None:
        raise ValueError("of end")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("ending", ["just saved", "no step", "clean", "end fails"])
async def test_nothing_is_said_where_nothing_is_unsaved(
    ending: str, background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, hooks = Model(), list[Any]()
    if ending == "end fails":
        hooks = [FailsAtEnd()]
    session = session_of(model, *hooks, saving(tmp_path, model, background=background))
    if ending == "clean":
        async with session:
            for _ in range(13):
                await session.run([])
    elif ending == "end fails":
        with pytest.raises(ValueError, match="of end"):
            async with session:
                await session.run([])
    else:
        await interrupted(session, 0 if ending == "no step" else 20)
    assert warnings(caplog) == []


class Slow(OwnSaver):
    """Saves in a thread, which waits there at step 10."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def save(self, path: str) -> None:
        if not self.has_begun.is_set() and self.model.w[0] == 10:
            self.has_begun.set()
            assert self.may_go_on.wait(30)
        super().save(path)


class SlowToWrite(Slow):
    """Takes a copy first."""

    def snapshot(self) -> Callable[[str], None]:
        return self.save


@pytest.mark.parametrize("kind", [Slow, SlowToWrite])
async def test_a_save_that_a_cancellation_comes_upon_counts(
    kind: type[Slow], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    saver = kind(model)
    session = session_of(model, saving(tmp_path, model, saver=saver))

    async def train() -> None:
        async with session:
            while True:
                await session.run([])

    async with anyio.create_task_group() as group:
        group.start_soon(train)
        await anyio.to_thread.run_sync(saver.has_begun.wait, 30)
        group.cancel_scope.cancel()
        saver.may_go_on.set()
    assert warnings(caplog) == []
    async with session_of(model, saving(tmp_path, model, saver=saver)) as again:
        assert again.global_step.value == 10


async def test_steps_since_the_last_write_that_succeeded_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(OwnSaver):
        def save(self, path: str) -> None:
            if self.model.w[0] == 20:
                raise OSError("the disk is full")
            super().save(path)

    model = Model()
    with pytest.raises((OSError, CheckpointError)):
        async with session_of(model, saving(tmp_path, model, saver=Full(model))) as session:
            for _ in range(20):
                await session.run([])
    last = warnings(caplog)[-1]
    assert f"The newest checkpoint in {tmp_path} is of step 10: 10 steps are not saved" in last


async def test_nothing_is_said_of_steps_that_are_not_worth_saving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def step() -> dict[str, float]:
        return {"loss": float("nan")}

    model = Model()
    hooks = [saving(tmp_path, model), NanTensorHook("loss")]
    with pytest.raises(NanLossDuringTrainingError):
        async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
            await session.run([])
    assert not any("not saved. " in each for each in warnings(caplog))


async def test_workers_of_one_model_say_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    creator = SharedSessionCreator(FunctionSessionCreator(model.step), num_workers=3)

    async def work(number: int, *, task_status: TaskStatus[None]) -> None:
        async with MonitoredSession([saving(tmp_path / str(number), model)], creator) as session:
            await session.run([])
            task_status.started()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        for number in range(3):
            await group.start(work, number)
        group.cancel_scope.cancel()
    assert len(warnings(caplog)) == 1


async def test_a_worker_that_leaves_after_a_later_save_says_it_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    creator = SharedSessionCreator(FunctionSessionCreator(model.step))
    async with MonitoredSession([], creator):
        for num_steps in (3, 2):  # the second one saves as it opens
            hook = saving(tmp_path / str(num_steps), model)
            await interrupted(MonitoredSession([hook], creator), num_steps)
    said = [each.split(": ")[1].split(".")[0] for each in warnings(caplog)]
    assert said == ["3 steps are not saved", "2 steps are not saved"]


async def test_of_two_savers_of_one_model_the_newest_checkpoint_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    often = saving(tmp_path / "often", model, 5)
    seldom = saving(tmp_path / "seldom", model, 100)
    await interrupted(session_of(model, seldom, often), 12)
    [warning] = warnings(caplog)
    assert f"The newest checkpoint in {tmp_path / 'often'} is of step 10: 2 steps are" in warning


async def test_a_model_that_was_left_is_freed(tmp_path: Path) -> None:
    model = Model()
    await interrupted(session_of(model, saving(tmp_path, model)), 3)
    left = weakref.ref(model)
    del model
    await anyio.lowlevel.checkpoint()
    gc.collect()
    assert left() is None


@pytest.fixture
def graph() -> Iterator[Any]:
    tf = pytest.importorskip("tensorflow")
    with tf.Graph().as_default():
        yield tf


@pytest.mark.tensorflow
async def test_steps_of_a_graph_count_too(
    graph: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    v1 = graph.compat.v1
    step = v1.assign_add(v1.train.get_or_create_global_step(), 1)
    hook = CheckpointSaverHook(str(tmp_path), save_steps=10, saver=v1.train.Saver())
    with anyio.CancelScope() as scope:
        async with MonitoredSession([hook]) as session:
            for _ in range(3):
                await session.run(step)
            scope.cancel()
            await anyio.sleep_forever()
    [warning] = [each for each in warnings(caplog) if "cancelled" in each]
    assert f"The newest checkpoint in {tmp_path} is of step 0: 3 steps are not saved" in warning
