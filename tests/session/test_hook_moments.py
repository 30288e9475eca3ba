"""The further moments of a hook, as a user's hook that saves and restores a model uses them."""

from __future__ import annotations

import gc
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    Evaluate,
    EvaluationHook,
    FinishPhase,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopTraining,
)
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ..support.helpers import counting_creator, raises_at

pytestmark = pytest.mark.anyio
NOW = Recovery(first_pause_secs=0)


class Model:
    """A weight that each step moves by 1; the steps at which it is lost are given."""

    def __init__(self, *losses: int) -> None:
        self.weight = 0
        self.losses = list(losses)

    def step(self) -> dict[str, int]:
        if self.losses and self.weight == self.losses[0]:
            del self.losses[0]
            raise PreemptionError("the server has gone")
        self.weight += 1
        return {"weight": self.weight}


class JsonSaver(SessionRunHook):
    """What a user would write: it saves every few steps and at the end, and restores."""

    def __init__(self, path: Path, model: Model, every: int = 2) -> None:
        self.path = path
        self.model = model
        self.every = every
        self.log: list[str] = []

    async def begin(self) -> None:
        self.log.append("begin")

    async def restore_model(self, session: Any) -> int | None:
        return self.restore()

    def restore(self) -> int | None:
        if not self.path.exists():
            self.log.append("nothing to restore")
            return None
        saved: dict[str, int] = json.loads(self.path.read_text())
        self.model.weight = saved["weight"]
        self.log.append(f"restored {saved['step']}")
        return saved["step"]

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_context.global_step.value % self.every == 0:
            run_context.finish_with(
                lambda: self.save(run_context.global_step.value),
                phase=FinishPhase.SAVE,
                exclusive=True,
            )

    async def save(self, step: int) -> None:
        weight = self.model.weight
        await anyio.lowlevel.checkpoint()  # another worker would run a step here
        assert self.model.weight == weight
        self.path.write_text(json.dumps({"step": step, "weight": weight}))
        self.log.append(f"saved {step}")

    async def before_end(self, session: Any) -> None:
        self.log.append("before the end")

    async def end(self, session: Any) -> None:
        async with session.global_step.exclusive():
            await self.save(session.global_step.value)

    async def after_close(self, exception: BaseException | None) -> None:
        self.log.append(f"closed, {type(exception).__name__}")

    def on_drop(self) -> None:
        self.log.append("dropped")


class PlainSaver(JsonSaver):
    """Its further moments are plain methods."""

    def restore_model(self, session: Any) -> int | None:  # type: ignore[override]
        return self.restore()

    def before_end(self, session: Any) -> None:  # type: ignore[override]
        self.log.append("before the end")

    def after_close(self, exception: BaseException | None) -> None:  # type: ignore[override]
        self.log.append(f"closed, {type(exception).__name__}")


async def train(model: Model, hooks: list[Any], num_runs: int) -> MonitoredSession:
    session = MonitoredSession(hooks, FunctionSessionCreator(model.step), recovery=NOW)
    async with session:
        for _ in range(num_runs):
            await session.run([])
    return session


async def test_a_users_hook_saves_and_another_session_goes_on_there(tmp_path: Path) -> None:
    saver = JsonSaver(tmp_path / "model", Model())
    await train(saver.model, [saver], 3)
    assert saver.log == [
        "begin", "nothing to restore", "saved 2", "before the end", "saved 3", "closed, NoneType",
    ]  # fmt: skip
    second = JsonSaver(tmp_path / "model", Model())
    session = await train(second.model, [second], 2)
    assert second.log[:2] == ["begin", "restored 3"]
    assert (second.model.weight, session.global_step.value) == (5, 5)


async def test_plain_moments_do_as_well(tmp_path: Path) -> None:
    for step in (3, 6):
        saver = PlainSaver(tmp_path / "model", Model())
        session = await train(saver.model, [saver], 3)
        assert (saver.model.weight, session.global_step.value) == (step, step)
    assert saver.log == [
        "begin", "restored 3", "saved 4", "saved 6", "before the end", "saved 6",
        "closed, NoneType",
    ]  # fmt: skip


async def test_a_lost_session_goes_back_to_what_the_hook_has_saved(tmp_path: Path) -> None:
    saver = JsonSaver(tmp_path / "model", Model(5))
    session = await train(saver.model, [saver], 7)
    assert saver.log[:6] == [
        "begin", "nothing to restore", "saved 2", "saved 4", "restored 4", "saved 6",
    ]  # fmt: skip
    assert (saver.model.weight, session.global_step.value) == (6, 6)  # step 5 was made twice


@pytest.mark.parametrize("num_others", [1, 3])
async def test_workers_share_what_the_hook_of_one_restores(num_others: int, tmp_path: Path) -> None:
    """It saves while none of them runs a step, and restores once for all, after a loss, too."""
    (tmp_path / "model").write_text(json.dumps({"step": 10, "weight": 10}))
    model = Model(20)
    saver = JsonSaver(tmp_path / "model", model, 1)
    creator = SharedSessionCreator(FunctionSessionCreator(model.step))
    seen: list[int] = []
    all_are_open = anyio.Event()

    async def work(hooks: list[Any]) -> None:
        async with MonitoredSession(hooks, creator, recovery=NOW) as session:
            seen.append(session.global_step.value)
            if len(seen) > num_others:
                all_are_open.set()
            await all_are_open.wait()
            while session.global_step.value < 30:
                await session.run([])
                await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        for _ in range(num_others):
            group.start_soon(work, [])
        group.start_soon(work, [saver])
    assert min(seen) == 10
    first, again = [i for i, each in enumerate(saver.log) if each.startswith("restored ")]
    saved = [each for each in saver.log[:again] if each.startswith("saved ")]
    assert saver.log[first] == "restored 10"
    assert saver.log[again].split()[1] == (saved[-1].split()[1] if saved else "10")
    assert model.losses == []


async def test_a_hook_that_restores_nothing_leaves_it_to_the_next(tmp_path: Path) -> None:
    """Such as a wrapper that forwards the moment to a hook which does not have it."""

    class Wrapper(SessionRunHook):
        async def restore_model(self, session: Any) -> Any:
            hook: Any = SessionRunHook()
            return await hook.restore_model(session)

    (tmp_path / "model").write_text(json.dumps({"step": 10, "weight": 10}))
    model = Model()
    saver = JsonSaver(tmp_path / "model", model)
    await train(model, [Wrapper(), saver], 1)
    assert saver.log[:2] == ["begin", "restored 10"]
    creator = SharedSessionCreator(FunctionSessionCreator(model.step))
    async with MonitoredSession([Wrapper()], creator) as session:
        late = JsonSaver(tmp_path / "model", model)
        async with MonitoredSession([late], creator):
            assert late.log == ["begin", "restored 11"]
            assert session.global_step.value == 11


async def test_of_several_hooks_that_restore_the_first_one_decides(tmp_path: Path) -> None:
    (tmp_path / "second").write_text(json.dumps({"step": 10, "weight": 10}))
    model = Model()
    savers = [JsonSaver(tmp_path / name, model) for name in ("first", "second")]
    await train(model, savers, 1)
    assert [saver.log[1] for saver in savers] == ["nothing to restore", "before the end"]


async def test_an_error_in_restoring_leaves_with_the_hooks_name(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("{")
    saver = JsonSaver(tmp_path / "model", Model())
    with pytest.raises(ValueError, match="Expecting property name") as caught:
        await train(saver.model, [saver], 1)
    assert caught.value.__notes__ == ["in restore_model of JsonSaver"]
    assert saver.log == ["begin", "closed, JSONDecodeError"]


@pytest.mark.parametrize("error", [StopAsyncIteration(), StopTraining("a bug")])
async def test_what_ends_training_elsewhere_is_a_bug_in_restoring(error: Exception) -> None:
    match = f"restore_model of Raises,? raised {type(error).__name__}"
    with pytest.raises(RuntimeError, match=match):
        await train(Model(), [raises_at("restore_model", error)], 1)


async def test_the_phases_of_the_end_of_a_run_come_in_order() -> None:
    log: list[str] = []

    def says(what: str) -> Callable[[], Any]:
        async def say() -> None:
            log.append(what)

        return say

    class Asks(SessionRunHook):
        async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            for phase in (FinishPhase.SAVE, FinishPhase.DECIDE, FinishPhase.EVALUATE):
                run_context.finish_with(says(f"{phase.name} 1"), phase=phase)
                run_context.finish_with(says(f"{phase.name} 2"), phase=phase)

    await train(Model(), [Asks()], 1)
    assert log == [f"{phase} {i}" for phase in ("EVALUATE", "DECIDE", "SAVE") for i in (1, 2)]


async def test_what_was_evaluated_is_saved_before_another_worker_moves_it(tmp_path: Path) -> None:
    model = Model()
    saver = JsonSaver(tmp_path / "model", model, 1)
    evaluated: list[int] = []

    async def evaluate(session: Any, step: int) -> dict[str, int]:
        evaluated.append(model.weight)
        return {"weight": model.weight}

    evaluation = EvaluationHook(evaluate, every_n_steps=1, mode=Evaluate.EXCLUSIVE)
    creator = SharedSessionCreator(FunctionSessionCreator(model.step), num_workers=2)

    async def work(hooks: list[Any]) -> None:
        async with MonitoredSession(hooks, creator) as session:
            while session.global_step.value < 20:
                await session.run([])

    async with anyio.create_task_group() as group:
        group.start_soon(work, [saver, evaluation])
        group.start_soon(work, [])
    assert [f"saved {weight}" for weight in evaluated[:-1]] == [
        each for each in saver.log if "saved" in each
    ][: len(evaluated) - 1]


@pytest.mark.parametrize("swallows", [True, False, None])
async def test_after_close_may_swallow_an_error(swallows: bool | None) -> None:
    class Swallows(SessionRunHook):
        async def after_close(self, exception: BaseException | None) -> bool | None:
            return swallows

    async def fail() -> None:
        async with MonitoredSession([Swallows()], counting_creator()):
            raise KeyError("wrong")

    if swallows:
        await fail()
    else:
        with pytest.raises(KeyError, match="wrong"):
            await fail()


async def test_what_after_close_raises_leaves_the_session() -> None:
    seen: list[Any] = []

    class Raises(SessionRunHook):
        async def after_close(self, exception: BaseException | None) -> None:
            seen.append(exception)
            raise OSError("the file is gone")

    first, second = Raises(), Raises()
    with pytest.raises(OSError, match="the file is gone") as caught:
        await train(Model(), [first, second], 1)
    assert seen == [None, caught.value.__context__]
    assert caught.value.__notes__ == ["in after_close of Raises"]


@pytest.mark.parametrize("error", [GeneratorExit("by mistake"), SystemExit(3)])
async def test_after_close_comes_also_where_the_close_of_the_raw_session_raises(
    error: BaseException,
) -> None:
    seen: list[BaseException | None] = []

    class Raw(ScriptedSession):
        async def close(self) -> None:  # type: ignore[override]
            await anyio.lowlevel.checkpoint()
            raise error

    class Notes(SessionRunHook):
        async def after_close(self, exception: BaseException | None) -> None:
            seen.append(exception)

    with pytest.raises(type(error)) as caught:
        async with MonitoredSession([Notes()], ScriptedSessionCreator([Raw()])):
            pass
    assert caught.value is error
    assert seen == [error]


async def test_a_hook_whose_begin_failed_is_not_called_after_the_close() -> None:
    class Refuses(JsonSaver):
        async def begin(self) -> None:
            raise ValueError("in use")

    before, hook, after = (
        JsonSaver(Path("nowhere"), Model()),
        Refuses(Path("nowhere"), Model()),
        JsonSaver(Path("nowhere"), Model()),
    )
    with pytest.raises(ValueError, match="in use"):
        await train(Model(), [before, hook, after], 1)
    assert (before.log, hook.log, after.log) == (["begin", "closed, ValueError"], [], [])


async def test_a_dropped_session_calls_on_drop_and_nothing_else(tmp_path: Path) -> None:
    saver = JsonSaver(tmp_path / "model", Model())
    session = MonitoredSession([saver], FunctionSessionCreator(saver.model.step))
    await session.__aenter__()
    sessions = [session]
    del session
    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        sessions.clear()
    gc.collect()
    assert saver.log == ["begin", "nothing to restore", "dropped"]


async def test_what_a_save_asks_for_in_an_earlier_phase_comes_next_and_once() -> None:
    log: list[str] = []

    class Asking(SessionRunHook):
        async def after_run(
            self, run_context: SessionRunContext, run_values: SessionRunValues
        ) -> None:
            async def late() -> None:
                log.append("late")

            async def save() -> None:
                log.append("save")
                run_context.finish_with(late)

            async def last() -> None:
                log.append("last")

            run_context.finish_with(save, phase=FinishPhase.SAVE)
            run_context.finish_with(last, phase=FinishPhase.SAVE)

    await train(Model(), [Asking()], 1)
    assert log == ["save", "late", "last"]
    run_context = SessionRunContext((None, None), FunctionSessionCreator(dict).create_session())
    await Asking().after_run(run_context, SessionRunValues(None, None, None))
    await run_context.finish()
    assert log == ["save", "late", "last"] * 2


class Restoring(SessionRunHook):
    def __init__(self, result: Any) -> None:
        self.result = result

    async def restore_model(self, session: Any) -> Any:
        return self.result


async def test_a_restored_step_may_be_an_integer_of_numpy() -> None:
    session = await train(Model(), [Restoring(np.int64(5))], 1)
    assert session.global_step.value == 6
    assert type(session.global_step.value) is int


@pytest.mark.parametrize("wrong", [-2, 3.0, "x", True])
async def test_what_is_no_step_is_refused_where_it_is_restored(wrong: object) -> None:
    expected = f"what restore_model of Restoring returned is {wrong!r}; give an integer >= 0, None"
    with pytest.raises((TypeError, ValueError), match=re.escape(expected)):
        await train(Model(), [Restoring(wrong)], 1)


def test_a_coroutine_where_nothing_can_be_awaited_is_refused() -> None:
    hook = raises_at("on_drop", ValueError)
    with pytest.raises(TypeError, match="on_drop is a coroutine function; give a plain method"):
        MonitoredSession([hook], FunctionSessionCreator(dict))


@pytest.mark.parametrize("is_made", [True, False])
async def test_a_run_cancelled_behind_its_step_says_so_to_its_hooks(is_made: bool) -> None:
    begun, may_end, log = threading.Event(), threading.Event(), list[str]()

    class Notes(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            self.run_context = run_context
            log.append("before_run")

        async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            log.append(f"after_run, {run_context.step_is_made}")

    def step() -> dict[str, int]:
        begun.set()
        may_end.wait(30)
        if not is_made:
            raise ValueError("no step")
        return {}

    hooks = [Notes(), Notes()]
    creator = FunctionSessionCreator(step)
    async with MonitoredSession(hooks, creator, step_runner="thread") as session:
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, [])
            await anyio.to_thread.run_sync(begun.wait)
            assert not hooks[0].run_context.step_is_made
            group.cancel_scope.cancel()
            may_end.set()
        assert log == ["before_run"] * 2
        assert session.global_step.value == is_made
        assert hooks[0].run_context.step_is_made == is_made
        log.clear()
        if is_made:
            await session.run([])
            assert log == ["before_run"] * 2 + ["after_run, True"] * 2
