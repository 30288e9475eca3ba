"""CheckpointSaverHook: checkpoints of one step, listeners, failed saves, event writers."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import asynchooks
from asynchooks import (
    CheckpointSaverListener,
    FunctionSessionCreator,
    MonitoredSession,
    SharedSessionCreator,
    StepCounterHook,
    StopAtStepHook,
)

from .models import (
    NUM_VARIABLES,
    ChiefSessionCreator,
    Moments,
    counting_model,
    model_of_equal_variables,
    monitored,
    saver_of,
)
from .test_background_checkpoints import background_hook, train

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
CheckpointSaverHook = asynchooks.CheckpointSaverHook
CHECKPOINT = v1.SessionLog.CHECKPOINT
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def saved_steps(directory: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("-")[2]) for path in directory.glob("*.index"))


async def test_a_checkpoint_holds_one_step_while_workers_run_in_threads(tmp_path: Path) -> None:
    model = model_of_equal_variables()
    saver = saver_of(model)
    shared = SharedSessionCreator(ChiefSessionCreator(), num_workers=4)
    saves: list[int] = []

    class Noting(asynchooks.CheckpointSaverListener):
        async def after_save(self, session: Any, global_step_value: int) -> None:
            saves.append(global_step_value)

    async def work(hooks: list[Any], group: Any = None) -> None:
        hooks = [StopAtStepHook(last_step=300), *hooks]
        async with monitored(model.graph, hooks, shared, step_runner="thread") as session:
            for _ in range(0 if group is None else 3):
                group.start_soon(work, [])
            while not session.should_stop():
                if group is None and session.global_step.value > 40 * len(saves):
                    await anyio.sleep(0.001)  # for the next checkpoint: several are looked at
                else:
                    await session.run(model.train_op)

    options = {"saver": saver, "listeners": [Noting()]}
    async with anyio.create_task_group() as group:
        await work([CheckpointSaverHook(str(tmp_path), save_steps=1, **options)], group)
    steps = saved_steps(tmp_path)
    assert steps[0] == 0
    assert steps[-1] == 300
    assert len(steps) >= 5
    for step in steps:
        checkpoint = tf.train.load_checkpoint(str(tmp_path / f"model.ckpt-{step}"))
        values = [checkpoint.get_tensor(f"v{index}").item() for index in range(NUM_VARIABLES)]
        assert values == [step] * NUM_VARIABLES
        assert checkpoint.get_tensor("global_step") == step


Log = list[tuple[Any, ...]]


class Told:
    """What all listeners of these tests write down: the moment, where and in which graph."""

    def __init__(self, name: str, graph: Any, log: Log) -> None:
        self.name = name
        self.graph = graph
        self.log = log
        self.loop_thread = threading.get_ident()

    def see(self, moment: str, step: int) -> None:
        is_default = v1.get_default_graph() is self.graph
        on_loop = threading.get_ident() == self.loop_thread
        self.log.append((self.name, moment, step, is_default, on_loop))


class Plain(Told, CheckpointSaverListener):
    def begin(self) -> None:  # type: ignore[override]
        self.see("begin", -1)

    def before_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self.see("before_save", global_step_value)

    def after_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self.see("after_save", global_step_value)

    def end(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self.see("end", global_step_value)


class TensorFlows(Told, v1.train.CheckpointSaverListener):  # type: ignore[misc, name-defined]
    begin = Plain.begin
    before_save = Plain.before_save
    after_save = Plain.after_save
    end = Plain.end


class Coroutines(Told, CheckpointSaverListener):
    async def begin(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.see("begin", -1)

    async def before_save(self, session: Any, global_step_value: int) -> None:
        await anyio.lowlevel.checkpoint()
        self.see("before_save", global_step_value)

    async def after_save(self, session: Any, global_step_value: int) -> None:
        await anyio.lowlevel.checkpoint()
        self.see("after_save", global_step_value)

    async def end(self, session: Any, global_step_value: int) -> None:
        await anyio.lowlevel.checkpoint()
        self.see("end", global_step_value)


async def test_listeners_of_all_kinds_are_called_in_order_each_in_its_place(tmp_path: Path) -> None:
    model = counting_model()
    log: Log = []
    listeners = [kind(kind.__name__, model.graph, log) for kind in (Plain, Coroutines, TensorFlows)]
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=2, saver=saver_of(model), listeners=iter(listeners)
    )
    async with monitored(model.graph, [hook]) as session:
        for _ in range(3):
            await session.run(model.train_op)
    moments = [("begin", -1)]
    for step in (0, 2, 3):
        moments += [("before_save", step), ("after_save", step)]
    moments.append(("end", 3))
    assert log == [
        (name, moment, step, True, moment == "begin" or name == "Coroutines")
        for moment, step in moments
        for name in ("Plain", "Coroutines", "TensorFlows")
    ]


async def test_listeners_may_read_the_model_and_see_all_of_the_saved_step(tmp_path: Path) -> None:
    model = counting_model()
    log: Log = []

    class Reads(CheckpointSaverListener):
        async def before_save(self, session: Any, global_step_value: int) -> None:
            log.append(("before", global_step_value, session.run(model.step).item()))
            log.append(("saved", saved_steps(tmp_path)))

        async def after_save(self, session: Any, global_step_value: int) -> None:
            log.append(("saved", saved_steps(tmp_path)))

    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=2, saver=saver_of(model), listeners=[Reads()]
    )
    async with monitored(model.graph, [hook]) as session:
        for _ in range(2):
            await session.run(model.train_op)
    assert log == [
        ("before", 0, 0),
        ("saved", []),
        ("saved", [0]),
        ("before", 2, 2),
        ("saved", [0]),
        ("saved", [0, 2]),
    ]


@pytest.mark.parametrize("answer", [True, 1, "yes"])
async def test_a_true_answer_stops_after_a_run_but_not_at_creation(
    answer: Any, tmp_path: Path
) -> None:
    class Stops(CheckpointSaverListener):
        async def after_save(self, session: Any, global_step_value: int) -> bool | None:
            stop: bool = answer
            return stop

    model = counting_model()
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=3, saver=saver_of(model), listeners=[Stops()]
    )
    async with monitored(model.graph, [hook]) as session:
        assert not session.should_stop()
        while not session.should_stop():
            await session.run(model.train_op)
    assert saved_steps(tmp_path) == [0, 3]


async def test_a_step_saved_already_is_not_saved_again_at_the_end(tmp_path: Path) -> None:
    model = counting_model()
    log: Log = []
    hook = CheckpointSaverHook(
        str(tmp_path),
        save_steps=2,
        saver=saver_of(model),
        listeners=[Plain("a", model.graph, log)],
    )
    async with monitored(model.graph, [hook]) as session:
        for _ in range(4):
            await session.run(model.train_op)
    assert [entry[2] for entry in log if entry[1] == "after_save"] == [0, 2, 4]
    assert log[-1][1:3] == ("end", 4)


async def test_a_function_session_has_no_graph_to_save(tmp_path: Path) -> None:
    hook = CheckpointSaverHook(str(tmp_path), save_steps=1)
    session = MonitoredSession([hook], FunctionSessionCreator(dict))
    with pytest.raises(RuntimeError, match="on a step function has nothing to save"):
        await session.__aenter__()
    assert saved_steps(tmp_path) == []


def test_saver_and_scaffold_exclude_each_other(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        scaffold = v1.train.Scaffold()
    with pytest.raises(ValueError, match=r"saver=.* and scaffold=.*; give one of them"):
        CheckpointSaverHook(str(tmp_path), save_steps=1, saver=saver_of(model), scaffold=scaffold)


@pytest.mark.parametrize("intervals", [{}, {"save_steps": 1, "save_secs": 1.0}])
def test_exactly_one_interval_is_wanted(intervals: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give exactly one"):
        CheckpointSaverHook(str(tmp_path), **intervals)


@pytest.mark.parametrize("listener", [object(), CheckpointSaverListener, None])
def test_what_is_no_listener_is_refused(listener: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="listeners holds .*CheckpointSaverListener"):
        CheckpointSaverHook(str(tmp_path), save_steps=1, listeners=[listener])


class FailsOnce(CheckpointSaverListener):
    """Raises at its n-th call of one moment."""

    def __init__(self, moment: str, nth: int) -> None:
        self._moment = moment
        self._left = nth
        self.steps: list[tuple[str, int]] = []

    async def before_save(self, session: Any, global_step_value: int) -> None:
        self._play("before_save", global_step_value)

    async def after_save(self, session: Any, global_step_value: int) -> None:
        self._play("after_save", global_step_value)

    def _play(self, moment: str, step: int) -> None:
        self.steps.append((moment, step))
        self._left -= moment == self._moment
        if self._left == 0 and moment == self._moment:
            raise ZeroDivisionError(moment)


async def test_a_save_that_fails_before_it_is_written_is_due_again(tmp_path: Path) -> None:
    model = counting_model()
    listener = FailsOnce("before_save", 2)
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=2, saver=saver_of(model), listeners=[listener]
    )
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        with pytest.raises(ZeroDivisionError, match="before_save") as caught:
            await session.run(model.train_op)
        assert caught.value.__notes__ == [
            "in the listener's FailsOnce.before_save",
            "in after_run of CheckpointSaverHook",
        ]
        assert saved_steps(tmp_path) == [0]
        await session.run(model.train_op)
        assert saved_steps(tmp_path) == [0, 3], "at the next run, not two steps later"
    assert saved_steps(tmp_path) == [0, 3]


class FailingSaver:
    """A saver whose n-th save fails before it writes anything."""

    def __init__(self, saver: Any, nth: int) -> None:
        self._saver = saver
        self._left = nth

    @property
    def saver_def(self) -> Any:
        return self._saver.saver_def

    def save(self, *args: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise tf.errors.ResourceExhaustedError(None, None, "the disk is full")
        return self._saver.save(*args, **options)


async def test_a_save_that_the_saver_fails_is_due_again(tmp_path: Path) -> None:
    model = counting_model()
    listener = FailsOnce("nothing", 0)
    hook = CheckpointSaverHook(
        str(tmp_path),
        save_steps=2,
        saver=FailingSaver(saver_of(model), 2),
        listeners=[listener],
    )
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        with pytest.raises(tf.errors.ResourceExhaustedError, match="the disk is full") as caught:
            await session.run(model.train_op)
        assert "in after_run of CheckpointSaverHook" in caught.value.__notes__
        await session.run(model.train_op)
    assert saved_steps(tmp_path) == [0, 3]
    before, after = "before_save", "after_save"
    assert listener.steps == [(before, 0), (after, 0), (before, 2), (before, 3), (after, 3)]


async def test_a_step_that_was_not_saved_when_it_was_due_is_saved_at_the_end(
    tmp_path: Path,
) -> None:
    model = counting_model()
    saver = FailingSaver(saver_of(model), 2)
    hook = CheckpointSaverHook(str(tmp_path), save_steps=2, saver=saver)
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        with pytest.raises(tf.errors.ResourceExhaustedError):
            await session.run(model.train_op)
    assert saved_steps(tmp_path) == [0, 2]


async def test_a_step_counts_as_saved_when_only_after_save_fails(tmp_path: Path) -> None:
    model = counting_model()
    listener = FailsOnce("after_save", 2)
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=2, saver=saver_of(model), listeners=[listener]
    )
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        with pytest.raises(ZeroDivisionError, match="after_save"):
            await session.run(model.train_op)
        await session.run(model.train_op)
        assert saved_steps(tmp_path) == [0, 2]


@pytest.mark.parametrize(
    ("nth", "moment", "steps"), [(1, "after_create_session", []), (2, "end", [0])]
)
async def test_a_failed_save_names_hook_and_moment(
    nth: int, moment: str, steps: list[int], tmp_path: Path
) -> None:
    model = counting_model()
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=9, saver=FailingSaver(saver_of(model), nth)
    )
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        async with monitored(model.graph, [hook]) as session:
            await session.run(model.train_op)
    assert f"in {moment} of CheckpointSaverHook" in caught.value.__notes__
    assert saved_steps(tmp_path) == steps


async def test_a_save_that_failed_delays_no_worker(tmp_path: Path) -> None:
    model = counting_model()
    hook = CheckpointSaverHook(str(tmp_path), save_steps=2, saver=FailingSaver(saver_of(model), 2))
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        with pytest.raises(tf.errors.ResourceExhaustedError):
            await session.run(model.train_op)
        assert not session.global_step.statistics().is_exclusive


async def test_a_directory_below_a_file_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    directory = str(tmp_path / "file" / "model")
    model = counting_model()
    hook = CheckpointSaverHook(directory, save_steps=1, saver=saver_of(model))
    with pytest.raises(tf.errors.OpError) as caught:
        await monitored(model.graph, [hook]).__aenter__()
    notes = "\n".join(caught.value.__notes__)
    assert repr(directory) in notes
    assert "in begin of CheckpointSaverHook" in notes


@pytest.mark.parametrize("num_savers", [0, 2])
async def test_the_collection_must_hold_one_saver(num_savers: int, tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        for _ in range(num_savers):
            v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver())
        scaffold = v1.train.Scaffold(saver=v1.train.Saver())
    hook = CheckpointSaverHook(str(tmp_path), save_steps=1)
    with pytest.raises(RuntimeError, match=f"SAVERS holds {num_savers} savers, expected one"):
        await monitored(model.graph, [hook], ChiefSessionCreator(scaffold)).__aenter__()


class Blocks(CheckpointSaverListener):
    """Blocks a thread at one moment of the save of step 1 until it is let go on."""

    def __init__(self, moment: str, saver: Any) -> None:
        self._moment = moment
        self._saver = saver
        self.started, self.released = threading.Event(), threading.Event()

    def before_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self._play("before_save", global_step_value)

    def after_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self._play("after_save", global_step_value)

    @property
    def saver_def(self) -> Any:
        return self._saver.saver_def

    def save(self, *args: Any, global_step: int, **options: Any) -> Any:
        self._play("save", global_step)
        return self._saver.save(*args, global_step=global_step, **options)

    def _play(self, moment: str, step: int) -> None:
        if moment == self._moment and step == 1:
            self.started.set()
            assert self.released.wait(timeout=60)


@pytest.mark.parametrize(
    ("moment", "steps"), [("before_save", [0]), ("save", [0, 1]), ("after_save", [0, 1])]
)
async def test_a_cancellation_waits_for_what_is_under_way_and_then_leaves(
    moment: str, steps: list[int], tmp_path: Path
) -> None:
    model = counting_model()
    blocks = Blocks(moment, saver_of(model))
    hook = CheckpointSaverHook(str(tmp_path), save_steps=1, saver=blocks, listeners=[blocks])
    log: list[str] = []
    look = Moments(after_run=lambda *_: log.append("after_run of the next hook"))

    async def train() -> None:
        try:
            async with monitored(model.graph, [hook, look]) as session:
                await session.run(model.train_op)
                log.append("the run returned")
        finally:
            log.append(f"left, released: {blocks.released.is_set()}")

    async with anyio.create_task_group() as group:
        group.start_soon(train)
        await anyio.to_thread.run_sync(blocks.started.wait)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            assert log == []
            blocks.released.set()
    assert log == ["left, released: True"]
    assert saved_steps(tmp_path) == steps


async def test_a_coroutine_listener_in_tensorflow_s_hook_is_refused(tmp_path: Path) -> None:
    """It would never be awaited, and the coroutine, which is true, would end training."""
    listeners = [CheckpointSaverListener()]
    hook = v1.train.CheckpointSaverHook(str(tmp_path), save_steps=2, listeners=listeners)
    with pytest.raises(TypeError, match="coroutine listener .* give both to asynchooks.Checkpoint"):
        monitored(counting_model().graph, [hook])


def open_files(directory: Path) -> list[str]:
    """Of this process, those in the directory."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{each}")
        except OSError:  # that of the listing
            continue
        if path.startswith(str(directory)):
            found.append(os.path.basename(path))
    return found


def logged(directory: Path) -> list[tuple[int, int]]:
    """(Step, status) of all session logs, in the order of the files."""
    found = []
    for path in sorted(directory.glob("events.out.*"), key=lambda each: each.stat().st_mtime_ns):
        for event in v1.train.summary_iterator(str(path)):
            if event.HasField("session_log"):
                found.append((event.step, event.session_log.status))
    return found


def summarised(directory: Path) -> list[int]:
    """The steps of all summaries in the only file."""
    [path] = directory.glob("events.out.*")
    events = v1.train.summary_iterator(str(path))
    return [event.step for event in events if event.HasField("summary")]


def flush(directory: Path, is_closed: bool) -> None:
    if not is_closed:
        v1.summary.FileWriterCache.get(str(directory)).flush()


async def test_a_session_leaves_no_thread_and_no_file_open(tmp_path: Path) -> None:
    await train(counting_model(), [background_hook(tmp_path / "warm")], 1)
    threads = set(threading.enumerate())
    for number in range(3):
        await train(counting_model(), [background_hook(tmp_path / str(number))], 2)
        assert logged(tmp_path / str(number))[-1] == (2, CHECKPOINT)
    left = [each.name for each in set(threading.enumerate()) - threads]
    # a membership that ends is another test's
    assert [name for name in left if re.search("EventLogger|asynchooks-(?!membership)", name)] == []
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("background", [True, False])
async def test_sessions_that_follow_each_other_log_all_their_checkpoints(
    tmp_path: Path, background: bool
) -> None:
    for num_runs in (2, 1):
        hook = background_hook(tmp_path, background=background)
        await train(counting_model(), [hook], num_runs, checkpoint_dir=str(tmp_path))
        flush(tmp_path, background)
    assert (3, CHECKPOINT) in logged(tmp_path)
    assert (2, CHECKPOINT) in logged(tmp_path)
    assert bool(open_files(tmp_path)) is not background
    v1.summary.FileWriterCache.clear()


@pytest.mark.parametrize("background", [True, False])
async def test_a_writer_that_others_have_stays_open_and_cached(
    tmp_path: Path, background: bool
) -> None:
    with tf.Graph().as_default():
        mine: Any = v1.summary.FileWriterCache.get(str(tmp_path))
    await train(counting_model(), [background_hook(tmp_path, background=background)], 1)
    assert v1.summary.FileWriterCache.get(str(tmp_path)) is mine
    mine.add_session_log(v1.SessionLog(status=v1.SessionLog.STOP), 77)
    mine.close()
    assert logged(tmp_path)[-1] == (77, v1.SessionLog.STOP)
    v1.summary.FileWriterCache.clear()


async def test_another_hook_of_the_directory_may_write_after_the_end_of_the_saver(
    tmp_path: Path,
) -> None:
    counter = StepCounterHook(1, output_dir=str(tmp_path))
    await train(counting_model(), [background_hook(tmp_path), counter], 3)
    v1.summary.FileWriterCache.clear()
    assert summarised(tmp_path) == [2, 3]
