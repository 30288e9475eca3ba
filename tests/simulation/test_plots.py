"""Plots show what the reports hold; files appear whole, and what is missing is named."""

import math
import os
from dataclasses import replace
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
    plot_losses,
    plot_reports,
)

# what it draws cannot be read off a file; `plot_reports` calls it
from asynchooks.simulation.output._plots import draw_timeline

from .clusters import new_cluster

figure = pytest.importorskip("matplotlib.figure")


def report_of(protocol: str = "async", *, workers: int = 4, **options: Any) -> Report:
    cluster = new_cluster(
        workers, protocol=parse_protocol(protocol, workers), parameters=np.ones(2),
        keep_timeline=True, **options,
    )  # fmt: skip
    report = cluster.run(updates=40, gradient=lambda p, _: p, loss=lambda p: float(p @ p))
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
    bare = new_cluster(2).run(updates=3)  # without losses and a timeline
    losses = [(float(time), time, 10.0 ** (6 * time)) for time in range(52)]  # no axis shows all
    reports = [bare] if ending == ".svg" else [report_of(), replace(report_of(), losses=losses)]
    plot_reports(path, reports)  # warnings are errors, such as that of an overflow in matplotlib
    assert path.read_bytes().startswith(start)
    assert os.listdir(tmp_path) == [path.name]


def test_losses_are_a_line_for_each_report_without_what_is_not_finite(axes: Any) -> None:
    report = report_of()
    losses = [(0.0, 0, 2.0), (1.0, 1, math.inf), (2.0, 2, math.nan)]
    reports = [report, replace(report_of("sync"), losses=losses, secs=report.secs * 30)]
    plot_losses(axes, reports)
    first, second = axes.get_lines()
    assert list(first.get_xdata()) == [secs for secs, _, _ in report.losses]
    assert list(first.get_ydata()) == [loss for _, _, loss in report.losses]
    assert list(second.get_ydata()) == [2.0]
    assert second.get_label().startswith("sync, ")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log"), "times are far apart"


@pytest.mark.parametrize("num_shown", [1, 40])
def test_a_timeline_has_a_bar_for_each_of_about_thirty_spans(axes: Any, num_shown: int) -> None:
    draw_timeline(axes, report_of("sync", workers=2, compute=Constant(0.5)), num_shown)
    bars = [path for each in axes.collections for path in each.get_paths()]
    ends = sorted(bar.vertices[:, 0].max() for bar in bars)
    assert ends == [0.5 * (1 + i) for i in range(30) for _ in range(min(2, num_shown))]
    assert axes.get_xlim() == (0.0, 15.0)
    assert labels_of(axes) == ["compute"]
    shown = "1 of 2" if num_shown == 1 else "2"
    assert axes.get_title() == f"What {shown} workers did: sync"


def test_a_timeline_names_each_kind_once(axes: Any) -> None:
    failures = [Crashes(Exponential(3.0), Exponential(1.0))]
    draw_timeline(axes, report_of("sync", failures=failures, push=Constant(0.1)), 40)
    assert labels_of(axes) == ["compute", "push", "wait", "lost", "down"]


@pytest.mark.parametrize(
    ("path", "reports", "match"),
    [
        ("out.png", [], "reports is empty; give at least one"),
        ("out.txt", None, r"out.txt' is no plot; end it with .png, .svg, .pdf"),
        ("out.png", [[3]], "reports have .*; give"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, path: str, reports: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        plot_reports(tmp_path / path, [report_of()] if reports is None else reports)
    assert os.listdir(tmp_path) == []


def test_losses_of_several_seeds_are_a_band(axes: Any) -> None:
    group = [report_of(seed=seed) for seed in (2, 3, 4)]
    plot_losses(axes, [group, report_of()])
    assert "3 seeds" in str(axes.lines[0].get_label())
    (band,) = axes.collections
    ends = np.asarray(band.get_paths()[0].vertices)[:, 0].max()
    assert ends == pytest.approx(min(each.losses[-1][0] for each in group))
