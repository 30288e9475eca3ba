"""What hooks print without any configuration of logging, and the fields of the records with one."""

import contextlib
import io
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

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
from asynchooks.data import prefetch
from asynchooks.protocols import ParameterServer, ProtocolHook, Synchronous

from ..support.helpers import counting_creator
from ..support.moments import at
from .training import run_session
from .virtual_time import quarter_step, simulate

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


def hook(**options: Any) -> LoggingTensorHook:
    return LoggingTensorHook(["calls"], every_n_iter=2, **options)


def without_seconds(text: str) -> list[str]:
    return [line.partition(" (")[0] for line in text.splitlines()]


def extra(record: logging.LogRecord) -> dict[str, Any]:
    names = ("step", "worker", "hook", "reason")
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def test_lines_of_hooks_appear_on_standard_error_with_their_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = prefetch(range(9), 2)
    hooks = [
        LoggingTensorHook(["x"], every_n_iter=2),
        StepCounterHook(every_n_steps=2),
        FeedHook(source, "x"),
        DataWaitHook(source, every_n_steps=2),
        EvaluationHook(
            lambda *_: {"accuracy": 0.5}, every_n_steps=3, at_end=False, mode=Evaluate.EXCLUSIVE
        ),
    ]

    async def step(x: int) -> dict[str, int]:
        await quarter_step()
        return {"x": x}

    with unconfigured():
        simulate(lambda: run_session(hooks, step, runs=3))
        LOGGER.info("not seen")
        LOGGER.warning("a warning")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "step 1: x = 0",
        "step 3: x = 2 (0.500 sec)",
        "step 3: global_step/sec: 4",
        "step 3: data wait: 0.0 % of the time",
        "eval at step 3: accuracy = 0.5 (0.00 sec)",
        "a warning",
    ]


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


async def test_standard_error_is_the_stream_of_that_moment_and_may_be_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with unconfigured():
        async with MonitoredSession([hook(at_end=True)], counting_creator()) as session:
            await session.run([])
            with contextlib.redirect_stderr(io.StringIO()) as display:
                await session.run([])
                await session.run([])
            await session.run([])
        assert without_seconds(capsys.readouterr().err) == [
            "step 1: calls = 1",
            "step 4: calls = 4",
        ]
        assert without_seconds(display.getvalue()) == ["step 3: calls = 3"]
        monkeypatch.setattr(sys, "stderr", None)
        session = await run_session([hook()], runs=2)
    assert session.global_step.value == 2


@pytest.mark.parametrize(
    "configure",
    [
        lambda _: LOGGER.setLevel(logging.WARNING),
        lambda _: ROOT.setLevel(logging.ERROR),
        lambda _: LOGGER.addHandler(logging.NullHandler()),
        lambda _: LOGGER.addFilter(lambda record: True),
        lambda patch: patch.setattr(LOGGER, "propagate", False),
        lambda patch: patch.setattr(LOGGER.manager, "disable", logging.INFO),
    ],
)
async def test_any_configuration_silences_what_it_does_not_show(
    configure: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unconfigured():
        configure(monkeypatch)
        await run_session([hook(), StepCounterHook(every_n_steps=1)], runs=3)
    assert capsys.readouterr().err == ""


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

for backend in ("asyncio", "trio"):
    anyio.run(main, backend=backend)
assert before == (dict(vars(logging.root)), logging.lastResort, logging.root.manager.disable)
assert (logger.handlers, logger.filters, logger.level) == ([], [], logging.NOTSET)
"""


@pytest.mark.faults
def test_a_new_process_shows_the_line_and_configures_nothing() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout, done.returncode) == ("step 1: loss = 0.5\n" * 2, "", 0)


def loses_once() -> SessionRunHook:
    losses = [PreemptionError("the server is away")]

    def lose(run_context: SessionRunContext) -> None:
        if losses and run_context.global_step.value == 2:
            raise losses.pop()

    return at(before_run=lose)


async def nan_step() -> dict[str, float]:
    await quarter_step()
    return {"loss": float("nan")}


@pytest.mark.parametrize(
    ("make", "says", "found"),
    [
        (lambda: LoggingTensorHook(["loss"], every_n_iter=9), "loss = nan",
         (1, "LoggingTensorHook", None)),
        (loses_once, "The session was lost", (2, None, "PreemptionError('the server is away')")),
        (lambda: EarlyStoppingHook(lambda: 1.0, patience=1, mode="min"), "Early stopping",
         (2, "EarlyStoppingHook",
          "no better than 1 of step 1 for 1 looks (Mode.MIN: smaller is better)")),
        (lambda: TimeLimitHook(0.6), "Stop requested", (2, "TimeLimitHook", "0.6 s have passed")),
        (lambda: NanTensorHook("loss", fail_on_nan_loss=False), "Model diverged with loss = NaN.",
         (1, "NanTensorHook", "the loss 'loss' is NaN at step 1")),
    ],
)  # fmt: skip
def test_records_have_step_hook_and_reason(
    make: Callable[[], Any], says: str, found: Any, info: pytest.LogCaptureFixture
) -> None:
    hooks, recovery = [make(), TimeLimitHook(3.0)], Recovery(first_pause_secs=0)
    simulate(lambda: run_session(hooks, nan_step, recovery=recovery))
    records = [each for each in info.records if each.getMessage().startswith(says)]
    expected = zip(("step", "hook", "reason"), found, strict=True)
    assert extra(records[0]) == {name: each for name, each in expected if each is not None}


# of a private name, which every record of the package goes through


async def test_values_of_a_record_factory_stay(
    info: pytest.LogCaptureFixture,
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
