"""ProgressHook: what it shows of sessions, where, and that it neither costs nor holds up steps."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from asynchooks import (
    EvaluationHook,
    FeedHook,
    FunctionSessionCreator,
    MetricError,
    MetricsHook,
    MonitoredSession,
    ProgressHook,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
    TimeLimitHook,
)
from asynchooks._engine.base import Engine
from asynchooks._engine.current import system_now
from asynchooks._running.status import Rate
from asynchooks.data import interleave, prefetch, repeat
from asynchooks.hooks.progress._display import DISPLAYS, Display
from asynchooks.hooks.progress._rows import Line, number_text, rate_text, secs_text
from asynchooks.hooks.progress._surfaces import PlainSurface, Surface, TerminalSurface
from asynchooks.metrics import histogram, mean, steps_per_sec

from ..support.helpers import raises_at, settle
from ..support.threads import own_threads, threads_left
from .terminals import screen
from .virtual_time import in_virtual_time


def step() -> dict[str, float]:
    return {"loss": 0.5}


class Shown:
    """A stream, and the display on it, which the test draws: a second goes by in each look."""

    def __init__(self, surface: Callable[[io.StringIO], Surface] = PlainSurface) -> None:
        self.file = io.StringIO()
        self.now = system_now()
        self.display = Display(surface(self.file))
        self.display._thread.start = lambda: None  # type: ignore[method-assign]

    def look(self, secs: float = 1.0) -> str:
        """What is added after some seconds."""
        self.now += secs
        begun = len(self.file.getvalue())
        self.display.draw(self.now)
        return self.file.getvalue()[begun:]

    def hook(self, values: Any = None, **options: Any) -> ProgressHook:
        return ProgressHook(values, file=self.file, **options)

    @asynccontextmanager
    async def drawn(self) -> AsyncIterator[None]:
        """Within the block the display is drawn whenever all tasks wait: for the last lines."""
        async with anyio.create_task_group() as group:

            async def draw() -> None:
                while True:
                    await settle()
                    self.look(0.5)

            group.start_soon(draw)
            yield
            group.cancel_scope.cancel()


@pytest.fixture
def shown() -> Any:
    shown = Shown()
    DISPLAYS._displays[id(shown.file)] = shown.display
    yield shown
    assert DISPLAYS._displays.pop(id(shown.file), None) in (None, shown.display)


@asynccontextmanager
async def opened(
    shown: Shown, hooks: list[Any], creator: Any = None
) -> AsyncIterator[MonitoredSession]:
    """A session that is closed while the display is drawn."""
    session = await MonitoredSession(hooks, creator or FunctionSessionCreator(step)).open()
    try:
        yield session
    finally:
        async with shown.drawn():
            await session.close()


@pytest.mark.anyio
async def test_lines_come_at_the_start_every_ten_seconds_and_at_the_end(shown: Shown) -> None:
    hooks = [StopAtStepHook(last_step=1000), shown.hook("loss")]
    async with opened(shown, hooks) as session:
        assert shown.look() == "step 0 of 1,000 · starting\n"
        for num in (100, 200, 300):
            while session.global_step.value < num:
                await session.run([])
            assert shown.look(2.0) == ""
        assert shown.look(4.0) == "step 300 of 1,000 · 30 steps/s · 23 s left · loss 0.5\n"
        assert shown.look(1.0) == ""
        begun = len(shown.file.getvalue())
    last = shown.file.getvalue()[begun:]
    assert re.fullmatch(
        r"done at step 300 of 1,000 in 1\d s · 2\d(\.\d)? steps/s · loss 0.5\n", last
    )


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("source", "epochs"),
    [
        (lambda: prefetch(repeat(range(4), 3), 2), ["", "epoch 1 of 3 · ", "epoch 2 of 3 · "]),
        (lambda: repeat(range(4)), ["", "epoch 1 · ", "epoch 2 · "]),
        (lambda: interleave([repeat([1], 9), repeat([2], 9)]), ["", "", ""]),
        (lambda: range(9), ["", "", ""]),
    ],
)
async def test_lines_say_which_epoch_of_how_many_it_is(
    shown: Shown, source: Callable[[], Any], epochs: list[str]
) -> None:
    creator = FunctionSessionCreator(lambda x: {"loss": 0.5})
    lines = []
    async with opened(shown, [FeedHook(source(), "x"), shown.hook([])], creator) as session:
        for num_steps in (0, 4, 5):
            while session.global_step < num_steps:
                await session.run([])
            lines.append(shown.look(11.0))
    text = " | ".join(lines).replace("\n", "")
    assert text.count("epoch") == sum(bool(each) for each in epochs), text
    assert all(f"step {num} · {each}" in text for num, each in zip((0, 4, 5), epochs, strict=True))


@pytest.mark.anyio
async def test_runs_are_asked_for_values_only_when_the_display_has_shown_the_last(
    shown: Shown,
) -> None:
    asked: list[list[str]] = []

    class Asks(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            asked.append(calls[:])
            calls.clear()

    calls: list[str] = []

    def value() -> float:
        calls.append("read")
        return 2.0

    async with opened(shown, [shown.hook({"v": value}), Asks()]) as session:
        for num in range(6):
            await session.run([])
            if num == 3:
                shown.look()
    assert asked == [["read"], [], [], [], ["read"], []]


@pytest.mark.anyio
async def test_means_are_taken_over_all_runs_since_the_last_look(shown: Shown) -> None:
    losses = iter([1.0, 2.0, 3.0, 4.0])
    creator = FunctionSessionCreator(lambda: {"loss": next(losses)})
    async with opened(shown, [shown.hook(mean("loss"))], creator) as session:
        await session.run([])
        assert "loss 1" in shown.look()
        await session.run([])  # the hook is asked here
        await session.run([])
        shown.look()
        await session.run([])
        assert "loss 3.5\n" in shown.look(10.0)


@pytest.mark.anyio
async def test_without_values_the_session_s_newest_metrics_are_shown(shown: Shown) -> None:
    kept: list[Any] = []
    reads = MetricsHook(lambda step, values: kept.append(values), "loss", every_n_steps=1)
    async with opened(shown, [reads, shown.hook()]) as session:
        session.log_metrics({"reward": 7, "b": 1, "c": 2, "d": 3})
        await session.run([])
        assert "reward 7 · b 1 · c 2 · d 3\n" in shown.look()
        session.log_metrics({"reward": 1234.5})
    assert "reward 1234 · b 1" in shown.file.getvalue().splitlines()[-1]


@pytest.mark.anyio
async def test_values_that_it_reads_are_in_the_session_s_status(shown: Shown) -> None:
    async with opened(shown, [shown.hook(["loss", steps_per_sec()])]) as session:
        await session.run([])
        assert session.status().metrics["loss"] == 0.5


@pytest.mark.anyio
async def test_a_value_that_is_no_number_is_an_error_of_the_first_run(shown: Shown) -> None:
    creator = FunctionSessionCreator(lambda: {"loss": "low"})
    async with shown.drawn():
        with pytest.raises(MetricError, match="the metric 'loss' is 'low'"):
            async with MonitoredSession([shown.hook("loss")], creator) as session:
                await session.run([])
    assert "failed at step" in shown.file.getvalue()
    assert "MetricError(" in shown.file.getvalue()


@pytest.mark.anyio
async def test_workers_of_a_model_share_a_row_of_its_steps(shown: Shown) -> None:
    creator = SharedSessionCreator(FunctionSessionCreator(step), 2)
    hooks = [StopAtStepHook(last_step=100)]
    first = await MonitoredSession([*hooks, shown.hook(name="chief")], creator).open()
    second = await MonitoredSession([*hooks, shown.hook("loss")], creator).open()
    assert shown.look() == "2 workers: step 0 of 100 · 2 starting\n"
    for _ in range(3):
        await first.run([])
    assert shown.look(10.0) == (
        "2 workers: step 3 of 100 · 0.3 steps/s · 5 min 23 s left · starting\n"
    )
    async with shown.drawn():
        await first.close()
        assert "done" not in shown.file.getvalue()
        await second.close()
    lines = shown.file.getvalue().splitlines()
    assert [line for line in lines if "done" in line] == lines[-1:]
    assert lines[-1].startswith("2 workers: done at step 3 of 100")


@pytest.mark.anyio
async def test_sessions_of_several_models_are_numbered(shown: Shown) -> None:
    sessions = [
        await MonitoredSession([shown.hook(name=name)], FunctionSessionCreator(step)).open()
        for name in (None, "wide", None, None)
    ]
    for session in sessions[:3]:
        await session.run([])
    assert shown.look().splitlines() == [
        "model 1: step 1", "wide: step 1", "model 3: step 1", "and 1 more: starting",
    ]  # fmt: skip
    async with shown.drawn():
        for session in sessions:
            await session.close()
    lines = shown.file.getvalue().splitlines()
    names = ["model 1", "wide", "model 3", "model 4"]
    assert [line.partition(":")[0] for line in lines if "done" in line] == names


@pytest.mark.anyio
async def test_a_stop_is_named_in_the_last_line(shown: Shown) -> None:
    async with opened(shown, [shown.hook()]) as session:
        await session.run([])
        session.request_stop("enough")
        assert shown.look() == "step 1 · stopping, by session.request_stop\n"
    assert re.fullmatch(
        r"stopped at step 1 in .* · session.request_stop: enough",
        shown.file.getvalue().splitlines()[-1],
    )


@pytest.mark.anyio
async def test_an_error_is_named_in_the_last_line(shown: Shown) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    async with shown.drawn():
        with pytest.raises(ValueError, match="broken"):
            async with MonitoredSession([shown.hook()], FunctionSessionCreator(step)) as session:
                await session.run([])
                session.start_soon(fail)
                await session.or_stop(anyio.sleep_forever)
    assert re.fullmatch(
        r"failed at step 1 in .* · ValueError\('broken'\)", shown.file.getvalue().splitlines()[-1]
    )


@pytest.mark.anyio
async def test_a_cancelled_session_says_so(shown: Shown) -> None:
    async with shown.drawn():
        with anyio.CancelScope() as scope:
            async with MonitoredSession([shown.hook()], FunctionSessionCreator(step)) as session:
                await session.run([])
                scope.cancel()
                await anyio.sleep_forever()
    assert re.fullmatch(r"cancelled at step 1 in .*", shown.file.getvalue().splitlines()[-1])


@pytest.mark.anyio
async def test_a_session_that_fails_to_open_has_a_last_line(shown: Shown) -> None:
    hooks = [shown.hook(name="mine"), raises_at("begin", ValueError("no"))]
    async with shown.drawn():
        with pytest.raises(ValueError, match="no"):
            await MonitoredSession(hooks, FunctionSessionCreator(step)).open()
    assert shown.file.getvalue() == "mine: failed before it began · ValueError('no')\n"


@pytest.mark.anyio
async def test_a_dropped_session_leaves_the_display(shown: Shown) -> None:
    session = await MonitoredSession([shown.hook()], FunctionSessionCreator(step)).open()
    shown.look()
    with pytest.warns(ResourceWarning):
        del session
    assert shown.look().startswith("dropped, not closed, at step 0 in ")


@pytest.mark.anyio
async def test_side_tasks_and_evaluations_are_named(shown: Shown) -> None:
    done = anyio.Event()

    async def act() -> None:
        await done.wait()

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        await done.wait()
        return {"accuracy": 0.9}

    evaluation = EvaluationHook(evaluate, every_n_steps=1, at_end=False, name="dev set")
    async with opened(shown, [evaluation, shown.hook([]), TimeLimitHook(99)]) as session:
        session.start_soon(act)
        session.start_soon(act)
        await session.run([])
        line = shown.look()
        done.set()
    assert line == "step 1 · beside: 2 act, dev set\n"


@pytest.mark.anyio
async def test_an_exclusive_evaluation_is_a_phase(shown: Shown) -> None:
    seen: list[str] = []

    def evaluate(session: Any, step: int) -> dict[str, float]:
        seen.append(shown.look(20.0))
        return {}

    evaluation = EvaluationHook(evaluate, every_n_steps=1, at_end=False)
    async with opened(shown, [evaluation, shown.hook([])]) as session:
        await session.run([])
    assert seen == ["step 1 · evaluating\n"]


@pytest.mark.anyio
async def test_an_end_waits_no_longer_than_a_second_for_a_blocked_terminal() -> None:
    blocked, free = threading.Event(), threading.Event()

    class Blocked(io.StringIO):
        def write(self, text: str) -> int:
            blocked.set()
            free.wait(30)
            return super().write(text)

    file = Blocked()
    session = MonitoredSession([ProgressHook(file=file)], FunctionSessionCreator(step))
    await session.open()
    assert await anyio.to_thread.run_sync(blocked.wait, 10)
    for _ in range(1000):
        await session.run([])
    begun = system_now()
    await session.close()
    assert 0.9 < system_now() - begun < 5
    free.set()


@pytest.mark.anyio
async def test_a_stream_that_fails_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("the terminal has gone")

    hook = ProgressHook(file=Broken())
    async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
        await session.run([])
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "The progress display failed and is off; training goes on"
    ]


@pytest.mark.anyio
async def test_the_display_s_thread_ends_with_its_last_session() -> None:
    file = io.StringIO()
    hook, creator = ProgressHook(file=file), FunctionSessionCreator(step)
    # also where it is listed twice, and given to a second session, against what it asks for
    async with (
        MonitoredSession([hook, hook], creator),
        MonitoredSession([hook], creator) as session,
    ):
        assert threads_left("asynchooks-progress")
        await session.run([])
    for thread in own_threads("asynchooks-progress"):
        thread.join(10)
        assert not thread.is_alive()
    assert id(file) not in DISPLAYS._displays
    assert "done at step 1 in " in file.getvalue().splitlines()[-1]


@in_virtual_time
async def test_in_virtual_time_it_shows_nothing(engine: Engine) -> None:
    file = io.StringIO()
    hooks = [ProgressHook({"loss": "loss", "mean": mean("loss")}, file=file)]
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        await session.run([])
        assert threads_left("asynchooks-progress") == []
    assert file.getvalue() == ""


# --- in a terminal ---


def console(file: io.StringIO, width: int = 80, height: int = 24) -> Any:
    from rich.console import Console

    return Console(file=file, force_terminal=True, width=width, height=height, color_system=None)


def on_terminal(file: io.StringIO) -> Surface:
    return TerminalSurface(console(file))


def view(**fields: Any) -> Line:
    given = {"name": "", "step": 1200, "limit": 10000, "rate": 356.0, "values": {"loss": 0.25}}
    return Line(**{**given, **fields})


def models(num: int) -> list[Line]:
    return [view(name=f"model {i}") for i in range(num)]


def drawn(lines: list[Line], **size: int) -> list[str]:
    """The rows of the bar."""
    file = io.StringIO()
    surface = TerminalSurface(console(file, **size))
    surface.draw(lines, [], 0.0)
    shown = file.getvalue()
    surface.close()
    assert "\x1b[?25l" not in file.getvalue()  # the cursor is never hidden
    return shown.split("\n")


def test_a_terminal_shows_a_bar_in_one_row() -> None:
    (row,) = drawn([view()])
    pattern = r"training ━+ +1,200/10,000 356 steps/s 25 s left loss 0.25"
    assert re.fullmatch(pattern, row.strip())
    assert len(row) <= 80


def test_workers_of_a_model_are_one_row_that_counts_their_phases() -> None:
    phases = ["starting", "training", "starting", "evaluating"]
    (row,) = drawn([view(name="4 workers", phases=phases)], width=100)
    assert row.startswith("4 workers 2 starting, evaluating ━")


def test_many_models_are_folded() -> None:
    table = drawn(models(3))
    assert [row.split()[:2] for row in table] == [["model", str(i)] for i in range(3)]
    assert len({len(row) for row in table}) == 1
    folded = drawn(models(64))
    assert len(folded) == 11
    assert folded[-1].strip() == "and 54 more: 54 training"
    assert len(drawn(models(64), height=8)) == 5


@pytest.mark.parametrize("width", [20, 40, 59, 60, 200])
@pytest.mark.parametrize("num_models", [1, 5])
def test_no_row_is_wider_than_the_terminal(width: int, num_models: int) -> None:
    table = drawn([view(name="a long name of a model " * 3)] * num_models, width=width)
    assert max(map(len, table)) <= width


def test_without_a_limit_there_is_no_bar() -> None:
    (row,) = drawn([view(limit=None)])
    assert row.split() == ["training", "1,200", "356", "steps/s", "loss", "0.25"]


def test_a_bar_is_drawn_over_the_last_one_and_ended_trainings_stay_above_it() -> None:
    terminal = io.StringIO()
    surface = TerminalSurface(console(terminal))
    surface.draw(models(3), [], 0.0)
    bar = screen(terminal.getvalue())
    surface.draw(models(3), ["ended"], 0.0)
    assert screen(terminal.getvalue()) == ["ended", *bar]
    surface.close()
    assert screen(terminal.getvalue())[0] == "ended"
    assert not any(screen(terminal.getvalue())[1:])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_streams_and_handlers_are_given_back_also_where_the_next_display_takes_them_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, printed = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", printed)
    logger = logging.getLogger("asynchooks")
    handler = logging.StreamHandler(printed)
    logger.addHandler(handler)
    try:
        first, second = (TerminalSurface(console(file)) for _ in range(2))
        first.draw([view()], [], 0.0)
        kept: Any = sys.stdout
        assert kept is not printed
        assert handler.stream is kept
        second.draw([view()], [], 0.0)
        first.close()
        second.close()
        assert sys.stdout is printed
        assert handler.stream is printed
    finally:
        logger.removeHandler(handler)
    kept.write("kept by other code\n")
    assert "kept by other code" in file.getvalue()


def test_the_streams_of_another_terminal_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = Terminal()
    monkeypatch.setattr(sys, "stdout", printed)
    surface = TerminalSurface(console(io.StringIO()))
    surface.draw([view()], [], 0.0)
    assert sys.stdout is printed
    surface.close()


@pytest.mark.anyio
async def test_a_session_that_was_never_looked_at_has_its_limit_in_the_last_line(
    shown: Shown,
) -> None:
    hooks = [StopAtStepHook(last_step=3), shown.hook("loss")]
    async with opened(shown, hooks) as session:
        while not session.should_stop():
            await session.run([])
    assert shown.file.getvalue().startswith("done at step 3 of 3 in ")


@pytest.mark.anyio
async def test_the_last_line_has_the_values_of_the_step_at_the_limit(shown: Shown) -> None:
    losses = iter([3.0, 2.0, 1.0])
    hooks = [StopAtStepHook(last_step=3), shown.hook("loss")]
    async with opened(shown, hooks, FunctionSessionCreator(lambda: {"loss": next(losses)})) as s:
        while not s.should_stop():
            await s.run([])
    assert shown.file.getvalue().endswith("steps/s · loss 1\n")


@pytest.mark.anyio
async def test_a_session_in_a_terminal_ends_with_a_line_and_no_bar() -> None:
    shown = Shown(on_terminal)
    DISPLAYS._displays[id(shown.file)] = shown.display
    hooks = [StopAtStepHook(last_step=10), shown.hook("loss")]
    async with opened(shown, hooks) as session:
        shown.look()
        while not session.should_stop():
            await session.run([])
        assert "10/10" in shown.look()
    last, *rest = screen(shown.file.getvalue())
    assert re.fullmatch(r"done at step 10 of 10 in .* loss 0\.5", last)
    assert not any(rest)


def test_a_stream_that_cannot_take_a_dot_gets_a_comma() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainSurface(file).draw([view()], [], 0.0)
    file.seek(0)
    assert file.read() == "step 1,200 of 10,000, 356 steps/s, 25 s left, loss 0.25\n"


# --- words ---


def test_a_line_says_steps_rate_time_left_and_values() -> None:
    assert view().text() == ("step 1,200 of 10,000 · 356 steps/s · 25 s left · loss 0.25")


@pytest.mark.parametrize(
    ("secs", "text"),
    [
        (0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 0 s"),
        (200, "3 min 20 s"), (599.9, "10 min"), (3599, "1 h 0 min"), (7500, "2 h 5 min"),
        (200000, "2 days 7 h"),
    ],
)  # fmt: skip
def test_durations_are_short(secs: float, text: str) -> None:
    assert secs_text(secs) == text


def test_rates_and_numbers_are_short() -> None:
    rates = {1234.5: "1,234 steps/s", 1.234: "1.23 steps/s", 0.05: "20 s/step", 0: "0 steps/s"}
    assert {rate: rate_text(rate) for rate in rates} == rates
    numbers = {0.31234: "0.3123", 12.0: "12", float("nan"): "nan", 1e20: "1e+20", 1e5: "100,000"}
    assert [number_text(number) for number in numbers] == list(numbers.values())


def test_a_rate_is_that_of_the_last_seconds_and_begins_again_after_a_recovery() -> None:
    rate = Rate()
    assert rate.look(0.0, 0) is None
    assert rate.look(1.0, 10) == 10.0
    for now in range(2, 30):
        last = rate.look(float(now), 10 + 100 * (now - 1))
    assert last == 100.0
    assert rate.look(30.0, 5) is None
    assert rate.look(31.0, 8) == 3.0


def test_wrong_arguments_say_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"values are histogram\('gradients'\); a histogram cannot"):
        ProgressHook(histogram("gradients"))
    with pytest.raises(TypeError, match=r"file is 'log.txt'; give a text stream"):
        ProgressHook(file="log.txt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every_n_secs is 0"):
        ProgressHook(every_n_secs=0)
    with pytest.raises(TypeError, match="name is 3; give a text"):
        ProgressHook(name=3)  # type: ignore[arg-type]
