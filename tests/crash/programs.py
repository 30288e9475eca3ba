"""Training programs that are to be killed, and how they are started and watched.

They run in processes forked from one that has imported what they need: a start takes milliseconds.
"""

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from asynchooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    Coordinator,
    FunctionSessionCreator,
    MetricsHook,
    MonitoredSession,
    PreemptionHook,
    Retention,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
)
from asynchooks.metrics import CsvSink, JsonLinesSink, TensorBoardSink

NUM_ARRAYS, SIZE = 5, 100_000
"""Of the model: five arrays of 0.8 MB."""
SAVE_STEPS = 5


class Model:
    """Its state after a step depends on all steps before, and on the generator's state."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(seed=7)
        self.arrays = {f"a{i}": np.zeros(SIZE) for i in range(NUM_ARRAYS)}
        self.num_steps = np.zeros(())

    def step(self) -> dict[str, float]:
        for array in self.arrays.values():
            array *= 0.99
            array += self.rng.normal()
        self.num_steps += 1
        return {"number": float(self.num_steps)}

    @property
    def saver(self) -> StateDictSaver:
        arrays = {**self.arrays, "num_steps": self.num_steps}
        return StateDictSaver(arrays=arrays, rng=Generator(self.rng))


class Generator:
    """A generator as something with a state."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def state_dict(self) -> Any:
        return self.rng.bit_generator.state

    def load_state_dict(self, state: Any) -> None:
        self.rng.bit_generator.state = state


class Moments(SessionRunHook):
    """A hook with a state of its own: how many runs it has seen, in this process and before."""

    def __init__(self) -> None:
        self.num_runs = 0

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.num_runs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_runs": self.num_runs}

    def load_state_dict(self, state: Any) -> None:
        self.num_runs = state["num_runs"]


class Reports(SessionRunHook, CheckpointSaverListener):
    """Says where training begins, and which saves are complete."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    async def begin(self) -> None:
        """Of a hook and of a listener."""

    async def end(self, *_: Any) -> None:
        """Of a hook and of a listener."""

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.pipe.send(("begins", session.global_step.value))

    async def after_save(self, session: Any, global_step_value: int) -> None:
        self.pipe.send(("saved", global_step_value))


def saving(place: Any, pipe: Connection, saver: Any, **options: Any) -> list[SessionRunHook]:
    """Hooks that save in the background, and say it."""
    options = {"background": True, "retention": Retention(max_to_keep=2), **options}
    reports = Reports(pipe)
    return [reports, CheckpointSaverHook(place, saver=saver, listeners=[reports], **options)]


def on_backend(main: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a program for a process, whose first argument names the event loop it runs on."""

    @wraps(main)
    def program(backend: str, *args: Any, **options: Any) -> None:
        async def run() -> None:
            await main(*args, **options)

        options_of_loop = {"use_uvloop": True} if backend == "uvloop" else {}
        name = "asyncio" if options_of_loop else backend
        anyio.run(run, backend=name, backend_options=options_of_loop)

    return program


def is_logged(step: int) -> bool:
    """Whether the loop itself logs a metric after the step, which no checkpoint is of.

    What is logged after the save of its step is behind the restored one: no run logs it again.
    """
    return step % SAVE_STEPS == 3


@on_backend
async def train(
    place: Any,
    pipe: Connection,
    last_step: int | None = None,
    *,
    logs: Path | None = None,
    environment: Mapping[str, str] = {},
    step_runner: Any = "auto",
) -> None:
    """Train until it is killed, or preempted, or up to a step; each step's number is its metric."""
    os.environ.update(environment)
    model, moments = Model(), Moments()
    hooks: list[Any] = [PreemptionHook(deadline_secs=20)]
    hooks += [*saving(place, pipe, model.saver, save_steps=SAVE_STEPS), moments]
    if logs is not None:
        sinks = [TensorBoardSink(logs), JsonLinesSink(logs / "m.jsonl"), CsvSink(logs / "m.csv")]
        hooks.append(StepCounterHook(every_n_steps=50, output_dir=str(logs)))
        hooks.append(MetricsHook(sinks, "number", every_n_steps=1))
    if last_step is not None:
        hooks.append(StopAtStepHook(last_step=last_step))
    session = MonitoredSession(hooks, FunctionSessionCreator(model.step), step_runner=step_runner)
    try:
        async with session:
            while not session.should_stop():
                number = await session.run("number")
                if is_logged(number):
                    session.log_metrics({"logged": number})
                await anyio.sleep(0.001)
    finally:
        pipe.send(("ends", session.global_step.value, moments.num_runs, model.arrays["a0"][0]))


def uninterrupted(last_step: int) -> float:
    """What the model's first number is after so many steps."""
    model = Model()
    for _ in range(last_step):
        model.step()
    return float(model.arrays["a0"][0])


class Running:
    """A process that trains, and its reports so far."""

    def __init__(self, process: BaseProcess, news: Connection) -> None:
        self.process = process
        self.reports: list[Any] = []
        self.has_begun = threading.Event()
        self._news = news
        self._changed, self._is_over = threading.Condition(), False
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        while not self._is_over:
            try:
                self._note(self._news.recv())
            except (EOFError, OSError, ValueError):
                self._note(None)

    def _note(self, report: Any) -> None:
        with self._changed:
            if report is None:
                self._is_over = True
            else:
                self.reports.append(report)
            self._changed.notify_all()
        if self._is_over or report[0] == "begins":
            self.has_begun.set()

    def wait_for(self, *report: Any, num: int = 1) -> None:
        """Until it has said this, or something that begins so, so many times."""

        def is_there() -> bool:
            said = [each for each in self.reports if each[: len(report)] == report]
            return self._is_over or len(said) >= num

        with self._changed:
            assert self._changed.wait_for(is_there, 60)
        assert not self._is_over, f"it ended with {self.process.exitcode}"

    def join(self) -> None:
        self.process.join(60)
        assert not self.process.is_alive()
        self._listener.join(10)

    def of(self, what: str) -> list[Any]:
        return [each[1:] for each in self.reports if each[0] == what]


@contextmanager
def running(
    context: ForkServerContext, target: Callable[..., None], *args: Any
) -> Iterator[Running]:
    """Start `target(*args with a connection instead of None)`; killed at the end at the latest."""
    news, pipe = context.Pipe(duplex=False)
    with_pipe = [pipe if each is Connection else each for each in args]
    process = context.Process(target=target, args=with_pipe)
    process.start()
    pipe.close()
    run = Running(process, news)
    try:
        yield run
    finally:
        process.kill()
        run.join()
        news.close()


def kill_at_random(
    context: ForkServerContext, rng: random.Random, num_kills: int, longest_secs: float,
    program: Callable[..., None], args_of: Callable[[int], Sequence[Any]],
) -> int:  # fmt: skip
    """Start and kill a program again and again, with the arguments of each life.

    Every restart goes on from the last completed save, or a newer one; returns its step.
    """
    saved = num_resumed = 0
    for life in range(num_kills):
        with running(context, program, *args_of(life)) as run:
            # at some moment: while it opens and restores, or between, or in its steps and saves
            if rng.random() < 0.8:
                run.wait_for("begins")
                run.wait_for("saved", num=rng.randrange(3) if saved else 1)
            time.sleep(rng.random() * longest_secs)
            run.process.kill()
        assert run.of("fails") == run.of("ends") == []
        for (step,) in run.of("begins"):
            assert step >= saved
            num_resumed += step > 0
        saved = max([saved, *(step for (step,) in run.of("saved"))])
    assert num_resumed >= num_kills // 3
    return saved


_loaded: set[str] = set()


def server(*modules: str) -> ForkServerContext:
    """Where processes are forked that have these modules already."""
    context = multiprocessing.get_context("forkserver")
    if not _loaded.issuperset(needed := {__name__, "trio", "numpy", *modules}):
        _loaded.update(needed)
        running: Any = forkserver._forkserver  # private: it takes modules only when it starts
        running._stop()
        context.set_forkserver_preload(sorted(_loaded))
    return context
