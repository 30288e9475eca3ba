"""SingularMonitoredSession: it never recovers, and shows the session that it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asynchooks import Coordinator
from asynchooks.testing import RecordingHook
from asynchooks.tf import SingularMonitoredSession

from .models import (
    Model,
    Moments,
    aborted,
    checkpoint_of,
    counting_model,
    out_of_range,
    raising,
    unavailable,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

LOST = [aborted(), unavailable()]


def singular(model: Model, hooks: Any = None, **options: Any) -> SingularMonitoredSession:
    with model.graph.as_default():
        return SingularMonitoredSession(hooks, **options)


class Script(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Under both sessions: tells each moment, and raises or reports an error at one of them."""

    def __init__(self, act: str, error: Exception) -> None:
        self.act, self.error = act, error
        self.log: list[Any] = []

    def play(self, moment: str) -> None:
        self.log.append(moment)
        if moment == self.act and self.log.count(moment) == 1:
            raise self.error

    def begin(self) -> None:
        self.play("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.coord = coord
        self.play("after_create_session")

    def before_run(self, run_context: Any) -> None:
        self.play("before_run")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.play("after_run")
        if self.act == "report" and self.log.count("after_run") == 2:
            try:  # TensorFlow's coordinator takes nothing that was not raised
                raise self.error
            except Exception as error:
                self.coord.request_stop(error)

    def end(self, session: Any) -> None:
        self.play("end")


def asked(session: Any) -> Any:
    try:
        return session.should_stop()
    except Exception as error:
        return type(error).__name__


def under_tensorflows(script: Script) -> None:
    model = counting_model()
    with model.graph.as_default():
        try:
            with v1.train.SingularMonitoredSession([script]) as session:
                raw = session.raw_session()
                for _ in range(3):
                    try:
                        script.log.append(session.run(model.train_op))
                    except tf.errors.OpError as error:
                        script.log.append(type(error).__name__)
                    script.log.append((asked(session), session.raw_session() is raw))
            script.log.append((session.graph, session.raw_session(), asked(session)))
        except Exception as error:
            script.log.append(("left with", type(error).__name__))


async def under_ours(script: Script) -> None:
    model = counting_model()
    session = singular(model, [script])
    try:
        async with session:
            raw = session.raw_session()
            for _ in range(3):
                try:
                    script.log.append(await session.run(model.train_op))
                except tf.errors.OpError as error:
                    script.log.append(type(error).__name__)
                script.log.append((asked(session), session.raw_session() is raw))
        script.log.append((session.graph, session.raw_session(), asked(session)))
    except Exception as error:
        script.log.append(("left with", type(error).__name__))


ACTS = ["begin", "after_create_session", "before_run", "after_run", "end", "report", "nothing"]


@pytest.mark.parametrize("error", [aborted(), out_of_range(), ZeroDivisionError("a bug")])
@pytest.mark.parametrize("act", ACTS)
async def test_errors_do_what_they_do_under_tensorflows_class(act: str, error: Exception) -> None:
    its, mine = Script(act, error), Script(act, error)
    under_tensorflows(its)
    await under_ours(mine)
    if act == "report":  # ours ends the block by the next run; theirs goes on
        third = its.log.index(3)
        assert its.log[third - 2 : third] == ["before_run", "after_run"]
        del its.log[third - 2 : third + 2]
    assert type(error).__name__ in str(its.log) or act == "nothing"
    assert mine.log == its.log


@pytest.mark.parametrize("error", LOST)
@pytest.mark.parametrize("moment", ["before_run", "after_run"])
async def test_a_lost_session_leaves_run_and_stays_as_it_is(moment: str, error: Exception) -> None:
    model, recorder = counting_model(), RecordingHook("a")
    failing: dict[str, Any] = {moment: raising(error)}
    async with singular(model, [recorder, Moments(**failing)]) as session:
        raw = session.raw_session()
        with pytest.raises(type(error)) as caught:
            await session.run(model.train_op)
        assert caught.value is error
        assert not session.should_stop()
        assert session.raw_session() is raw
        assert await session.run(model.train_op) == (1 if moment == "before_run" else 2)
    assert recorder.log.count(("a", "after_create_session")) == 1


@pytest.mark.parametrize("error", LOST)
async def test_an_error_of_init_fn_leaves_at_the_first_try(error: Exception) -> None:
    model = counting_model()
    tries: list[Any] = []

    def init_fn(scaffold: Any, session: Any) -> None:
        tries.append(session)
        raise error

    with model.graph.as_default():
        scaffold = v1.train.Scaffold(init_fn=init_fn)
    session = singular(model, scaffold=scaffold)
    with pytest.raises(type(error)) as caught:
        await session.__aenter__()
    assert caught.value is error
    assert len(tries) == 1
    assert session.raw_session() is None


async def test_should_stop_raises_what_the_coordinator_holds_and_so_does_the_end() -> None:
    model, held, recorder = counting_model(), OSError("a thread"), RecordingHook("a")
    coords: list[Coordinator] = []
    hooks = [recorder, Moments(created=lambda session, coord: coords.append(coord))]
    with pytest.raises(OSError, match="a thread") as caught:
        async with singular(model, hooks) as session:
            assert not session.should_stop()
            coords[0].request_stop(held)
            with pytest.raises(OSError, match="a thread"):
                session.should_stop()
            assert await session.run(model.train_op) == 1
    assert caught.value is held
    assert ("a", "end") in recorder.log
    assert session.should_stop(), "closed"


@pytest.mark.parametrize("error", LOST)
async def test_a_preemption_that_is_held_at_the_end_is_raised(error: Exception) -> None:
    model = counting_model()
    coords: list[Coordinator] = []
    session = singular(model, [Moments(created=lambda session, coord: coords.append(coord))])
    await session.__aenter__()
    coords[0].request_stop(error)
    with pytest.raises(type(error)) as caught:
        await session.close()
    assert caught.value is error
    assert session.raw_session() is None


async def test_the_raw_session_runs_without_hooks_and_saves(tmp_path: Path) -> None:
    model, recorder = counting_model(), RecordingHook("a")
    with model.graph.as_default():
        saver = v1.train.Saver()
    async with singular(model, [recorder]) as session:
        raw = session.raw_session()
        assert isinstance(raw, v1.Session)
        assert session.graph is model.graph
        assert [raw.run(model.train_op) for _ in range(3)] == [1, 2, 3]
        assert recorder.log == [("a", "begin"), ("a", "after_create_session")]
        with session.graph.as_default():
            path = saver.save(raw, str(tmp_path / "own"))
        await session.run(model.train_op)
        with session.graph.as_default():
            saver.restore(raw, path)
        assert await session.run(model.train_op) == 4
    assert session.graph is None
    assert session.raw_session() is None
    async with singular(model, checkpoint_filename_with_path=path) as session:
        assert session.global_step.value == 3


async def test_it_restores_the_newest_checkpoint_of_the_directory_or_the_one_named(
    tmp_path: Path,
) -> None:
    model = counting_model()
    older, _ = [checkpoint_of(model, tmp_path, step) for step in (3, 7)]
    async with singular(model, checkpoint_dir=str(tmp_path)) as session:
        assert await session.run(model.train_op) == 8
    async with singular(model, checkpoint_filename_with_path=older) as session:
        assert await session.run(model.train_op) == 4
