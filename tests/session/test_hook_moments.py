"""The further moments of a hook, as a user's hook that saves and restores a model uses them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    FinishPhase,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopReason,
)
from asynchooks.testing import ScriptedSession

from ..support.helpers import raises_at, turns
from ..support.moments import NOW, at, counting, lost, scripted


class Model:
    """A weight that each step moves by 1; the steps at which it is lost are given."""

    def __init__(self, *losses: int) -> None:
        self.weight = 0
        self.losses = list(losses)

    def step(self) -> dict[str, int]:
        if self.losses and self.weight == self.losses[0]:
            del self.losses[0]
            raise lost()
        self.weight += 1
        return {"weight": self.weight}


class JsonSaver(SessionRunHook):
    """What a user would write, partly in plain methods: it saves every few steps, and restores."""

    def __init__(self, path: Path, model: Model | None = None, every: int = 2) -> None:
        self.path = path
        self.model = model or Model()
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
        step = run_context.global_step.value
        if step % self.every == 0:
            run_context.finish_with(lambda: self.save(step), phase=FinishPhase.SAVE, exclusive=True)

    async def save(self, step: int) -> None:
        weight = self.model.weight
        await turns()  # another worker would run a step here
        assert self.model.weight == weight
        self.path.write_text(json.dumps({"step": step, "weight": weight}))
        self.log.append(f"saved {step}")

    def before_end(self, session: Any) -> None:
        self.log.append("before the end")

    async def end(self, session: Any) -> None:
        async with session.global_step.exclusive():
            await self.save(session.global_step.value)

    def after_close(self, exception: BaseException | None) -> None:
        self.log.append(f"closed, {type(exception).__name__}")


class PlainSaver(JsonSaver):
    """It restores in a plain method, too."""

    def restore_model(self, session: Any) -> int | None:  # type: ignore[override]
        return self.restore()


async def train(model: Model, hooks: list[Any], num_runs: int = 1) -> MonitoredSession:
    session = MonitoredSession(hooks, model.step, recovery=NOW)
    async with session:
        for _ in range(num_runs):
            await session.run([])
    return session


def write(path: Path, step: int = 10) -> Path:
    path.write_text(json.dumps({"step": step, "weight": step}))
    return path


@pytest.mark.parametrize("kind", [JsonSaver, PlainSaver])
async def test_a_users_hook_saves_and_another_session_goes_on_there(
    kind: type[JsonSaver], tmp_path: Path
) -> None:
    first, second = kind(tmp_path / "model"), kind(tmp_path / "model")
    await train(first.model, [first], 3)
    assert first.log == [
        "begin", "nothing to restore", "saved 2", "before the end", "saved 3", "closed, NoneType",
    ]  # fmt: skip
    session = await train(second.model, [second], 2)
    assert second.log[:2] == ["begin", "restored 3"]
    assert (second.model.weight, session.global_step.value) == (5, 5)


async def test_a_lost_session_goes_back_to_what_the_hook_has_saved(tmp_path: Path) -> None:
    saver = JsonSaver(tmp_path / "model", Model(5))
    session = await train(saver.model, [saver], 7)
    assert saver.log[2:6] == ["saved 2", "saved 4", "restored 4", "saved 6"]
    assert (saver.model.weight, session.global_step.value) == (6, 6)  # step 5 was made twice


async def test_the_first_hook_that_restores_at_all_decides(tmp_path: Path) -> None:
    """A wrapper that forwards the moment to a hook which does not have it leaves it to the next."""
    write(tmp_path / "second")
    wrapper = at(restore_model=lambda session: SessionRunHook().restore_model(session))
    savers = [JsonSaver(tmp_path / name) for name in ("first", "second")]
    await train(Model(), [wrapper, *savers])
    assert [saver.log[1] for saver in savers] == ["nothing to restore", "before the end"]
    last = JsonSaver(tmp_path / "second")
    await train(last.model, [wrapper, last])
    assert last.log[1].startswith("restored")


def notes(log: list[str], what: str, *asks: Any) -> Callable[[], Any]:
    async def note() -> None:
        await turns()
        log.append(what)
        for each in asks:
            each()

    return note


async def test_what_is_left_for_the_end_of_a_run_comes_in_phases_after_all_hooks() -> None:
    log: list[str] = []

    def ask(run_context: SessionRunContext, run_values: Any) -> None:
        late = lambda: run_context.finish_with(notes(log, "late"))  # noqa: E731
        for phase in (FinishPhase.SAVE, FinishPhase.DECIDE, FinishPhase.EVALUATE):
            asks = [late] if phase is FinishPhase.SAVE else []
            run_context.finish_with(notes(log, f"{phase.name} 1", *asks), phase=phase)
            run_context.finish_with(notes(log, f"{phase.name} 2"), phase=phase)

    last = at(after_run=lambda *_: log.append("after_run"))
    await train(Model(), [at(after_run=ask), last])
    expected = [f"{phase} {i}" for phase in ("EVALUATE", "DECIDE", "SAVE") for i in (1, 2)]
    assert log == ["after_run", *expected[:5], "late", expected[5]]


async def test_the_end_of_a_run_may_stop_training_and_its_error_is_that_of_the_hook() -> None:
    error, seen = ValueError("the disk is full"), list[int]()

    async def finish(run_context: SessionRunContext) -> None:
        seen.append(run_context.step)
        if run_context.step == 2:
            raise error
        run_context.request_stop("saved")

    def ask(run_context: SessionRunContext, run_values: Any) -> None:
        run_context.finish_with(lambda: finish(run_context))

    def fail_once(run_context: SessionRunContext, run_values: Any) -> None:
        if run_context.step == 1:
            raise KeyError

    hooks = [at(after_run=ask), at(after_run=fail_once)]
    async with counting(*hooks) as session:
        with pytest.raises(KeyError):
            await session.run([])  # what the first hook asked for is dropped
        with pytest.raises(ValueError, match="the disk is full") as caught:
            await session.run([])
        assert caught.value is error
        assert error.__notes__ == ["in after_run of At"]
        await session.run([])
    assert seen == [2, 3]
    assert session.stop_reason == StopReason("after_run of At", "saved")


@pytest.mark.parametrize("swallows", [True, False, None])
async def test_after_close_may_swallow_an_error(swallows: bool | None) -> None:
    async def fail() -> None:
        hook = at(after_close=lambda exception: swallows)
        async with counting(hook):
            raise KeyError("wrong")

    if swallows:
        await fail()
    else:
        with pytest.raises(KeyError, match="wrong"):
            await fail()


async def test_what_after_close_raises_leaves_the_session_and_goes_to_the_next() -> None:
    seen: list[Any] = []

    def fail(exception: BaseException | None) -> None:
        seen.append(exception)
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone") as caught:
        await train(Model(), [at(after_close=fail), at(after_close=fail)])
    assert seen == [None, caught.value.__context__]
    assert caught.value.__notes__ == ["in after_close of At"]


@pytest.mark.parametrize("error", [GeneratorExit("by mistake"), SystemExit(3)])
async def test_after_close_comes_also_where_the_close_of_the_raw_session_raises(
    error: BaseException,
) -> None:
    seen: list[BaseException | None] = []

    class Raw(ScriptedSession):
        async def close(self) -> None:  # type: ignore[override]
            await turns()
            raise error

    with pytest.raises(type(error)) as caught:
        hooks = [at(after_close=seen.append)]
        async with scripted([Raw()], *hooks):
            pass
    assert caught.value is error
    assert seen == [error]


async def test_a_hook_whose_begin_failed_is_not_called_after_the_close() -> None:
    before, after = (JsonSaver(Path("nowhere")) for _ in range(2))
    seen: list[Any] = []
    hook = at(begin=raises_at("begin", ValueError("in use")).begin, after_close=seen.append)
    with pytest.raises(ValueError, match="in use"):
        await train(Model(), [before, hook, after])
    assert (before.log, seen, after.log) == (["begin", "closed, ValueError"], [], [])


@pytest.mark.parametrize("step", [np.int64(5), -2, 3.0, "x", True])
async def test_a_restored_step_is_an_integer_of_python_or_numpy(step: Any) -> None:
    hook = at(restore_model=lambda session: step)
    if isinstance(step, np.int64):
        session = await train(Model(), [hook])
        assert session.global_step.value == 6
        assert type(session.global_step.value) is int
        return
    expected = f"what restore_model of At returned is {step!r}; give an integer >= 0, None"
    with pytest.raises((TypeError, ValueError), match=re.escape(expected)):
        await train(Model(), [hook])


def test_a_coroutine_where_nothing_can_be_awaited_is_refused() -> None:
    hook = raises_at("on_drop", ValueError)
    with pytest.raises(TypeError, match="on_drop is a coroutine function; give a plain method"):
        MonitoredSession([hook], dict)
