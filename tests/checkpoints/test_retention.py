"""Which checkpoints stay and which go."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks.checkpoints import Checkpoint, Mode, Retention
from asynchooks.checkpoints._retention import best_first, superfluous

from .stores import names_in, opened, steps_in, writer


def at(serial: int, seconds: float = 0.0, metric: float | None = None) -> Checkpoint:
    return Checkpoint(f"m-{serial}", f"m-{serial}/m", serial, serial, seconds, metric, 1)


def kept(checkpoints: list[Checkpoint], retention: Retention) -> list[int]:
    gone = superfluous(checkpoints, retention)
    return [each.serial for each in checkpoints if each not in gone]


METRICS = st.none() | st.floats(allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0])
RETENTIONS = st.builds(
    Retention,
    max_to_keep=st.none() | st.integers(1, 4),
    keep_every_n_hours=st.none() | st.sampled_from([0.5, 1.0, 3.0]),
    keep_best=st.integers(0, 3),
    mode=st.sampled_from(Mode),
)
HISTORIES = st.lists(
    st.tuples(st.integers(0, 12).map(lambda halves: halves * 1800.0), METRICS), max_size=14
).map(lambda values: [at(i + 1, *value) for i, value in enumerate(values)])


@given(HISTORIES, RETENTIONS)
def test_deleting_after_each_save_keeps_what_deleting_once_at_the_end_keeps(
    history: list[Checkpoint], retention: Retention
) -> None:
    there: list[Checkpoint] = []
    for each in history:
        there.append(each)
        gone = superfluous(there, retention)
        there = [one for one in there if one not in gone]
        assert each in there, "the newest is always kept"
        assert superfluous(there, retention) == []
    assert [each.serial for each in there] == kept(history, retention)


@given(HISTORIES, RETENTIONS)
def test_each_rule_keeps_its_own_and_nothing_else_stays(
    history: list[Checkpoint], retention: Retention
) -> None:
    stays = kept(history, retention)
    count = retention.max_to_keep
    recent = [each.serial for each in history][-count if count else 0 :]
    best = [each.serial for each in best_first(history, retention)[: retention.keep_best]]
    assert set(recent) | set(best) <= set(stays)
    others = [each for each in history if each.serial in set(stays) - set(recent) - set(best)]
    hours = retention.keep_every_n_hours
    assert hours is not None or not others
    pairs = pairwise(others)
    assert all(later.seconds - each.seconds >= (hours or 0) * 3600 for each, later in pairs)


@given(HISTORIES, st.sampled_from(Mode))
def test_the_best_come_first_and_of_equal_ones_the_first(
    history: list[Checkpoint], mode: Mode
) -> None:
    ordered = best_first(history, Retention(mode=mode))
    assert {each.serial for each in ordered} == {
        each.serial for each in history if each.metric is not None
    }
    for better, worse in pairwise(ordered):
        assert better.metric is not None
        assert worse.metric is not None
        if better.metric == worse.metric:
            assert better.serial < worse.serial
        else:
            assert (better.metric < worse.metric) is (mode is Mode.MIN)


def test_one_stays_for_every_so_many_hours_of_training_from_the_first_on() -> None:
    hours = [0.5, 1.0, 1.5, 2.4, 2.5, 9.0, 9.5]
    history = [at(i, hour * 3600) for i, hour in enumerate(hours)]
    assert kept(history, Retention(max_to_keep=1, keep_every_n_hours=1)) == [0, 2, 4, 5, 6]


def test_training_that_goes_back_keeps_none_until_it_is_past_that_point_again() -> None:
    hours = [0, 1, 2, 1, 1.5, 2.5, 3, 3.1]
    history = [at(i, hour * 3600) for i, hour in enumerate(hours)]
    assert kept(history, Retention(max_to_keep=1, keep_every_n_hours=1)) == [0, 1, 2, 6, 7]


def test_infinite_metrics_are_the_worst_and_the_best() -> None:
    history = [at(1, 0, math.inf), at(2, 0, 3.0), at(3, 0, -math.inf), at(4)]
    least = Retention(max_to_keep=1, keep_best=1, mode=Mode.MIN)
    assert kept(history, least) == [3, 4]
    assert kept(history, Retention(max_to_keep=1, keep_best=1, mode=Mode.MAX)) == [1, 4]


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ({"max_to_keep": 0}, ValueError, "max_to_keep is 0; give an integer >= 1, or None for all"),
        ({"max_to_keep": 1.5}, TypeError, "max_to_keep is 1.5; give an integer >= 1, or None"),
        ({"keep_best": -1}, ValueError, "keep_best is -1; give an integer >= 0"),
        ({"keep_best": None}, TypeError, "keep_best is None; give an integer"),
        ({"keep_every_n_hours": 0}, ValueError, "keep_every_n_hours is 0; give hours > 0"),
        ({"keep_every_n_hours": math.nan}, ValueError, "keep_every_n_hours is nan"),
        ({"keep_every_n_hours": math.inf}, ValueError, "keep_every_n_hours is inf"),
        (
            {"mode": 1},
            TypeError,
            'mode is 1; give Mode.MIN or Mode.MAX, or the text "min" or "max"',
        ),
        ({"mode": "best"}, ValueError, "mode is 'best'; give Mode.MIN or Mode.MAX"),
    ],
)
def test_values_out_of_range_are_refused(
    values: dict[str, object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Retention(**values)  # type: ignore[arg-type]


def test_saves_delete_by_the_retention_and_restarts_change_nothing(tmp_path: Path) -> None:
    retention = Retention(max_to_keep=2, keep_every_n_hours=1, keep_best=1, mode="min")
    for step in range(9):
        with opened(tmp_path, retention=retention) as directory:
            directory.save(step, writer(), seconds=step * 1800.0, metric=abs(step - 3.0))
    # every second one is an hour after the last that stayed; 3 is the best; 7 and 8 the newest
    assert steps_in(tmp_path) == [0, 2, 3, 4, 6, 7, 8]
    assert names_in(tmp_path) == [f"model.ckpt-{step}" for step in (0, 2, 3, 4, 6, 7, 8)]


def test_damaged_ones_stay_and_do_not_count(tmp_path: Path) -> None:
    with opened(tmp_path, retention=Retention(max_to_keep=2)) as directory:
        directory.save(1, writer())
        directory.save(2, writer())
        (tmp_path / "model.ckpt-2/model.ckpt-2").write_bytes(b"trunc")
        directory.save(3, writer())
        (tmp_path / "model.ckpt-3/manifest.json").unlink()
        directory.save(4, writer())
        # of the right size: only its content shows the damage
        (tmp_path / "model.ckpt-4/model.ckpt-4").write_bytes(b"WEIGHTS")
        assert getattr(directory.newest_intact(), "step", None) == 1
        directory.save(5, writer())
        assert names_in(tmp_path) == [f"model.ckpt-{step}" for step in (1, 2, 3, 4, 5)]
        directory.save(6, writer())
        assert names_in(tmp_path) == [f"model.ckpt-{step}" for step in (2, 3, 4, 5, 6)]
