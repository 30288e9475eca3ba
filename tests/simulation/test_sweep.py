"""sweep, target losses and intervals of simulated trainings."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks.protocols import Asynchronous, StaleSynchronous, Synchronous
from asynchooks.simulation import (
    Constant,
    Exponential,
    Report,
    Simulation,
    SimulationError,
    plot_losses,
    sweep,
)
from asynchooks.simulation.output._interval import interval_of

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio", "turbo"])


def train(seed: int, protocol: Any, workers: int = 4) -> Report:
    simulation = Simulation(seed=seed, backend="turbo")
    return simulation.cluster(workers, protocol=protocol, compute=Exponential(1.0)).run(updates=300)


def test_a_sweep_has_all_settings_with_all_seeds() -> None:
    count: list[None] = []
    options: dict[str, list[Any]] = {"protocol": [Asynchronous(), Synchronous()], "workers": [2, 4]}
    result = sweep(train, options, seeds=3, num_processes=1, done=lambda: count.append(None))
    assert len(result.settings) == 4
    assert len(count) == 12
    assert list(result.seeds) == [0, 1, 2]
    fast = {"protocol": result.settings[0]["protocol"], "workers": 4}
    assert fast in [dict(each) for each in result.settings]
    values = result.values(fast, "updates_per_second")
    again = [train(seed, **fast).updates_per_second for seed in range(3)]
    assert values == again
    assert result.interval(fast, "updates_per_second") == interval_of(again)


@pytest.mark.faults
def test_the_number_of_processes_changes_nothing() -> None:
    options = {"protocol": [Asynchronous(), StaleSynchronous(1)]}
    one, two = (sweep(train, options, seeds=[3, 5], num_processes=num) for num in (1, 2))
    assert one.reports == two.reports


def test_common_random_numbers_make_differences_clear() -> None:
    tight, loose = StaleSynchronous(3), StaleSynchronous(4)
    result = sweep(train, {"protocol": [tight, loose]}, seeds=8, num_processes=1)
    first, second = result.settings
    difference = result.difference(second, first, "updates_per_second")
    intervals = [result.interval(each, "updates_per_second") for each in result.settings]
    assert difference.low > 0.0
    assert max(each.low for each in intervals) < min(each.high for each in intervals)
    assert difference.mean == pytest.approx(intervals[1].mean - intervals[0].mean)


def test_figures_may_be_functions_of_a_report() -> None:
    result = sweep(train, {"protocol": [Asynchronous()]}, seeds=2, num_processes=1)
    (setting,) = result.settings
    assert result.values(setting, lambda report: report.updates) == [300.0, 300.0]
    secs = result.interval(setting, "secs")
    assert secs.low <= secs.mean <= secs.high
    with pytest.raises(ValueError, match="'speed' is no figure of a report; give one of"):
        result.values(setting, "speed")
    with pytest.raises(ValueError, match="there is no setting"):
        result.values({"protocol": 3}, "secs")


def test_a_training_that_fails_names_its_setting() -> None:
    def fails(seed: int, workers: int) -> Report:
        if workers == 3:
            raise KeyError("no")
        return train(seed, Asynchronous(), workers)

    expected = r"at \{'workers': 3\} with seed 0 failed: KeyError: 'no'"
    with pytest.raises(SimulationError, match=expected) as caught:
        sweep(fails, {"workers": [2, 3]}, seeds=2, num_processes=1)
    assert "in fails" in str(caught.value.__cause__)  # the traceback of the training
    with pytest.raises(SimulationError, match="what train returned is 3"):
        sweep(lambda seed: 3, {}, seeds=1)  # type: ignore[arg-type, return-value]


def test_wrong_arguments_of_a_sweep_are_refused() -> None:
    with pytest.raises(TypeError, match="train is 3"):
        sweep(3, {})  # type: ignore[arg-type]
    wrong: list[Any] = ["ab", [], 3]
    for values in wrong:
        with pytest.raises(TypeError, match=r"options\['a'\] is .*give a list"):
            sweep(train, {"a": values})
    for seeds in (0, [], [1, 1], [-1]):
        with pytest.raises(ValueError, match="seed"):
            sweep(train, {}, seeds=seeds)
    with pytest.raises(ValueError, match="options have 'seed'"):
        sweep(train, {"seed": [1]})
    for num_processes in (0, -1):
        with pytest.raises(ValueError, match=f"num_processes is {num_processes}"):
            sweep(train, {}, num_processes=num_processes)
    with pytest.raises(TypeError, match="seeds is b'12'; give"):
        sweep(train, {}, seeds=b"12")
    with pytest.raises(TypeError, match="done is 3; give a function"):
        sweep(train, {}, done=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda result: result.values(3, "secs"), "setting is 3; give one of `settings`"),
        (lambda result: result.interval({}, ["secs"]), r"figure is \['secs'\]; give a name"),
        (lambda result: result.values({}, lambda report: "1"), "returned '1'; let it return a num"),
        (lambda result: result.values({}, "speed"), "'speed' is no figure of a report"),
    ],
)
def test_wrong_questions_to_a_sweep_are_refused(ask: Any, message: str) -> None:
    result = sweep(lambda seed: train(seed, Asynchronous()), {}, seeds=1)
    with pytest.raises((TypeError, ValueError), match=message):
        ask(result)


def test_options_may_be_arrays() -> None:
    def starts(seed: int, parameters: Any) -> Report:
        return train(seed, Asynchronous())

    result = sweep(starts, {"parameters": [np.zeros(2), np.ones(2)]}, seeds=2, num_processes=1)
    assert result.values({"parameters": np.ones(2)}, "updates") == [300.0, 300.0]
    with pytest.raises(ValueError, match="there is no setting"):
        result.values({"parameters": np.ones(3)}, "updates")
    nested = sweep(
        starts, {"parameters": [{"w": np.zeros(2)}, {"w": np.ones(2)}]}, seeds=1, num_processes=1
    )
    for setting in nested.settings:
        assert nested.values(dict(setting), "updates") == [300.0]


@pytest.mark.parametrize("value", [None, "1", np.zeros(2), 1j])
def test_a_loss_that_is_no_number_is_refused(value: Any) -> None:
    cluster = Simulation(backend="turbo").cluster(2)
    with pytest.raises(TypeError, match="loss returned .*; let it return a number"):
        cluster.run(updates=3, loss=lambda _: value)


def test_losses_that_diverge_have_an_interval_without_overflow() -> None:
    small, large = interval_of([1.0, 2.0, 4.0]), interval_of([1e300, 2e300, 4e300])
    assert large == pytest.approx([each * 1e300 for each in small])
    assert interval_of([1e308, 1.7e308, 1e308]).high == math.inf
    assert interval_of([1e200]).mean == 1e200


def test_a_figure_that_is_not_finite_has_no_interval() -> None:
    result = sweep(train, {"workers": [2, 3], "protocol": [Asynchronous()]}, num_processes=1)
    first, second = result.settings

    def late(report: Report) -> float:
        return math.inf if report.num_workers == 3 else report.secs

    assert result.interval(first, late) == result.interval(first, "secs")
    expected = r"the figure is inf at \{'workers': 3.* with seed 0"
    with pytest.raises(ValueError, match=expected):
        result.interval(second, late)
    with pytest.raises(ValueError, match=expected):
        result.difference(first, second, late)
    diverged = interval_of([1.0, math.inf])
    assert diverged.mean == math.inf
    assert math.isnan(diverged.low)


SCRIPT = """
    import os, signal, sys
    from asynchooks.simulation import sweep
    from tests.simulation.test_sweep import Asynchronous, train

    def dies(seed, workers):
        if workers == 3 and MODE == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == "hang":
            os.write(1, b"begun\\n")  # at once: two processes write it
            while True:
                pass
        return train(seed, Asynchronous(), workers)

    MODE = sys.argv[1]
    if MODE == "functions":
        here = os.getpid()

        def forked(seed, delay):
            assert os.getpid() != here
            return train(seed, Asynchronous(), delay())

        found = sweep(forked, {"delay": [lambda: 2, lambda: 4]}, seeds=2, num_processes=2)
        print([each.num_workers for group in found.reports for each in group])
        sys.exit()
    sweep(dies, {"workers": [2, 3, 4, 5, 6]}, seeds=[7], num_processes=2)
"""


def run_script(tmp_path: Path, mode: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, str(path), mode],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.faults
def test_options_need_not_be_pickled(tmp_path: Path) -> None:
    with run_script(tmp_path, "functions") as process:
        printed, errors = process.communicate(timeout=60)
    assert (printed, errors) == ("[2, 2, 4, 4]\n", "")


@pytest.mark.faults
def test_a_process_that_dies_is_an_error_with_its_setting(tmp_path: Path) -> None:
    with run_script(tmp_path, "die") as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "SimulationError: a process died with ({'workers': 3}, 7) (exit code -9): " in errors


@pytest.mark.faults
def test_ctrl_c_ends_a_sweep_and_its_processes(tmp_path: Path) -> None:
    with run_script(tmp_path, "hang") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)  # all that have its pipes are gone
    assert "KeyboardInterrupt" in errors


@BACKENDS
def test_training_ends_at_the_first_loss_at_the_target(backend: Any) -> None:
    simulation = Simulation(seed=1, backend=backend)
    cluster = simulation.cluster(
        2, parameters=np.array([8.0]), compute=Constant(1.0), learning_rate=0.1
    )
    report = cluster.run(
        gradient=lambda parameters, worker: parameters,
        loss=lambda parameters: float(abs(parameters[0])),
        target_loss=1.0,
    )
    losses = [loss for _, _, loss in report.losses]
    assert losses[-1] <= 1.0 < min(losses[:-1])
    assert report.secs == report.losses[-1][0] == report.secs_to(1.0)
    assert report.secs_to(0.0) == math.inf
    assert report.secs_to(7.0) == 1.0  # of the second push at that time


@BACKENDS
def test_until_may_end_training_between_two_losses_at_a_loss_under_the_target(backend: Any) -> None:
    cluster = Simulation(seed=1, backend=backend).cluster(
        1, parameters=np.array([8.0]), compute=Constant(1.0), learning_rate=0.5
    )
    report = cluster.run(
        gradient=lambda parameters, worker: parameters,
        loss=lambda parameters: float(abs(parameters[0])),
        loss_every=10,
        target_loss=1.0,
        until=5.5,
    )
    assert report.losses == [(0.0, 0, 8.0), (5.5, 5, 0.25)]
    assert report.secs == report.secs_to(1.0) == 5.5


@BACKENDS
def test_seconds_to_a_loss_count_from_the_begin_of_training(backend: Any) -> None:
    simulation = Simulation(backend=backend)

    async def main() -> Report:
        await simulation.sleep(5.0)
        cluster = simulation.cluster(2, compute=Constant(1.0))
        await cluster.train(updates=10, loss=lambda _: 10.0 - cluster.server.version)
        return cluster.report()

    report = simulation.run(main)
    assert [report.secs_to(loss) for loss in (10, 8.5, 8.0, 7.9, 0, -1)] == [
        0,
        1,
        1,
        2,
        5,
        math.inf,
    ]
    assert report.secs_to(0.0) == report.secs
    for loss in ("1", None, math.nan):
        with pytest.raises((TypeError, ValueError), match="loss is .*; give a number"):
            report.secs_to(loss)


def test_a_target_that_is_not_reached_leaves_the_other_ends() -> None:
    cluster = Simulation(seed=1, backend="turbo").cluster(2, compute=Constant(1.0))
    report = cluster.run(loss=lambda parameters: 1.0, target_loss=0.5, updates=10)
    assert report.updates == 10
    assert report.secs_to(0.5) == math.inf


def test_wrong_targets_are_refused() -> None:
    cluster = Simulation(backend="turbo").cluster(2)
    with pytest.raises(ValueError, match="no loss is recorded; give loss"):
        cluster.run(updates=5, target_loss=1.0)
    report = cluster.run(updates=5)
    with pytest.raises(ValueError, match="no loss was recorded"):
        report.secs_to(1.0)


def test_plots_draw_a_band_over_seeds() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    def run(seed: int) -> Report:
        cluster = Simulation(seed=seed, backend="turbo").cluster(
            2, parameters=np.array([8.0]), compute=Exponential(1.0), learning_rate=0.1
        )
        return cluster.run(
            gradient=lambda parameters, worker: parameters,
            loss=lambda parameters: float(abs(parameters[0])),
            updates=20,
        )

    group = [run(seed) for seed in range(3)]
    axes = Figure().add_subplot()
    plot_losses(axes, [group, run(9)])
    assert len(axes.lines) == 2
    (band,) = axes.collections
    ends = min(each.losses[-1][0] for each in group)
    times = np.asarray(band.get_paths()[0].vertices)[:, 0]
    assert times.max() == pytest.approx(ends)
    label = axes.lines[0].get_label()
    assert "3 seeds" in str(label)
    with pytest.raises(ValueError, match="a list of reports is empty"):
        plot_losses(axes, [[]])
