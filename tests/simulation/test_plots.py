"""Plots show what the reports hold; files appear whole, and what is missing is named."""

from __future__ import annotations

import math
import os
import sys
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks.protocols import parse_protocol
from asynchooks.simulation import (
    Constant,
    Crashes,
    Exponential,
    Report,
    Simulation,
    plot_losses,
    plot_reports,
)

# what it draws cannot be read off a file; `plot_reports` calls it
from asynchooks.simulation.output._plots import draw_timeline

from .engines import output_of

figure = pytest.importorskip("matplotlib.figure")


def report_of(protocol: str = "async", *, workers: int = 4, **options: Any) -> Report:
    cluster = Simulation(7, "turbo").cluster(
        workers,
        protocol=parse_protocol(protocol, workers),
        parameters=np.ones(2),
        **{"keep_timeline": True, **options},
    )
    report = cluster.run(
        updates=40, gradient=lambda parameters, _: parameters, loss=lambda p: float(p @ p)
    )
    return replace(report, protocol=protocol)


@pytest.fixture
def axes() -> Any:
    return figure.Figure().add_subplot()


def labels_of(axes: Any) -> list[str]:
    return [each.get_text() for each in axes.get_legend().get_texts()]


@pytest.mark.parametrize(
    ("ending", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".PDF", b"%PDF")]
)
def test_a_plot_is_written_in_the_format_of_its_ending(
    tmp_path: Path, ending: str, start: bytes
) -> None:
    path = tmp_path / f"out{ending}"
    plot_reports(path, [report_of(), report_of("sync")])
    assert path.read_bytes().startswith(start)
    assert os.listdir(tmp_path) == [path.name]


def test_reports_without_losses_and_timelines_are_drawn(tmp_path: Path) -> None:
    report = Simulation(7, "turbo").cluster(2).run(updates=3)
    plot_reports(tmp_path / "out.png", [report])
    assert (tmp_path / "out.png").stat().st_size > 0


def test_losses_are_a_line_for_each_report(axes: Any) -> None:
    reports = [report_of(), report_of("sync")]
    plot_losses(axes, reports)
    for line, report in zip(axes.get_lines(), reports, strict=True):
        assert list(line.get_xdata()) == [secs for secs, _, _ in report.losses]
        assert list(line.get_ydata()) == [loss for _, _, loss in report.losses]
        assert line.get_label().startswith(f"{report.protocol}, ")
    assert axes.get_yscale() == "log"
    assert axes.get_xscale() == "linear"


def test_a_loss_that_is_not_finite_is_left_out(axes: Any) -> None:
    report = replace(report_of(), losses=[(0.0, 0, 2.0), (1.0, 1, math.inf), (2.0, 2, math.nan)])
    plot_losses(axes, [report])
    (line,) = axes.get_lines()
    assert list(line.get_ydata()) == [2.0]
    assert axes.get_yscale() == "linear"


def test_a_loss_that_no_axis_can_show_is_left_out(tmp_path: Path) -> None:
    losses = [(float(time), time, 10.0 ** (6 * time)) for time in range(52)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as an overflow in matplotlib
        plot_reports(tmp_path / "out.png", [replace(report_of(), losses=losses)])
    assert (tmp_path / "out.png").stat().st_size > 0


def test_times_far_apart_are_on_a_logarithmic_axis(axes: Any) -> None:
    report = report_of()
    plot_losses(axes, [report, replace(report, secs=report.secs * 30)])
    assert axes.get_xscale() == "log"


def bars_of(axes: Any) -> dict[str, list[tuple[float, float, float]]]:
    """(worker, begin, end) by colour."""
    bars: dict[str, list[tuple[float, float, float]]] = {}
    for collection in axes.collections:
        for path in collection.get_paths():
            low, high = path.vertices.min(axis=0), path.vertices.max(axis=0)
            colour = "".join(f"{round(255 * each):02x}" for each in collection.get_facecolor()[0])
            bar = (round((low[1] + high[1]) / 2), low[0], high[0])
            bars.setdefault(f"#{colour[:6]}", []).append(bar)
    return bars


def test_a_timeline_has_a_bar_for_each_span(axes: Any) -> None:
    report = report_of("sync", workers=2, compute=Constant(1.0))
    draw_timeline(axes, report, 40)
    (bars,) = bars_of(axes).values()
    expected = [(worker, i, i + 1) for worker in (0, 1) for i in range(30)]
    assert sorted(bars) == expected
    assert axes.get_xlim() == (0.0, 30.0)
    assert axes.get_title() == "What 2 workers did: sync"
    assert labels_of(axes) == ["compute"]


def test_a_timeline_shows_the_first_workers_and_names_each_kind_once(axes: Any) -> None:
    failures = [Crashes(Exponential(3.0), Exponential(1.0))]
    report = report_of("sync", workers=6, failures=failures, push=Constant(0.1))
    draw_timeline(axes, report, 3)
    bars = bars_of(axes)
    assert {worker for each in bars.values() for worker, _, _ in each} == {0, 1, 2}
    assert labels_of(axes) == ["compute", "push", "wait", "lost", "down"]
    assert axes.get_title() == "What 3 of 6 workers did: sync"
    assert axes.get_ylim() == (2.6, -0.6), "worker 0 is on top"


def test_bars_of_one_worker_never_hide_each_other(axes: Any) -> None:
    failures = [Crashes(Exponential(3.0), Exponential(1.0), loses_work=False)]
    report = report_of(workers=2, failures=failures)
    draw_timeline(axes, report, 40)
    bars = sorted(bar for each in bars_of(axes).values() for bar in each)
    assert len(bars) > 40
    for first, second in pairwise(bars):
        assert first[0] < second[0] or first[2] <= second[1]


def test_a_timeline_shows_about_thirty_spans_of_each_worker(axes: Any) -> None:
    report = report_of("sync", workers=1, compute=Constant(0.5))
    draw_timeline(axes, report, 40)
    assert axes.get_xlim() == (0.0, 15.0)


def test_bad_input_is_refused(tmp_path: Path, axes: Any) -> None:
    report = report_of()
    with pytest.raises(ValueError, match="reports is empty"):
        plot_reports(tmp_path / "out.png", [])
    with pytest.raises(ValueError, match=r"out.txt' is no plot; end it with .png, .svg, .pdf"):
        plot_reports(tmp_path / "out.txt", [report])
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        plot_reports(tmp_path / "missing" / "out.png", [report])
    wrong: list[Any] = [report, 3, [3], [[report, 3]], "ab", [{}]]
    for reports in wrong:
        for draw in (plot_losses, lambda _, each: plot_reports("o.png", each)):
            with pytest.raises(TypeError, match=r"reports (is|have) .*; give"):
                draw(axes, reports)
    with pytest.raises(ValueError, match="reports is empty; give at least one"):
        plot_losses(axes, [])
    with pytest.raises(TypeError, match="path is 3; give the path of a file"):
        plot_reports(3, [report])  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


@pytest.mark.faults
def test_matplotlib_is_loaded_when_a_plot_is_drawn_and_pyplot_never(tmp_path: Path) -> None:
    program = (
        "import sys; from asynchooks.simulation import *\n"
        "before = 'matplotlib' in sys.modules\n"
        "report = Simulation(7, 'turbo').cluster(2).run(updates=3)\n"
        f"plot_reports({str(tmp_path / 'out.png')!r}, [report])\n"
        "print(before, 'matplotlib.pyplot' in sys.modules)"
    )
    assert output_of(program) == ["False False"]


def test_a_missing_matplotlib_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'asynchooks\[plot\]'"):
        plot_reports(tmp_path / "out.png", [report_of()])
