"""MonitoredTrainingSession and SingularMonitoredSession: their hooks, and their differences."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from asynchooks import SessionRunHook, StopAtStepHook
from asynchooks.testing import RecordingHook
from asynchooks.tf import MonitoredTrainingSession, SingularMonitoredSession, WorkerSessionCreator

from .hooks_beside import model_of_one_seed
from .leftovers import Left, differences, read_back
from .models import (
    Created,
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


def made(hooks: list[Any]) -> list[tuple[Any, ...]]:
    """The names of the hooks, and after how many seconds or steps each is due."""
    found = []
    for hook in hooks:
        timer = getattr(hook, "_timer", None)
        times = () if timer is None else (timer._every_secs, timer._every_steps)
        found.append((type(hook).__name__, *times))
    return found


FIRST_AND_LAST = ("First", "First", "Last")


def named(name: str, base: type[Any] = SessionRunHook) -> Any:
    """A hook of a class with this name."""
    return type(name, (base,), {})()


def ours_makes(**options: Any) -> list[tuple[Any, ...]]:
    first, second, last = map(named, FIRST_AND_LAST)
    with counting_model().graph.as_default():
        session = MonitoredTrainingSession(
            hooks=[last], chief_only_hooks=[first, second], **options
        )
    return made(list(session._hooks.hooks))


def theirs_makes(**options: Any) -> list[tuple[Any, ...]]:
    first, second, last = (named(each, v1.train.SessionRunHook) for each in FIRST_AND_LAST)
    with counting_model().graph.as_default():
        session = v1.train.MonitoredTrainingSession(
            hooks=[last], chief_only_hooks=[first, second], **options
        )
        session.close()
    return made(session._hooks)


COUNTER, SUMMARIES = ("StepCounterHook", None, 100), ("SummarySaverHook", None, 100)
SAVER = ("CheckpointSaverHook", 600, None)

TABLE: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {
    "defaults": ({}, [COUNTER, SUMMARIES, SAVER]),
    "no directory": ({"checkpoint_dir": None}, []),
    "only summary_dir": ({"checkpoint_dir": None, "summary_dir": "s"}, [COUNTER, SUMMARIES]),
    "log 7": ({"log_step_count_steps": 7}, [("StepCounterHook", None, 7), SUMMARIES, SAVER]),
    **{f"log {off}": ({"log_step_count_steps": off}, [SUMMARIES, SAVER]) for off in (None, 0, -1)},
    **{f"summaries {off}": ({"save_summaries_steps": off}, [COUNTER, SAVER]) for off in (None, 0)},
    "summaries secs 0": ({"save_summaries_secs": 0}, [COUNTER, SAVER]),
    "summaries both none": (
        {"save_summaries_steps": None, "save_summaries_secs": None},
        [COUNTER, SAVER],
    ),
    "summaries by secs": (
        {"save_summaries_secs": 5},
        [COUNTER, ("SummarySaverHook", 5, None), SAVER],
    ),
    "summaries by steps": (
        {"save_summaries_steps": 5},
        [COUNTER, ("SummarySaverHook", None, 5), SAVER],
    ),
    "checkpoints None": ({"save_checkpoint_secs": None}, [COUNTER, SUMMARIES]),
    "checkpoints 0": ({"save_checkpoint_secs": 0}, [COUNTER, SUMMARIES]),
    "checkpoints steps none": ({"save_checkpoint_steps": None}, [COUNTER, SUMMARIES]),
    **{
        f"checkpoints by steps {more}": (
            {"save_checkpoint_steps": 9, **more},
            [COUNTER, SUMMARIES, ("CheckpointSaverHook", None, 9)],
        )
        for more in ({}, {"save_checkpoint_secs": None})
    },
    "nothing": (
        {"save_checkpoint_secs": 0, "save_summaries_steps": 0, "log_step_count_steps": 0},
        [],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_hooks_of_a_chief_and_their_order_are_tensorflows(case: str, tmp_path: Path) -> None:
    options, between = TABLE[case]
    options = {"checkpoint_dir": str(tmp_path), **options}
    if "summary_dir" in options:
        options["summary_dir"] = str(tmp_path / options["summary_dir"])
    assert ours_makes(**options) == [("First",), ("First",), *between, ("Last",)]
    assert ours_makes(**options) == theirs_makes(**options)


@pytest.mark.parametrize("name", ["save_summaries", "save_checkpoint"])
def test_steps_and_seconds_together_are_an_error(name: str, tmp_path: Path) -> None:
    both = {"checkpoint_dir": str(tmp_path), f"{name}_steps": 5, f"{name}_secs": 6}
    with pytest.raises(ValueError, match=f"{name}_steps=5 and {name}_secs=6; give one"):
        ours_makes(**both)
    with pytest.raises(ValueError, match="Can not provide both every_secs and every_steps"):
        theirs_makes(**both)


def test_zero_turns_one_of_both_off(tmp_path: Path) -> None:
    options = {"save_summaries_steps": 0, "save_summaries_secs": 5, "save_checkpoint_secs": 0}
    hooks = ours_makes(checkpoint_dir=str(tmp_path), save_checkpoint_steps=3, **options)
    assert hooks[3:5] == [("SummarySaverHook", 5, None), ("CheckpointSaverHook", None, 3)]


async def test_a_worker_gets_hooks_alone_and_ignores_the_directories(tmp_path: Path) -> None:
    hook, others, directory = RecordingHook("a"), [named("First")], str(tmp_path / "new")
    graph = tf.Graph()
    with graph.as_default():  # without variables it is ready at once
        seven = tf.constant(7)
        session = MonitoredTrainingSession(
            is_chief=False, checkpoint_dir=directory, hooks=[hook], chief_only_hooks=others
        )
    assert session._hooks.hooks == [hook]
    async with session:
        assert await session.run(seven) == 7
    assert os.listdir(tmp_path) == []


async def test_a_worker_without_a_chief_gives_up_after_max_wait_secs(tmp_path: Path) -> None:
    with counting_model().graph.as_default():
        session = MonitoredTrainingSession(is_chief=False, max_wait_secs=0)
    with pytest.raises(tf.errors.DeadlineExceededError, match="max_wait_secs=0"):
        await session.__aenter__()


def test_a_worker_waits_two_hours_by_default_and_its_creator_alone_half_an_hour() -> None:
    with counting_model().graph.as_default():
        creator = MonitoredTrainingSession(is_chief=False)._handle.creator
        assert isinstance(creator, WorkerSessionCreator)
        assert creator.max_wait_secs == 7200
        assert WorkerSessionCreator().max_wait_secs == 1800


FAST = {"save_checkpoint_steps": 5, "save_summaries_steps": 4, "log_step_count_steps": 3}


def run_theirs(directory: Path, last_step: int, steps: list[int], **options: Any) -> None:
    model = model_of_one_seed()
    with model.graph.as_default():
        hooks = [v1.train.StopAtStepHook(last_step=last_step)]
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(directory), hooks=hooks, **{**FAST, **options}
        ) as session:
            while not session.should_stop():
                steps.append(int(session.run([model.read, model.train_op])[0]))


async def run_ours(directory: Path, last_step: int, steps: list[int], **options: Any) -> None:
    model = model_of_one_seed()
    with model.graph.as_default():
        session = MonitoredTrainingSession(
            checkpoint_dir=str(directory),
            hooks=[StopAtStepHook(last_step=last_step)],
            **{**FAST, **options},
        )
    async with session:
        while not session.should_stop():
            steps.append(int((await session.run([model.read, model.train_op]))[0]))


@pytest.mark.parametrize(
    ("saves_graph", "last_steps"),
    [
        pytest.param(True, [12], id="one run", marks=pytest.mark.exhaustive),
        pytest.param(False, [12], id="one run without the graph"),
        pytest.param(True, [7, 13], id="and one that resumes"),
        pytest.param(False, [7, 13], id="and one without the graph", marks=pytest.mark.exhaustive),
    ],
)
async def test_both_scripts_leave_the_same_files(
    last_steps: list[int], saves_graph: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tensorflow")
    caplog.set_level(logging.INFO, "asynchooks")
    left: list[Left] = []
    for run in (run_theirs, run_ours):
        steps: list[int] = []
        directory = tmp_path / run.__name__
        for last_step in last_steps:
            done: Any = run(directory, last_step, steps, save_graph_def=saves_graph)
            if done is not None:
                await done
        left.append(read_back(directory, steps, [], caplog))
    assert "\n".join(differences(left[1], left[0])) == ""
    last, files = last_steps[-1], set(left[1].files)
    assert left[1].outcome == list(range(last))
    assert {"checkpoint", f"model.ckpt-{last}.index"} <= files
    graphs = {"graph.pbtxt", f"model.ckpt-{last}.meta"}
    assert (
        graphs <= files
        if saves_graph
        else not [name for name in files if name.endswith((".pbtxt", ".meta"))]
    )
    assert len(left[1].events) == 1 or len(last_steps) > 1


async def test_summaries_go_to_summary_dir(tmp_path: Path) -> None:
    await run_ours(tmp_path, 6, [], summary_dir=str(tmp_path / "summaries"))
    v1.summary.FileWriterCache.clear()
    whats = []
    for directory in (tmp_path, tmp_path / "summaries"):
        (name,) = [name for name in os.listdir(directory) if "tfevents" in name]
        events = list(v1.train.summary_iterator(str(directory / name)))
        whats.append({event.WhichOneof("what") for event in events})
    assert ["summary" in each for each in whats] == [False, True]


async def test_intervals_of_hooks_that_are_not_made_are_not_looked_at(tmp_path: Path) -> None:
    both: dict[str, Any] = {"save_checkpoint_steps": 1, "save_checkpoint_secs": 1}
    both["save_summaries_steps"] = 1
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        MonitoredTrainingSession(**both, save_summaries_secs=1)
        MonitoredTrainingSession(is_chief=False, checkpoint_dir=str(tmp_path), **both)
        with pytest.raises(ValueError, match="save_checkpoint_steps=1 and save_checkpoint_secs=1"):
            MonitoredTrainingSession(checkpoint_dir=str(tmp_path), **both)


LOST = [aborted(), unavailable()]


def singular(model: Model, hooks: Any = None, **options: Any) -> SingularMonitoredSession:
    with model.graph.as_default():
        return SingularMonitoredSession(hooks, **options)


class Script(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Under both sessions: logs each moment, and raises or reports an error at one of them."""

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


@pytest.mark.exhaustive
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
    created = Created()
    with pytest.raises(OSError, match="a thread") as caught:
        async with singular(model, [recorder, created]) as session:
            assert not session.should_stop()
            created.coords[0].request_stop(held)
            with pytest.raises(OSError, match="a thread"):
                session.should_stop()
            assert await session.run(model.train_op) == 1
    assert caught.value is held
    assert ("a", "end") in recorder.log
    assert session.should_stop(), "closed"


@pytest.mark.parametrize("error", LOST)
async def test_a_preemption_that_is_held_at_the_end_is_raised(error: Exception) -> None:
    model, created = counting_model(), Created()
    session = singular(model, [created])
    await session.__aenter__()
    created.coords[0].request_stop(error)
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
