"""A plan runs in a process of its own, in virtual time, and hooks that act outside are left out."""

import os
import queue
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import Retention, SessionRunHook, StateDictSaver, hooks
from asynchooks.data import batch
from asynchooks.metrics import CsvSink
from asynchooks.planning import PlanError, _child, timed

from ..support.moments import at
from ..support.step_loops import run_steps
from ..support.threads import threads_left
from .planned import plan_of, service_of
from .recorded import spans_of

PLAN = plan_of(service_of("work", [0.5]))


@timed("work", returns={"loss": 1.0})
async def work() -> dict[str, float]:
    raise AssertionError("a plan does not call it")


async def do(act: Callable[[], Any]) -> None:
    await work()
    act()
    await work()


def test_what_a_program_changes_in_its_process_is_not_changed_here(backend: Any) -> None:
    changed: list[int] = []

    says = at(after_run=pytest.fail)
    type(says).acts_outside = True  # so that it is left out

    async def main() -> None:
        await run_steps(work, 3, says)
        os.environ["ASYNCHOOKS_PLANNED"] = "1"
        threading.Thread(target=changed.append, args=(2,)).start()

    PLAN.run(main, backend=backend)
    assert changed == []
    assert "ASYNCHOOKS_PLANNED" not in os.environ
    assert threads_left() == []


class OwnError(Exception):
    pass


class UnsendableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.lock = threading.Lock()  # other libraries may have taught pickle all else


def raises(error: Callable[[], BaseException]) -> Callable[[], None]:
    def act() -> None:
        raise error()

    return act


def spin() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("act", "error", "match"),
    [
        (raises(lambda: OwnError("diverged")), OwnError, "diverged"),
        (raises(lambda: UnsendableError(1, 2)), PlanError, "UnsendableError: 1 and 2"),
        (lambda: time.sleep(1.0), PlanError, r"time.sleep\(1.0\) in a simulation.*make what waits"),
    ],
    ids=["error", "unsendable", "real sleep"],
)
def test_an_error_of_the_program_has_its_traceback_in_a_note(
    act: Callable[[], None], error: type[Exception], match: str, backend: Any
) -> None:
    with pytest.raises(error, match=match) as caught:
        PLAN.run(partial(do, act), backend=backend)
    assert any("test_outside.py" in each for each in caught.value.__notes__)


@pytest.mark.parametrize(
    ("act", "error", "match"),
    [
        (lambda: os._exit(7), PlanError, r"process of the plan has died \(exit code 7\)"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), PlanError, r"died \(exit code -9\)"),
        (lambda: sys.exit(3), PlanError, "ends its process, with code 3"),
        (raises(KeyboardInterrupt), KeyboardInterrupt, None),
        (lambda: warnings.warn("slow", stacklevel=1), UserWarning, "slow"),  # warnings are errors
    ],
)
def test_what_ends_the_process_of_a_plan_is_an_error_here(
    act: Callable[[], None], error: type[BaseException], match: str | None
) -> None:
    with pytest.raises(error, match=match):
        PLAN.run(partial(do, act))


def test_clocks_of_the_program_show_virtual_time_and_those_here_are_left_alone(
    backend: Any,
) -> None:
    before = time.monotonic, time.time

    async def main() -> None:
        clocks: list[Callable[[], float]] = [time.monotonic, time.perf_counter, time.time]
        began = [clock() for clock in clocks]
        while time.monotonic() - began[0] < 5.0:
            await work()
        for clock, first in zip(clocks, began, strict=True):
            assert clock() - first == pytest.approx(5.0, abs=0.6)

    assert PLAN.run(main, backend=backend).ended == pytest.approx(5.0, abs=0.6)
    assert (time.monotonic, time.time) == before


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    # private: nobody waits for half a minute in a test
    monkeypatch.setattr(_child, "STALL_SECS", 1.0)


def block() -> dict[str, float]:
    threading.Event().wait()
    return {}


@pytest.mark.usefixtures("little_patience")
@pytest.mark.parametrize(
    ("main", "backend", "place"),
    [
        (partial(do, spin), "asyncio", "in spin"),
        (partial(do, lambda: queue.Queue[int]().get()), "trio", "test_outside.py"),
        (partial(do, block), "turbo", "in block"),
        (partial(run_steps, block, 1, step_runner="thread"), "asyncio", "in block"),
    ],
    ids=["loop", "queue", "event", "thread"],
)
def test_a_wait_that_virtual_time_cannot_see_is_refused_with_its_place(
    main: Any, backend: Any, place: str
) -> None:
    match = "without an event in virtual time, which stands at 0.*make what waits"
    with pytest.raises(PlanError, match=match) as caught:
        PLAN.run(main, backend=backend)
    assert place in caught.value.__notes__[0]


@pytest.mark.usefixtures("little_patience")
def test_what_never_comes_back_to_python_is_given_up() -> None:
    def act() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        spin()

    with pytest.raises(PlanError, match="has not come back to Python"):
        PLAN.run(partial(do, act))


def acting_hooks(directory: Path) -> list[SessionRunHook]:
    """Hooks that would write, print or watch."""

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        await work()
        return {"accuracy": 0.5}

    path = str(directory)
    saver = StateDictSaver(arrays={"zero": np.zeros(1)})
    best = Retention(keep_best=1)
    return [
        hooks.HistoryHook("loss", every_n_steps=1),
        hooks.TraceHook(directory / "run.pftrace"),
        hooks.CheckpointSaverHook(path, save_steps=1, saver=saver, retention=best, metric="loss"),
        hooks.DataWaitHook(batch([1], 1), every_n_steps=1, output_dir=path),
        hooks.EvaluationHook(evaluate, every_n_steps=2, output_dir=path),
        hooks.EarlyStoppingHook("loss", 100, restore_best=True),
        hooks.LoggingTensorHook(["loss"], every_n_iter=1),
        hooks.LoopLagHook(),
        hooks.MetricsHook(CsvSink(f"{path}/metrics.csv"), "loss", every_n_steps=1),
        hooks.PreemptionHook(),
        hooks.ProgressHook(),
        hooks.RankStopHook(),
        hooks.StallHook(10.0),
        hooks.StepCounterHook(every_n_steps=1, output_dir=path),
        hooks.SummarySaverHook(save_steps=1, output_dir=path, summary_op="loss"),
    ]


def test_a_plan_writes_nothing_whatever_its_hooks_would(
    tmp_path: Path, backend: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    acting = {
        name for name in hooks.__all__ if getattr(getattr(hooks, name), "acts_outside", False)
    }
    assert acting <= {type(each).__name__ for each in acting_hooks(tmp_path)}
    on_term = signal.getsignal(signal.SIGTERM)

    async def step() -> dict[str, float]:
        assert signal.getsignal(signal.SIGTERM) == on_term
        return await work()

    async def main() -> None:
        history, *others = acting_hooks(tmp_path)
        await run_steps(step, 10, history, *others)
        assert len(history.rows) == 10  # type: ignore[attr-defined]

    trace = PLAN.run(main, backend=backend)
    assert len(spans_of(trace, "run")["run"]) == 10
    assert len(trace.find("work")) == 10 + 5  # steps and evaluations
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
    assert threads_left() == []
