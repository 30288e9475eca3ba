"""What hooks print without any configuration of logging, and the fields of the records with one."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from asynchooks import (
    DataWaitHook,
    EarlyStoppingHook,
    Evaluate,
    EvaluationHook,
    FeedHook,
    FunctionSessionCreator,
    LoggingTensorHook,
    MonitoredSession,
    NanTensorHook,
    PreemptionError,
    Recovery,
    SessionRunContext,
    SessionRunHook,
    StepCounterHook,
    TimeLimitHook,
)
from asynchooks._log import fields
from asynchooks.data import prefetch
from asynchooks.protocols import ParameterServer, ProtocolHook, Synchronous

from ..support.helpers import counting_creator
from .training import Calls, run_session
from .virtual_time import on_trampoline, quarter_step

LOGGER, ROOT = logging.getLogger("asynchooks"), logging.getLogger()


@contextlib.contextmanager
def unconfigured() -> Iterator[None]:
    """Logging as in a new process: while a test is called, pytest has handlers at the root."""
    root, level = list(ROOT.handlers), ROOT.level
    ours = list(LOGGER.handlers), list(LOGGER.filters), LOGGER.level, LOGGER.propagate
    ROOT.handlers.clear()
    ROOT.setLevel(logging.WARNING)
    try:
        yield
    finally:
        ROOT.handlers[:] = root
        ROOT.setLevel(level)
        LOGGER.handlers[:], LOGGER.filters[:], LOGGER.propagate = ours[0], ours[1], ours[3]
        LOGGER.setLevel(ours[2])


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged from level INFO on."""
    with caplog.at_level(logging.INFO, "asynchooks"):
        yield caplog


def hook() -> LoggingTensorHook:
    return LoggingTensorHook(["calls"], every_n_iter=2)


def without_seconds(text: str) -> list[str]:
    return [line.partition(" (")[0] for line in text.splitlines()]


def extra(record: logging.LogRecord) -> dict[str, Any]:
    names = ("step", "worker", "hook", "reason")
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def found(logged: pytest.LogCaptureFixture, start: str) -> dict[str, Any]:
    """The fields of the one record whose message begins like this."""
    (record,) = (each for each in logged.records if each.getMessage().startswith(start))
    return extra(record)


@pytest.mark.anyio
async def test_lines_appear_on_standard_error_with_their_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unconfigured():
        await run_session([LoggingTensorHook(["calls"], every_n_iter=2, at_end=True)], runs=4)
    out, err = capsys.readouterr()
    assert out == ""
    assert without_seconds(err) == [
        "step 1: calls = 1",
        "step 3: calls = 3",
        "step 4: calls = 4",
    ]


def test_messages_of_other_hooks_keep_their_formats(capsys: pytest.CaptureFixture[str]) -> None:
    source = prefetch(range(9), 2)

    def evaluate(session: Any, step: int) -> dict[str, float]:
        return {"accuracy": 0.5}

    hooks = [
        LoggingTensorHook(["x"], every_n_iter=2),
        StepCounterHook(every_n_steps=2),
        FeedHook(source, "x"),
        DataWaitHook(source, every_n_steps=2),
        EvaluationHook(evaluate, every_n_steps=3, at_end=False, mode=Evaluate.EXCLUSIVE),
    ]

    async def step(x: int) -> dict[str, int]:
        await quarter_step()
        return {"x": x}

    with unconfigured():
        on_trampoline(lambda _: run_session(hooks, FunctionSessionCreator(step), runs=3))
    assert capsys.readouterr().err.splitlines() == [
        "step 1: x = 0",
        "step 3: x = 2 (0.500 sec)",
        "step 3: global_step/sec: 4",
        "step 3: data wait: 0.0 % of the time",
        "eval at step 3: accuracy = 0.5 (0.00 sec)",
    ]


@pytest.mark.anyio
async def test_the_worker_of_a_protocol_is_in_front_of_the_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = ParameterServer(np.zeros(1), Synchronous(), num_workers=1)

    async def step() -> dict[str, int]:
        server.push(0, np.ones(1), server.pull(0).version)
        return {"calls": 7}

    creator = FunctionSessionCreator(step, global_step=server.global_step)
    with unconfigured():
        await run_session([hook(), ProtocolHook(server, 0)], creator, runs=1)
    assert capsys.readouterr().err == "worker 0, step 1: calls = 7\n"


@pytest.mark.anyio
async def test_standard_error_is_the_stream_of_that_moment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = MonitoredSession([hook()], counting_creator())
    with unconfigured():
        async with session:
            await session.run([])
            with contextlib.redirect_stderr(io.StringIO()) as display:
                await session.run([])
                await session.run([])
    assert capsys.readouterr().err == "step 1: calls = 1\n"
    assert without_seconds(display.getvalue()) == ["step 3: calls = 3"]


@pytest.mark.anyio
async def test_a_closed_standard_error_does_not_stop_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with unconfigured():
        session = await run_session([hook()], runs=2)
    assert session.global_step.value == 2


@pytest.mark.anyio
async def test_other_records_are_seen_from_warnings_on(capsys: pytest.CaptureFixture[str]) -> None:
    with unconfigured():
        async with MonitoredSession([], counting_creator()) as session:
            session.request_stop("enough")  # a record at level INFO
        LOGGER.warning("a warning")
    assert capsys.readouterr().err == "a warning\n"


@pytest.mark.anyio
@pytest.mark.parametrize(
    "configure",
    [
        lambda _: logging.basicConfig(),
        lambda _: LOGGER.setLevel(logging.WARNING),
        lambda _: ROOT.setLevel(logging.ERROR),
        lambda _: LOGGER.addHandler(logging.NullHandler()),
        lambda _: LOGGER.addFilter(lambda record: True),
        lambda patch: patch.setattr(LOGGER, "propagate", False),
        lambda patch: patch.setattr(LOGGER, "disabled", True),
        lambda patch: patch.setattr(LOGGER.manager, "disable", logging.INFO),
        lambda patch: patch.setattr(logging, "lastResort", None),
    ],
    ids=[
        "basicConfig", "level", "level of the root", "NullHandler", "filter", "propagate",
        "disabled", "logging.disable", "lastResort",
    ],
)  # fmt: skip
async def test_any_configuration_silences_what_it_does_not_show(
    configure: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with unconfigured():
        configure(monkeypatch)
        await run_session([hook(), StepCounterHook(every_n_steps=1)], runs=3)
    assert capsys.readouterr().err == ""


@pytest.mark.anyio
async def test_a_handler_that_shows_the_lines_is_the_only_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unconfigured():
        logging.basicConfig(level=logging.INFO, format="%(name)s step %(step)d %(message)s")
        await run_session([hook()], runs=1)
    assert capsys.readouterr().err == "asynchooks step 1 calls = 1\n"


PROGRAM = """
import logging
before = dict(vars(logging.root)), logging.lastResort, logging.root.manager.disable
import anyio, asynchooks
from asynchooks import *
logger = logging.getLogger("asynchooks")

async def main():
    hooks = [LoggingTensorHook(["loss"], every_n_iter=9), StopAtStepHook(last_step=3)]
    async with MonitoredSession(hooks, FunctionSessionCreator(lambda: {"loss": 0.5})) as session:
        while not session.should_stop():
            await session.run([])

anyio.run(main, backend=__BACKEND__)
assert before == (dict(vars(logging.root)), logging.lastResort, logging.root.manager.disable)
assert (logger.handlers, logger.filters, logger.level) == ([], [], logging.NOTSET)
"""


@pytest.mark.faults
def test_a_new_process_shows_the_line_and_configures_nothing(anyio_backend_name: str) -> None:
    code = PROGRAM.replace("__BACKEND__", repr(anyio_backend_name))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout, done.returncode) == ("step 1: loss = 0.5\n", "", 0)


@pytest.mark.anyio
async def test_records_name_step_and_hook_and_their_place_in_the_code(
    info: pytest.LogCaptureFixture,
) -> None:
    await run_session([hook()], runs=1)
    (record,) = info.records
    assert extra(record) == {"step": 1, "hook": "LoggingTensorHook"}
    assert (record.filename, record.levelno) == ("_logging_tensor.py", logging.INFO)


@pytest.mark.anyio
async def test_json_lines_from_the_fields() -> None:
    class JsonLines(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return json.dumps({"message": record.getMessage(), **extra(record)})

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    with unconfigured():
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
        async with MonitoredSession([hook()], counting_creator()) as session:
            await session.run([])
            session.request_stop("enough")
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [
        {"message": "calls = 1", "step": 1, "hook": "LoggingTensorHook"},
        {"message": "Stop requested: enough", "step": 1, "reason": "session.request_stop: enough"},
    ]


@pytest.mark.anyio
async def test_a_recovery_has_its_error_as_the_reason(info: pytest.LogCaptureFixture) -> None:
    losses = [PreemptionError("the server is away")]

    def lose(run_context: SessionRunContext) -> None:
        if losses and run_context.global_step.value == 2:
            raise losses.pop()

    hooks = [Calls(before_run=lose)]
    await run_session(hooks, runs=4, recovery=Recovery(first_pause_secs=0))
    assert found(info, "The session was lost") == {
        "step": 2, "reason": "PreemptionError('the server is away')"
    }  # fmt: skip


@pytest.mark.anyio
async def test_stops_of_hooks_have_their_reasons(info: pytest.LogCaptureFixture) -> None:
    stopping = EarlyStoppingHook("calls", patience=1, mode="min")
    await run_session([stopping])
    assert found(info, "Early stopping") == {
        "step": 2,
        "hook": "EarlyStoppingHook",
        "reason": "no better than 1 of step 1 for 1 looks (Mode.MIN: smaller is better)",
    }


def test_a_time_limit_has_step_and_reason(info: pytest.LogCaptureFixture) -> None:
    creator = FunctionSessionCreator(quarter_step)
    on_trampoline(lambda _: run_session([TimeLimitHook(0.6)], creator))
    assert found(info, "Stop requested") == {
        "step": 2, "hook": "TimeLimitHook", "reason": "0.6 s have passed"
    }  # fmt: skip


@pytest.mark.anyio
async def test_a_loss_that_is_nan_has_step_and_reason(info: pytest.LogCaptureFixture) -> None:
    creator = FunctionSessionCreator(lambda: {"loss": float("nan")})
    await run_session([NanTensorHook("loss", fail_on_nan_loss=False)], creator)
    assert found(info, "Model diverged with loss = NaN.") == {
        "step": 1, "hook": "NanTensorHook", "reason": "the loss 'loss' is NaN at step 1"
    }  # fmt: skip


@pytest.mark.anyio
async def test_a_hook_that_fails_at_the_end_is_named(info: pytest.LogCaptureFixture) -> None:
    class Broken(SessionRunHook):
        async def on_error(self, session: Any, exception: BaseException) -> None:
            raise ValueError("twice")

    with pytest.raises(RuntimeError, match="once"):
        async with MonitoredSession([Broken()], counting_creator()):
            raise RuntimeError("once")
    assert found(info, "on_error of Broken failed") == {
        "hook": "Broken", "reason": "ValueError('twice')"
    }  # fmt: skip


@pytest.mark.anyio
async def test_values_of_a_record_factory_stay(
    info: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = logging.LogRecord(*args, **kwargs)
        record.worker = record.step = "theirs"
        return record

    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(factory)
    try:
        await run_session([hook()], runs=1)
    finally:
        logging.setLogRecordFactory(before)
    assert [extra(each) for each in info.records] == [
        {"step": "theirs", "worker": "theirs", "hook": "LoggingTensorHook"}
    ]


def test_fields_that_are_unknown_are_left_out() -> None:
    assert fields() == {}
    assert fields("StallHook", step=0, worker=0) == {"hook": "StallHook", "step": 0, "worker": 0}
    assert type(fields(step=cast(int, np.int64(3)))["step"]) is int, "which JSON can write"


@pytest.mark.anyio
async def test_the_step_is_read_only_where_the_line_is_seen(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    class Read:
        """In place of the property."""

        def __get__(self, run_context: SessionRunContext, owner: type) -> int:
            reads.append(run_context.global_step.last_known)
            return reads[-1]

    async with MonitoredSession([hook()], counting_creator()) as session:
        monkeypatch.setattr(SessionRunContext, "step", Read())
        await session.run([])
        assert reads == [], "pytest's handlers do not show INFO"
        with caplog.at_level(logging.INFO, "asynchooks"):
            await session.run([])
            await session.run([])
        assert reads == [3]
        monkeypatch.undo()
