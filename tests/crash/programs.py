"""Training programs that are to be killed, and how they are started and watched.

They run in processes forked from one that has imported what they need: a start takes milliseconds.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
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
    MonitoredSession,
    PreemptionHook,
    Retention,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StateDictSaver,
    StopAtStepHook,
)

NUM_ARRAYS, SIZE = 5, 100_000
"""Of the model: five arrays of 0.8 MB."""


class Model:
    """Its state after a step depends on all steps before, and on the generator's state."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(seed=7)
        self.arrays = {f"a{i}": np.zeros(SIZE) for i in range(NUM_ARRAYS)}

    def step(self) -> dict[str, float]:
        for array in self.arrays.values():
            array *= 0.99
            array += self.rng.normal()
        return {"sum": float(sum(array[0] for array in self.arrays.values()))}

    @property
    def saver(self) -> StateDictSaver:
        return StateDictSaver(arrays=self.arrays, rng=Generator(self.rng))


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


def on_backend(main: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a program for a process, whose first argument names the event loop it runs on."""

    @wraps(main)
    def program(backend: str, *args: Any) -> None:
        anyio.run(main, *args, backend=backend)

    return program


@on_backend
async def train(
    directory: Path, pipe: Connection, last_step: int | None = None, where: str = ""
) -> None:
    """Train until it is killed, or up to a step, or, with `where`, until it is preempted."""
    model, moments = Model(), Moments()

    def slow_step() -> dict[str, float]:
        time.sleep(0.05)
        return model.step()

    class Waits(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            if where == "hook":
                await anyio.sleep(0.02)
            elif where == "wait" and run_context.global_step.value >= 5:
                await run_context.global_step.wait_for(10**9)

    class SlowSaver(StateDictSaver):
        def save(self, path: str) -> None:
            time.sleep(0.1)
            super().save(path)

    saver: Any = model.saver
    if where == "save":
        saver = PlainSaver(SlowSaver(arrays=model.arrays, rng=Generator(model.rng)))
    hooks: list[Any] = [PreemptionHook(deadline_secs=20)] if where else []
    hooks += [
        Reports(pipe),
        CheckpointSaverHook(
            directory, save_steps=5, saver=saver, listeners=[Reports(pipe)], background=True,
            retention=Retention(max_to_keep=2),
        ),
        moments,
        Waits(),
    ]  # fmt: skip
    if last_step is not None:
        hooks.append(StopAtStepHook(last_step=last_step))
    step = slow_step if where == "step" else model.step
    runner: Any = "thread" if where == "step" else "auto"
    session = MonitoredSession(hooks, FunctionSessionCreator(step), step_runner=runner)
    try:
        async with session:
            while not session.should_stop():
                await session.run("sum")
    finally:
        pipe.send(("ends", session.global_step.value, moments.num_runs, model.arrays["a0"][0]))


class PlainSaver:
    """A saver that cannot take a snapshot."""

    def __init__(self, saver: StateDictSaver) -> None:
        self.save, self.restore = saver.save, saver.restore


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
        self._news = news
        self._listener = threading.Thread(target=self._listen)
        self.has_begun = threading.Event()
        self._listener.start()

    def _listen(self) -> None:
        while True:
            try:
                self.reports.append(self._news.recv())
            except (EOFError, OSError, ValueError):
                self.has_begun.set()
                return
            if self.reports[-1][0] == "begins":
                self.has_begun.set()

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
                run.has_begun.wait(60)
            time.sleep(rng.random() * longest_secs)
            run.process.kill()
        assert run.of("fails") == run.of("ends") == []
        for (step,) in run.of("begins"):
            assert step >= saved
            num_resumed += step > 0
        saved = max([saved, *(step for (step,) in run.of("saved"))])
    assert num_resumed > num_kills // 2
    return saved


def server(*modules: str) -> ForkServerContext:
    """Where processes are forked that have these modules already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "trio", "numpy", *modules])
    return context
