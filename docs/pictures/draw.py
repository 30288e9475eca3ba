"""The pictures of the site: `python docs/pictures/draw.py [directory]` draws them.

Diagrams are SVG text written here; plots are matplotlib's. What shows a run is drawn from a real
one, in virtual time. The same code draws the same bytes: tests/test_pictures.py compares them. All
pictures stand on a light card, so that they can be read on a dark page, too.
"""

from __future__ import annotations

import io
import re
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

import asynchooks
from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.data import Rollout, WhenStale, rollouts
from asynchooks.protocols import StaleSynchronous, parse_protocol
from asynchooks.simulation import (
    Constant,
    Crashes,
    Delay,
    Exponential,
    Report,
    Simulation,
    Uniform,
    Worker,
)

CARD, EDGE, GRID = "#f8f9fb", "#cdd3dc", "#dfe3ea"
INK, SOFT = "#1d2433", "#5a6475"
BLUE, GREEN, YELLOW, RED, PURPLE, GREY = (
    "#3b7dd8", "#2a9d5c", "#f2c14e", "#d1495b", "#7a5cc0", "#8a94a6",
)  # fmt: skip
PALE_BLUE, PALE_GREEN, PALE_YELLOW, PALE_RED = (
    "#dce9fb",
    "#d9f0e3",
    "#fdf1d0",
    "#fadfe3",
)
FONT = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, Menlo, Consolas, monospace"


@dataclass
class Drawing:
    """An SVG of some lines of text, boxes and lines, on a card; sizes are in pixels."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, text: str, *, size: float = 13, colour: str = INK,
        anchor: str = "start", is_bold: bool = False, is_code: bool = False,
    ) -> None:  # fmt: skip
        """Text on a line at y: begins, is centred or ends at x."""
        weight = ' font-weight="600"' if is_bold else ""
        family = f' font-family="{MONO}"' if is_code else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" '
            f'text-anchor="{anchor}"{weight}{family}>{escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", *,
        fill: str = PALE_BLUE, edge: str = BLUE, colour: str = INK, size: float = 12,
        is_code: bool = False, radius: float = 4,
    ) -> None:  # fmt: skip
        """A box with text in its middle."""
        stroke = f' stroke="{edge}"' if edge else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}"{stroke}/>'
        )
        if text:
            middle = x + width / 2, y + height / 2 + 0.35 * size
            self.text(
                *middle,
                text,
                size=size,
                colour=colour,
                anchor="middle",
                is_code=is_code,
            )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, colour: str = SOFT,
        width: float = 1.5, is_dashed: bool = False, is_arrow: bool = False,
    ) -> None:  # fmt: skip
        """A straight line."""
        dashes = ' stroke-dasharray="4 3"' if is_dashed else ""
        marker = f' marker-end="url(#to-{colour[1:]})"' if is_arrow else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" '
            f'stroke-width="{width:g}"{dashes}{marker}/>'
        )

    def svg(self) -> str:
        """All of it."""
        heads = sorted(set(re.findall(r"url\(#to-(\w+)\)", "".join(self.parts))))
        markers = "".join(
            f'<marker id="to-{each}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#{each}"/></marker>'
            for each in heads
        )
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{FONT}" role="img">',
            f"<title>{escape(self.title)}</title>",
            *([f"<defs>{markers}</defs>"] if markers else []),
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8" '
            f'fill="{CARD}" stroke="{EDGE}"/>',
            *self.parts,
            "</svg>\n",
        ])  # fmt: skip


def moments() -> str:
    """When a session calls its hooks."""
    drawing = Drawing(760, 344, "The moments of a hook")
    drawing.text(
        20,
        32,
        "async with MonitoredSession(hooks, creator) as session:",
        is_code=True,
    )
    hooks, raw, error = 70, 172, 262
    for y, name in (
        (hooks + 23, "hooks"),
        (raw + 23, "raw session"),
        (error + 23, "on an error"),
    ):
        drawing.text(20, y, name, colour=SOFT, size=12)

    def moment(x: float, width: float, name: str, *, y: float = hooks, bad: bool = False) -> None:
        fill, edge = (PALE_RED, RED) if bad else (PALE_BLUE, BLUE)
        drawing.box(x, y, width, 38, name, fill=fill, edge=edge, is_code=True, size=11)

    drawing.box(316, 52, 240, 174, fill="#eef1f6", edge=EDGE)
    drawing.text(436, 242, "for each session.run(...)", colour=SOFT, anchor="middle", size=12)
    moment(98, 52, "begin")
    moment(160, 144, "after_create_session")
    moment(324, 80, "before_run")
    moment(476, 72, "after_run")
    moment(568, 40, "end")
    moment(656, 84, "after_close")
    drawing.box(154, raw, 492, 38, fill=PALE_GREEN, edge=GREEN)
    drawing.box(402, raw, 72, 38, "raw run", fill=GREEN, edge=GREEN, colour="#ffffff")
    drawing.text(160, raw + 54, "created, restored", colour=SOFT, size=11)
    drawing.text(644, raw + 54, "closed", colour=SOFT, size=11, anchor="end")
    drawing.text(562, hooks + 54, "clean end only", colour=SOFT, size=11)
    drawing.line(392, hooks + 39, 418, raw - 1, is_arrow=True)
    drawing.line(458, raw - 1, 484, hooks + 40, is_arrow=True)
    drawing.line(436, 248, 436, error - 1, colour=RED, is_arrow=True)
    moment(400, 72, "on_error", y=error, bad=True)
    drawing.text(
        480,
        error + 16,
        "last hook first; then side tasks stop,",
        colour=SOFT,
        size=11,
    )
    drawing.text(480, error + 31, "and the raw session is closed", colour=SOFT, size=11)
    drawing.line(690, error + 12, 712, error + 12, colour=RED)
    drawing.line(712, error + 12, 712, hooks + 40, colour=RED, is_arrow=True)
    drawing.text(
        20, 326, "A box is a coroutine that a hook may define. All hooks are called at each "
        "moment, in the order of the list.", colour=SOFT, size=12,
    )  # fmt: skip
    return drawing.svg()


@dataclass
class Run:
    """One run of a worker: when its hooks were called, its step began and ended, which it was."""

    worker: int
    asked: float
    began: float = 0.0
    ended: float = 0.0
    step: int = 0


class NoteAsked(SessionRunHook):
    """Stands last and notes when a worker asks for its step."""

    def __init__(self, worker: int, now: Callable[[], float], runs: list[Run]) -> None:
        self.worker, self._now, self._runs = worker, now, runs

    async def before_run(self, run_context: SessionRunContext) -> None:
        self._runs.append(Run(self.worker, self._now()))


def trained(num_workers: int, first_step: int, last_step: int, delay: Delay) -> list[Run]:
    """All runs of workers that share a model and a limit, in virtual time."""
    simulation, runs = Simulation(seed=7, backend="turbo"), list[Run]()
    times = [simulation.streams.delays(each, "step", delay) for each in range(num_workers)]
    num_done = first_step

    async def step(worker: int) -> dict[str, int]:
        nonlocal num_done
        run = next(each for each in reversed(runs) if each.worker == worker)
        run.began = simulation.now
        await simulation.sleep(times[worker].next())
        num_done += 1
        run.step, run.ended = num_done, simulation.now
        return {}

    async def train(worker: int, creator: SharedSessionCreator) -> None:
        note = NoteAsked(worker, lambda: simulation.now, runs)
        hooks = [StopAtStepHook(last_step=last_step), note]
        async with MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run([], {"worker": worker})

    async def main() -> None:
        one = FunctionSessionCreator(step, initial_step=first_step)
        creator = SharedSessionCreator(one, num_workers=num_workers)
        tasks = [simulation.start(train, worker, creator) for worker in range(num_workers)]
        for task in tasks:
            await task.wait()

    simulation.run(main)
    return runs


def exact_stop() -> str:
    """Four workers near a limit of 200, by the real gate."""
    limit, num_workers = 200, 4
    runs = trained(num_workers, 184, limit, Uniform(0.8, 2.4))
    over = max(each.ended for each in runs)
    since, end = over - 7.0, over + 0.5
    drawing = Drawing(760, 322, "Four workers stop exactly at step 200")
    left, width = 92, 648
    scale = width / (end - since)

    def x(secs: float) -> float:
        return left + (max(secs, since) - since) * scale

    for worker in range(num_workers):
        y = 52 + 46 * worker
        drawing.text(24, y + 21, f"worker {worker}", colour=SOFT)
        drawing.line(left, y + 16, left + width, y + 16, colour=GRID)
        for run in (each for each in runs if each.worker == worker):
            is_refused = run.step == 0
            granted = over if is_refused else run.began
            if granted > run.asked and granted > since:
                secs = x(granted) - x(run.asked)
                drawing.box(x(run.asked), y + 4, secs, 24, fill=PALE_YELLOW, edge=YELLOW)
            if is_refused:
                drawing.box(x(granted) - 4, y + 2, 8, 28, fill=RED, edge="", radius=2)
            elif run.ended > since:
                box = x(run.began), y, x(run.ended) - x(run.began), 32
                drawing.box(*box, str(run.step) if box[2] > 26 else "", fill=PALE_BLUE)
    y = 52 + 46 * num_workers + 22
    made = [each for each in runs if each.step and each.ended > since]
    drawing.text(24, y + 5, "step", colour=SOFT)
    drawing.line(left, y, left + width, y, colour=SOFT, width=1)
    for run in made:
        drawing.line(x(run.ended), y - 4, x(run.ended), y + 4, colour=SOFT)
        if run.step % 4 == 0 or run.step == limit - 1:
            drawing.text(x(run.ended), y + 20, str(run.step), size=11, anchor="middle")
    legend(drawing, 24, 308, [
        (PALE_BLUE, BLUE, "a run and its step"),
        (PALE_YELLOW, YELLOW, "waits for a ticket"),
        (RED, RED, "refused: the block ends"),
    ])  # fmt: skip
    drawing.text(24, 30, "StopAtStepHook(last_step=200)", is_code=True)
    return drawing.svg()


def legend(drawing: Drawing, x: float, y: float, entries: list[tuple[str, str, str]]) -> None:
    """Coloured boxes and what they mean, in one line."""
    for fill, edge, text in entries:
        drawing.box(x, y - 10, 14, 12, fill=fill, edge=edge, radius=2)
        drawing.text(x + 20, y, text, size=12, colour=SOFT)
        x += 44 + 6.2 * len(text)


def workers() -> str:
    """Three workers on one event loop, which begin one after the other."""
    starts, num_steps, unit = [0, 4, 9], 18, 35
    drawing = Drawing(760, 292, "Three workers on one event loop")
    left, owners, turns = 104, list[int](), deque[int]()
    for step in range(num_steps):
        turns.extendleft(worker for worker, start in enumerate(starts) if start == step)
        owners.append(turns[0])  # one that was woken is the next
        turns.rotate(-1)
    drawing.text(
        24,
        30,
        "One event loop: one step at a time, and no thread for a worker that waits.",
    )
    colours = [(PALE_BLUE, BLUE), (PALE_GREEN, GREEN), ("#e6dff5", PURPLE)]
    for worker, start in enumerate(starts):
        y = 50 + 48 * worker
        drawing.text(24, y + 23, f"worker {worker}", colour=SOFT)
        drawing.line(left, y + 18, left + unit * num_steps, y + 18, colour=GRID)
        if start:
            text = f"await wait_for({start})"
            box = left, y + 6, unit * start - 3, 24
            drawing.box(*box, text, fill=PALE_YELLOW, edge=YELLOW, size=11, is_code=True)
        for place in (place for place, owner in enumerate(owners) if owner == worker):
            fill, edge = colours[worker]
            drawing.box(
                left + unit * place,
                y,
                unit - 3,
                36,
                str(place + 1),
                fill=fill,
                edge=edge,
            )
    y = 206
    drawing.text(24, y + 21, "event loop", colour=SOFT)
    for place, owner in enumerate(owners):
        fill = colours[owner][1]
        drawing.box(left + unit * place, y, unit - 3, 32, fill=fill, edge="", radius=2)
    drawing.text(
        24, 268, "The numbers are global steps. Step 4 wakes worker 1, step 9 wakes worker 2; "
        "a woken worker runs next.", colour=SOFT, size=12,
    )  # fmt: skip
    return drawing.svg()


KINDS = {
    "compute": (BLUE, "#ffffff"), "push": (GREEN, "#ffffff"), "pull": ("#8cc152", INK),
    "served": ("#14603a", "#ffffff"), "wait": (YELLOW, INK), "lost": (RED, "#ffffff"),
    "down": ("#3a3a3a", "#ffffff"),
}  # fmt: skip


def simulated_trace() -> Report:
    """Six workers under stale synchronous parallel, some of which crash."""
    cluster = Simulation(seed=11, backend="turbo").cluster(
        6, protocol=StaleSynchronous(1), compute=Exponential(1.0),
        pull=Constant(0.12), push=Constant(0.2), keep_timeline=True,
        failures=[Crashes(mtbf=Exponential(25.0), repair=Exponential(1.5))],
    )  # fmt: skip
    return cluster.run(until=14.0)


def trace() -> str:
    """What six simulated workers did when, as a viewer of traces shows it."""
    report, end = simulated_trace(), 14.0
    assert report.timeline is not None
    drawing = Drawing(760, 330, "A trace of six simulated workers")
    left, scale, top = 92, 648 / end, 34
    for secs in range(0, int(end) + 1, 2):
        drawing.line(left + secs * scale, top, left + secs * scale, 286, colour=GRID)
        if secs < end:
            drawing.text(left + secs * scale + 3, top + 2, f"{secs} s", size=11, colour=SOFT)
    drawing.text(24, top + 27, "versions", size=12, colour=SOFT)
    applied = [push for push in report.timeline.pushes if push.outcome == "applied"]
    for place, push in enumerate(applied):
        until = applied[place + 1].time if place + 1 < len(applied) else end
        x, width = left + push.time * scale, (until - push.time) * scale
        fill = (GREY, "#a9b2c1")[place % 2]
        text = str(push.version) if width > 9 * len(str(push.version)) else ""
        drawing.box(x, top + 12, width, 22, text, fill=fill, edge="", size=10, radius=0)
    for worker in range(report.num_workers):
        drawing.text(24, top + 63 + 34 * worker, f"worker {worker}", size=12, colour=SOFT)
    for span in report.timeline.spans:
        x, width = left + span.begin * scale, (span.end - span.begin) * scale
        fill, colour = KINDS[span.kind]
        text = span.kind if width > 7.2 * len(span.kind) else ""
        y = top + 46 + 34 * span.worker
        drawing.box(
            x,
            y,
            width,
            26,
            text,
            fill=fill,
            edge=CARD,
            size=11,
            colour=colour,
            radius=1,
        )
    names = ("pull", "compute", "push", "wait", "lost", "down")
    shown = {span.kind for span in report.timeline.spans}
    legend(
        drawing,
        24,
        312,
        [(KINDS[n][0], KINDS[n][0], n) for n in names if n in shown],
    )
    return drawing.svg()


ROOM = re.compile(r"^    (\S(?: ?\S)*)  +(\S.*)$", re.MULTILINE)
"""A line of the map in the package's docstring: names of rooms, and what they hold."""


def rooms() -> str:
    """The rooms of the package, from its own docstring."""
    rows = ROOM.findall(asynchooks.__doc__ or "")
    drawing = Drawing(760, 58 + 40 * len(rows) + 34, "The rooms of the package")
    drawing.text(
        24,
        32,
        "Each room imports only what stands below it, or to the right of it.",
    )
    fills = [
        ("#e6dff5", PURPLE), (PALE_YELLOW, YELLOW), (PALE_BLUE, BLUE), (PALE_GREEN, GREEN),
    ]  # fmt: skip
    for number, (names, what) in enumerate(rows):
        y = 50 + 40 * number
        fill, edge = fills[number * len(fills) // len(rows)]
        x = 24.0
        for name in names.split():
            width = 22 + 7.6 * len(name)
            drawing.box(x, y, width, 30, name, fill=fill, edge=edge, is_code=True)
            x += width + 8
        drawing.text(372, y + 20, what, size=11.5, colour=SOFT)
    y = 50 + 40 * len(rows) + 16
    drawing.text(
        24,
        y,
        "A reader starts in _session.py: MonitoredSession.run.",
        colour=SOFT,
        size=12,
    )
    return drawing.svg()


NUM_WORKERS, SECS = 64, 20.0
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
PROTOCOLS = {"async": BLUE, "ssp:3": GREEN, "ksync:48": PURPLE, "sync": RED}


def losses() -> dict[str, tuple[float, Report]]:
    """Of each protocol its best learning rate and what it did with it: a least-squares problem."""
    rng = np.random.default_rng(7)
    inputs = rng.normal(size=(256, 16))
    targets = inputs @ rng.normal(size=16) + rng.normal(scale=0.1, size=256)

    def gradient(weights: Any, worker: Worker) -> Any:
        rows = worker.rng.integers(256, size=8)
        return (inputs[rows] @ weights - targets[rows]) @ inputs[rows] / 8

    def loss(weights: Any) -> float:
        return float(np.mean((inputs @ weights - targets) ** 2) / 2)

    def late_loss(report: Report) -> float:
        late = [loss for secs, _, loss in report.losses if secs > SECS / 2]
        mean = float(np.mean(late))
        return mean if np.isfinite(mean) else np.inf

    def train(name: str, rate: float) -> Report:
        cluster = Simulation(7, "turbo").cluster(
            NUM_WORKERS, protocol=parse_protocol(name, NUM_WORKERS), compute=Exponential(1.0),
            parameters=np.zeros(16), learning_rate=rate,
        )  # fmt: skip
        every = 16 if name in ("async", "ssp:3") else 1
        return cluster.run(gradient=gradient, until=SECS, loss=loss, loss_every=every)

    found = {}
    with np.errstate(over="ignore", invalid="ignore"):  # the largest rates diverge
        for name in PROTOCOLS:
            reports = [(rate, train(name, rate)) for rate in RATES]
            found[name] = min(reports, key=lambda each: late_loss(each[1]))
    return found


def loss_by_protocol() -> str:
    """Loss against virtual time, each protocol at its own learning rate."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        for name, (rate, report) in losses().items():
            points = [(secs, loss) for secs, _, loss in report.losses]
            label = f"{name}, rate {rate:g}: {report.updates} updates"
            # steps: the parameters stand still between two updates
            axes.plot(*zip(*points, strict=True), label=label, color=PROTOCOLS[name],
                      linewidth=1.6, drawstyle="steps-post")  # fmt: skip
        axes.set(xlabel="virtual seconds", ylabel="loss", yscale="log", xlim=(0, SECS))
        axes.legend(frameon=False, loc="upper right")

    return plotted(plot, (7.8, 3.7))


BOUNDS = (0, 1, 2, 4, 8, 16)
POLICIES = {WhenStale.WAIT: BLUE, WhenStale.ACCEPT: GREEN, WhenStale.DROP: RED}
NUM_STEPS, NUM_SEEDS, GROUPS, CONCURRENCY, MEAN_SECS = 300, 4, 8, 24, 2.0


def train_on_rollouts(policy: WhenStale, bound: int, seed: int) -> tuple[float, int, float]:
    """The learner's busy share, the greatest staleness, the relative length of what is trained."""
    simulation = Simulation(seed, "turbo")
    lengths = np.random.default_rng(seed).lognormal(np.log(MEAN_SECS) - 0.5, 1.0, 20_000)
    trained: list[float] = []

    async def rollout(prompt: int) -> float:
        secs = float(lengths[prompt])
        await simulation.sleep(secs)
        return secs

    async def step(groups: list[Rollout]) -> dict[str, float]:
        trained.extend(group.result for group in groups)
        await simulation.sleep(1.0)
        return {}

    source = rollouts(
        rollout, range(20_000), GROUPS, concurrency=CONCURRENCY, max_staleness=bound,
        when_stale=policy,
    )  # fmt: skip

    async def main() -> float:
        hooks = [FeedHook(source, "groups"), StopAtStepHook(last_step=NUM_STEPS)]
        async with MonitoredSession(hooks, step) as session:
            while not session.should_stop():
                await session.run([])
            return simulation.now

    secs = simulation.run(main)
    ages = source.statistics().staleness
    return NUM_STEPS / secs, max(ages), float(np.mean(trained)) / MEAN_SECS


def rollout_policies() -> str:
    """What WAIT, ACCEPT and DROP cost, by the bound on staleness."""
    found = {
        policy: [[train_on_rollouts(policy, bound, seed) for seed in range(NUM_SEEDS)]
                 for bound in BOUNDS]
        for policy in POLICIES
    }  # fmt: skip

    def plot(figure: Any) -> None:
        busy, age, length = figure.subplots(1, 3)
        places = range(len(BOUNDS))
        for policy, colour in POLICIES.items():
            by_bound = found[policy]
            dashes = "--" if policy is WhenStale.DROP else "-"  # it covers WAIT in the middle
            style = {"color": colour, "marker": "o", "markersize": 4, "linestyle": dashes}
            busy.plot(places, [100 * np.mean([seed[0] for seed in each]) for each in by_bound],
                      label=policy.name, **style)  # fmt: skip
            age.plot(places, [max(seed[1] for seed in each) for each in by_bound], **style)
            length.plot(places, [np.mean([seed[2] for seed in each]) for each in by_bound], **style)
        busy.set(title="busy share of the learner, %", ylim=(0, 105))
        age.set(title="greatest staleness, steps", ylim=(0, None))
        length.set(title="mean length trained on / of all", ylim=(0, 1.05))
        for axes in (busy, age, length):
            axes.set_xticks(places, [str(bound) for bound in BOUNDS])
            axes.set_xlabel("max_staleness")
            axes.title.set_size(10)
        busy.legend(frameon=False, loc="lower right")

    return plotted(plot, (7.8, 3.0))


def plotted(plot: Callable[[Any], None], size: tuple[float, float]) -> str:
    """What `plot` draws into a figure of so many inches, in the colours of the site."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.hashsalt": "asynchooks", "svg.fonttype": "none", "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"], "font.size": 10, "text.color": INK,
        "axes.labelcolor": INK, "axes.edgecolor": GREY, "xtick.color": SOFT, "ytick.color": SOFT,
        "path.simplify": False,
    }  # fmt: skip
    with mpl.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained", facecolor=CARD)
        plot(figure)
        for axes in figure.axes:
            axes.set_facecolor(CARD)
            axes.grid(color=GRID, linewidth=0.8)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None}, facecolor=CARD)
    return with_generic_font(file.getvalue())


def with_generic_font(svg: str) -> str:
    """The page's sans-serif font in place of matplotlib's own."""
    return svg.replace("'DejaVu Sans'", "system-ui, 'Segoe UI', Helvetica, Arial").replace(
        "DejaVu Sans", "system-ui"
    )


PICTURES: dict[str, Callable[[], str]] = {
    "moments.svg": moments,
    "workers.svg": workers,
    "exact-stop.svg": exact_stop,
    "trace.svg": trace,
    "loss-by-protocol.svg": loss_by_protocol,
    "rollout-policies.svg": rollout_policies,
    "rooms.svg": rooms,
}


def draw(directory: Path) -> None:
    """Write all pictures into a directory."""
    for name, picture in PICTURES.items():
        (directory / name).write_text(picture(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
