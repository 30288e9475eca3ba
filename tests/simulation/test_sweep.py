"""sweep, target losses and intervals of simulated trainings."""

import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks.cli import main
from asynchooks.protocols import Asynchronous, StaleSynchronous, Synchronous
from asynchooks.simulation import (
    Constant,
    Exponential,
    Report,
    Simulation,
    SimulationError,
    Sweep,
    sweep,
)

from .clusters import new_cluster


def train(seed: int, protocol: Any, workers: int = 4) -> Report:
    simulation = Simulation(seed=seed, backend="turbo")
    return simulation.cluster(workers, protocol=protocol, compute=Exponential(1.0)).run(updates=300)


def test_a_sweep_has_all_settings_with_all_seeds() -> None:
    count: list[None] = []
    options: dict[str, list[Any]] = {"protocol": [Asynchronous(), Synchronous()], "workers": [2, 4]}
    result = sweep(train, options, seeds=3, num_processes=1, done=lambda: count.append(None))
    assert (len(result.settings), len(count), list(result.seeds)) == (4, 12, [0, 1, 2])
    setting = result.settings[1]
    assert setting == {"protocol": Asynchronous(), "workers": 4}
    again = [train(seed, **setting).updates_per_second for seed in range(3)]
    assert result.values(setting, "updates_per_second") == again
    figures = iter([1.0, 2.0, 6.0])  # the 90 % of Student's t, with two degrees of freedom
    expected = 3.0, 3.0 - 2.920 * math.sqrt(7 / 3), 3.0 + 2.920 * math.sqrt(7 / 3)
    assert result.interval(setting, lambda _: next(figures)) == pytest.approx(expected)


forks = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="nothing is forked beside the threads of xdist"
)


@forks
@pytest.mark.faults
def test_the_number_of_processes_changes_nothing_and_options_need_not_be_pickled() -> None:
    here = os.getpid()

    def forked(seed: int, protocol: Any) -> Report:
        report = train(seed, protocol())
        return replace(report, protocol=str(os.getpid() == here))

    options = {"protocol": [lambda: Asynchronous(), lambda: StaleSynchronous(1)]}
    one, two = (sweep(forked, options, seeds=[3], num_processes=num) for num in (1, 2))
    for (before,), (after,) in zip(one.reports, two.reports, strict=True):
        assert (before.protocol, after.protocol) == ("True", "False")
        assert replace(after, protocol="True") == before


@forks
@pytest.mark.faults
def test_a_process_that_dies_is_an_error_with_its_setting() -> None:
    def dies(seed: int, workers: int) -> Report:
        if workers == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(seed, Asynchronous(), workers)

    expected = r"a process died with \(\{'workers': 3\}, 7\) \(exit code -9\): "
    with pytest.raises(SimulationError, match=expected):
        sweep(dies, {"workers": [2, 3, 4, 5, 6]}, seeds=[7], num_processes=2)


def test_common_random_numbers_make_differences_clear() -> None:
    options = {"protocol": [StaleSynchronous(3), StaleSynchronous(4)]}
    result = sweep(train, options, seeds=8, num_processes=1)
    first, second = result.settings
    difference = result.difference(second, first, "updates_per_second")
    tight, loose = (result.interval(each, "updates_per_second") for each in result.settings)
    assert difference.low > 0.0
    assert loose.low < tight.high
    assert difference.mean == pytest.approx(loose.mean - tight.mean)


@cache
def one() -> Sweep:
    return sweep(lambda seed: train(seed, Asynchronous()), {}, seeds=1, num_processes=1)


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (lambda: one().interval({}, "speed"), "'speed' is no figure of a report; give one of"),
        (lambda: one().interval({"protocol": 3}, "secs"), "there is no setting"),
        (
            lambda: one().interval({}, lambda report: math.inf),
            r"the figure is inf at \{\} with seed 0",
        ),
        (lambda: sweep(train, {"seed": [1]}), "options have 'seed'"),
        *((partial(sweep, train, {}, seeds=seeds), "seed") for seeds in ([], [1, 1], b"12")),
        (lambda: one().reports[0][0].secs_to(math.nan), "loss is .*; give a number"),
        (lambda: one().reports[0][0].secs_to(1.0), "no loss was recorded"),
    ],
)
def test_wrong_sweeps_and_questions_to_them_are_refused(ask: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        ask()


def test_a_training_that_fails_names_its_setting() -> None:
    def fails(seed: int, workers: int) -> Report:
        if workers == 3:
            raise KeyError("no")
        return train(seed, Asynchronous(), workers)

    expected = r"at \{'workers': 3\} with seed 0 failed: KeyError: 'no'"
    with pytest.raises(SimulationError, match=expected) as caught:
        sweep(fails, {"workers": [2, 3]}, seeds=2, num_processes=1)
    assert "in fails" in str(caught.value.__cause__)  # the traceback of the training


SCRIPT = """
import os
from asynchooks.simulation import sweep

def hang(seed, workers):
    os.write(1, b"begun\\n")  # at once: two processes write it
    while True:
        pass

sweep(hang, {"workers": [2, 3, 4, 5, 6]}, seeds=[7], num_processes=2)
"""


@pytest.mark.faults
def test_ctrl_c_ends_a_sweep_and_its_processes() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)  # all that have its pipes are gone
    assert "KeyboardInterrupt" in errors


@pytest.mark.faults
@pytest.mark.parametrize("rate", [3, 1000])
def test_seeds_of_a_training_that_diverges_have_a_row(
    capsys: pytest.CaptureFixture[str], rate: float
) -> None:
    line = f"--workers 4 --updates 300 --seeds 3 --learning-rates {rate}"
    for rest, expected in (("", r"e\+\d+ \(.* to .*\)|nan|inf"), (" --json", '"num_seeds": 3')):
        assert main(f"simulate {line}{rest}".split()) == 0
        assert re.search(expected, capsys.readouterr().out)


def descent(num_workers: int, seed: int = 1, *, rate: float = 0.5, **end: Any) -> Report:
    """From 8.0; each computation takes a second."""
    cluster = new_cluster(
        num_workers, seed=seed, parameters=np.array([8.0]), learning_rate=rate,
        compute=Exponential(1.0) if seed > 1 else Constant(1.0),
    )  # fmt: skip
    return cluster.run(gradient=lambda p, _: p, loss=lambda p: float(abs(p[0])), **end)


def test_training_ends_at_the_first_loss_at_the_target() -> None:
    report = descent(2, rate=0.1, target_loss=1.0)
    losses = [loss for _, _, loss in report.losses]
    assert losses[-1] <= 1.0 < min(losses[:-1])
    assert report.secs == report.losses[-1][0] == report.secs_to(1.0)
    report = descent(1, target_loss=1e-9, updates=10)  # which is not reached
    assert (report.updates, report.secs_to(1e-9)) == (10, math.inf)
    report = descent(1, loss_every=2, target_loss=1.0, until=5.5)  # between two losses
    assert report.losses == [(0.0, 0, 8.0), (2.0, 2, 2.0), (4.0, 4, 0.5)]
    report = descent(1, loss_every=10, target_loss=1.0, until=5.5)
    assert report.losses == [(0.0, 0, 8.0), (5.5, 5, 0.25)]
    assert report.secs == report.secs_to(1.0) == 5.5
