"""ProgressHook: what it shows of sessions, where, and that it neither costs nor holds up steps."""

from __future__ import annotations

import io
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

from asynchooks import (
    EvaluationHook,
    FeedHook,
    MetricError,
    MetricsHook,
    MonitoredSession,
    ProgressHook,
    SharedSessionCreator,
    StopAtStepHook,
    TimeLimitHook,
)
from asynchooks._engine.base import Engine
from asynchooks._engine.current import system_now
from asynchooks.data import interleave, prefetch, repeat
from asynchooks.hooks.progress._display import DISPLAYS, Display
from asynchooks.hooks.progress._rows import Line, secs_text
from asynchooks.hooks.progress._surfaces import PlainSurface, Surface, TerminalSurface
from asynchooks.metrics import histogram, mean, steps_per_sec

from ..support.helpers import raises_at, settle
from ..support.threads import own_threads, threads_left
from .terminals import screen
from .training import Calls
from .virtual_time import in_virtual_time

pytestmark = pytest.mark.anyio


def step() -> dict[str, float]:
    return {"loss": 0.5}


class Shown:
    """A stream, and the display on it, which the test draws: a second goes by in each look.

    The display is the private one: its thread would draw at any moment.
    """

    def __init__(self, surface: Callable[[io.StringIO], Surface] = PlainSurface) -> None:
        self.file = io.StringIO()
        self.now = system_now()
        self.display = Display(surface(self.file))
        self.display._thread.start = lambda: None  # type: ignore[method-assign]
        DISPLAYS._displays[id(self.file)] = self.display

    def look(self, secs: float = 1.0) -> str:
        """What is added after some seconds."""
        self.now += secs
        begun = len(self.file.getvalue())
        self.display.draw(self.now)
        return self.file.getvalue()[begun:]

    @property
    def last_line(self) -> str:
        return self.file.getvalue().splitlines()[-1]

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
                    await anyio.sleep(0.001)  # an end may wait for a thread

            group.start_soon(draw)
            yield
            group.cancel_scope.cancel()

    @asynccontextmanager
    async def opened(self, *hooks: Any, creator: Any = step) -> AsyncIterator[MonitoredSession]:
        """A session that is closed while the display is drawn."""
        session = await MonitoredSession(hooks, creator).open()
        try:
            yield session
        finally:
            async with self.drawn():
                await session.close()


@pytest.fixture
def shown() -> Any:
    shown = Shown()
    yield shown
    assert DISPLAYS._displays.pop(id(shown.file), None) in (None, shown.display)


async def test_lines_come_at_the_start_every_ten_seconds_and_at_the_end(shown: Shown) -> None:
    async with shown.opened(StopAtStepHook(last_step=1000), shown.hook("loss")) as session:
        assert shown.look() == "step 0 of 1,000 · starting\n"
        for num in (100, 200, 300):
            while session.global_step.value < num:
                await session.run([])
            assert shown.look(2.0) == ""
        assert shown.look(4.0) == "step 300 of 1,000 · 30 steps/s · 23 s left · loss 0.5\n"
        assert shown.look(1.0) == ""
    pattern = r"done at step 300 of 1,000 in 1\d s · 2\d(\.\d)? steps/s · loss 0.5"
    assert re.fullmatch(pattern, shown.last_line)


@pytest.mark.parametrize(
    ("source", "epoch"),
    [
        (lambda: prefetch(repeat(range(4), 3), 2), "epoch 2 of 3 · "),
        (lambda: repeat(range(4)), "epoch 2 · "),
        (lambda: interleave([repeat([1], 9), repeat([2], 9)]), ""),
    ],
)
async def test_lines_say_which_epoch_of_how_many_it_is(
    shown: Shown, source: Callable[[], Any], epoch: str
) -> None:
    async with shown.opened(FeedHook(source(), "x"), shown.hook([]), creator=lambda x: {}) as s:
        shown.look()
        for _ in range(5):
            await s.run([])
            line = shown.look(11.0)
    assert line.startswith(f"step 5 · {epoch}11 s/step")


async def test_runs_are_asked_for_values_only_when_the_display_has_shown_the_last(
    shown: Shown,
) -> None:
    calls: list[str] = []

    def value() -> float:
        calls.append("read")
        return 2.0

    asks = Calls(after_run=lambda run_context, run_values: calls.append("run"))
    async with shown.opened(shown.hook({"v": value}), asks) as session:
        for num in range(6):
            await session.run([])
            if num == 3:
                shown.look()
        assert calls == ["read", "run", "run", "run", "run", "read", "run", "run"]


async def test_means_are_taken_over_all_runs_since_the_last_look_and_are_in_the_status(
    shown: Shown,
) -> None:
    losses = iter([1.0, 2.0, 3.0, 4.0])
    hook = shown.hook([mean("loss"), steps_per_sec()])
    async with shown.opened(hook, creator=lambda: {"loss": next(losses)}) as session:
        await session.run([])
        assert "loss 1" in shown.look()
        await session.run([])  # the hook is asked here
        await session.run([])
        shown.look()
        await session.run([])
        assert "loss 3.5" in shown.look(10.0)
        assert session.status().metrics["loss"] == 3.5


async def test_without_values_the_session_s_newest_metrics_are_shown(shown: Shown) -> None:
    reads = MetricsHook(lambda step, values: None, "loss", every_n_steps=1)
    async with shown.opened(reads, shown.hook()) as session:
        session.log_metrics({"reward": 7, "b": 1, "c": 2, "d": 3})
        await session.run([])
        assert "reward 7 · b 1 · c 2 · d 3\n" in shown.look()
        session.log_metrics({"reward": 1234.5})
    assert "reward 1234 · b 1" in shown.last_line


async def test_workers_of_a_model_share_a_row_of_its_steps(shown: Shown) -> None:
    creator, limit = SharedSessionCreator(step, 2), StopAtStepHook(last_step=100)
    async with shown.opened(limit, shown.hook("loss"), creator=creator):
        async with shown.opened(limit, shown.hook(name="chief"), creator=creator) as chief:
            assert shown.look() == "2 workers: step 0 of 100 · 2 starting\n"
            for _ in range(3):
                await chief.run([])
            assert shown.look(10.0) == (
                "2 workers: step 3 of 100 · 0.3 steps/s · 5 min 23 s left · starting\n"
            )
        assert "done" not in shown.file.getvalue()
    assert shown.file.getvalue().count("done") == 1
    assert shown.last_line.startswith("2 workers: done at step 3 of 100")


async def test_sessions_of_several_models_are_numbered(shown: Shown) -> None:
    sessions = [
        await MonitoredSession([shown.hook(name=name)], step).open()
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
    names = re.findall("(.*): done at", shown.file.getvalue())
    assert names == ["model 1", "wide", "model 3", "model 4"]


async def stop(session: MonitoredSession) -> None:
    session.request_stop("enough")


async def fail(session: MonitoredSession) -> None:
    raise ValueError("broken")


async def read_no_number(session: MonitoredSession) -> None:
    await session.run([], {"loss": "low"})


@pytest.mark.parametrize(
    ("ending", "line"),
    [
        (stop, "stopped at step 1 in .* · session.request_stop: enough"),
        (fail, r"failed at step 1 in .* · ValueError\('broken'\)"),
        (read_no_number, r"failed at step . in .* · MetricError\(.*the metric 'loss' is 'low'.*"),
        (None, "cancelled at step 1 in .*"),
    ],
)
async def test_the_last_line_says_how_the_session_ended(
    shown: Shown, ending: Any, line: str
) -> None:
    async with shown.drawn():
        with suppress(ValueError, MetricError), anyio.CancelScope() as scope:
            async with MonitoredSession([shown.hook("loss")], lambda loss=0.5: {"loss": loss}) as s:
                await s.run([])
                shown.look()
                if ending is None:
                    scope.cancel()
                    await anyio.sleep_forever()
                await ending(s)
    assert re.fullmatch(line, shown.last_line)


async def test_a_session_that_fails_to_open_has_a_last_line(shown: Shown) -> None:
    hooks = [shown.hook(name="mine"), raises_at("begin", ValueError("no"))]
    async with shown.drawn():
        with pytest.raises(ValueError, match="no"):
            await MonitoredSession(hooks, step).open()
    assert shown.file.getvalue() == "mine: failed before it began · ValueError('no')\n"


async def test_a_dropped_session_leaves_the_display(shown: Shown) -> None:
    session = await MonitoredSession([shown.hook()], step).open()
    shown.look()
    with pytest.warns(ResourceWarning):
        del session
    assert shown.look().startswith("dropped, not closed, at step 0 in ")


async def test_phases_and_what_runs_beside_are_named(shown: Shown) -> None:
    async def wait(*given: Any) -> Any:
        await done.wait()
        return {}

    def exclusively(session: Any, step: int) -> dict[str, float]:
        lines.append(shown.look(20.0))
        return {}

    done, lines = anyio.Event(), list[str]()
    hooks = [
        EvaluationHook(wait, every_n_steps=1, at_end=False, name="dev set"), TimeLimitHook(99),
        EvaluationHook(exclusively, every_n_steps=2, at_end=False),
    ]  # fmt: skip
    async with shown.opened(*hooks, shown.hook([])) as session:
        for _ in range(2):
            session.start_soon(wait, name="act")
        await session.run([])
        lines.append(shown.look())
        await session.run([])
        session.request_stop("enough")
        lines.append(shown.look(20.0))
        done.set()
    assert lines[0] == "step 1 · beside: 2 act, dev set\n"
    assert "evaluating" in lines[1]
    assert "stopping, by session.request_stop" in lines[2]


async def test_a_stream_that_fails_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("the terminal has gone")

    async with MonitoredSession([ProgressHook(file=Broken())], step) as session:
        await session.run([])
    assert "The progress display failed and is off; training goes on" in caplog.messages


async def test_the_display_s_thread_ends_with_its_last_session() -> None:
    file = io.StringIO()
    hook = ProgressHook(file=file)
    # also where it is listed twice, and given to a second session, against what it asks for
    async with MonitoredSession([hook, hook], step), MonitoredSession([hook], step) as session:
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
    async with MonitoredSession(hooks, step) as session:
        await session.run([])
        assert threads_left("asynchooks-progress") == []
    assert file.getvalue() == ""


# --- in a terminal: rows and words are private, as a session shows one of each at a time ---


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
    (row,) = drawn([view(limit=None)])  # no bar
    assert row.split() == ["training", "1,200", "356", "steps/s", "loss", "0.25"]


def test_many_models_are_folded() -> None:
    table = drawn(models(3))
    assert [row.split()[:2] for row in table] == [["model", str(i)] for i in range(3)]
    folded = drawn(models(64))
    assert len(folded) == 11
    assert folded[-1].strip() == "and 54 more: 54 training"
    assert len(drawn(models(64), height=8)) == 5


@pytest.mark.parametrize("width", [20, 59, 60, 200])
@pytest.mark.parametrize("num_models", [1, 5])
def test_no_row_is_wider_than_the_terminal(width: int, num_models: int) -> None:
    table = drawn([view(name="a long name of a model " * 3)] * num_models, width=width)
    assert max(map(len, table)) <= width


async def test_a_session_in_a_terminal_ends_with_the_values_of_its_last_step_and_no_bar() -> None:
    shown, losses = Shown(on_terminal), iter([3.0, 2.0, 1.0])
    hooks = [StopAtStepHook(last_step=3), shown.hook("loss")]
    async with shown.opened(*hooks, creator=lambda: {"loss": next(losses)}) as session:
        assert "0/3" in shown.look()
        while not session.should_stop():
            await session.run([])
    last, *rest = screen(shown.file.getvalue())
    assert re.fullmatch("done at step 3 of 3 in .* loss 1", last)
    assert not any(rest)


def test_a_stream_that_cannot_take_a_dot_gets_a_comma() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainSurface(file).draw([view()], [], 0.0)
    file.seek(0)
    assert file.read() == "step 1,200 of 10,000, 356 steps/s, 25 s left, loss 0.25\n"


def test_durations_are_by_their_two_largest_units() -> None:
    secs = {
        9.94: "9.9 s", 9.96: "10 s", 59.6: "1 min 0 s", 599.9: "10 min", 7500: "2 h 5 min",
        200000: "2 days 7 h",
    }  # fmt: skip
    assert {each: secs_text(each) for each in secs} == secs


def test_wrong_arguments_say_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"values are histogram\('gradients'\); a histogram cannot"):
        ProgressHook(histogram("gradients"))
    with pytest.raises(TypeError, match=r"file is 'log.txt'; give a text stream"):
        ProgressHook(file="log.txt")  # type: ignore[arg-type]
