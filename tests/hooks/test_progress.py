"""ProgressHook: what it shows of sessions, where, and that it neither costs nor holds up steps."""

import io
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
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
from asynchooks._engine.current import system_now
from asynchooks.data import interleave, prefetch, repeat
from asynchooks.hooks.progress._display import DISPLAYS, Display
from asynchooks.hooks.progress._surfaces import PlainSurface, Surface, TerminalSurface
from asynchooks.metrics import mean, steps_per_sec

from ..support.helpers import settle
from ..support.moments import at
from ..support.threads import own_threads, threads_left
from .terminals import screen
from .virtual_time import in_virtual_time


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

    asks = at(after_run=lambda run_context, run_values: calls.append("run"))
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
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")  # which cannot take a dot
    hook = ProgressHook("loss", file=file)
    # also where it is listed twice, and given to a second session, against what it asks for
    async with MonitoredSession([hook, hook], step), MonitoredSession([hook], step) as session:
        assert threads_left("asynchooks-progress")
        await session.run([])
    for thread in own_threads("asynchooks-progress"):
        thread.join(10)
        assert not thread.is_alive()
    assert id(file) not in DISPLAYS._displays
    file.seek(0)
    assert re.search("done at step 1 in .*, loss 0.5$", file.read().splitlines()[-1])


@in_virtual_time
async def test_in_virtual_time_it_shows_nothing() -> None:
    file = io.StringIO()
    hooks = [ProgressHook({"loss": "loss", "mean": mean("loss")}, file=file)]
    async with MonitoredSession(hooks, step) as session:
        await session.run([])
        assert threads_left("asynchooks-progress") == []
    assert file.getvalue() == ""


def on_terminal(file: io.StringIO, height: int = 24) -> Surface:
    from rich.console import Console

    console = Console(
        file=file, force_terminal=True, width=80, height=height, color_system=None
    )  # fmt: skip
    return TerminalSurface(console)


@pytest.mark.parametrize(("height", "num_rows"), [(24, 11), (8, 5)])
async def test_in_a_terminal_many_models_are_folded_and_no_row_is_wider(
    height: int, num_rows: int
) -> None:
    shown = Shown(partial(on_terminal, height=height))
    sessions = [
        await MonitoredSession([shown.hook(name="a long name of a model " * 3)], step).open()
        for _ in range(14)
    ]
    rows = shown.look().split("\n")
    assert (len(rows), max(map(len, rows)) <= 80) == (num_rows, True)
    assert f"and {15 - num_rows} more" in rows[-1]
    async with shown.drawn():
        for session in sessions:
            await session.close()
    assert "\x1b[?25l" not in shown.file.getvalue()  # the cursor is never hidden


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
