"""Which checkpoints stay and which go.

The rules behind `save` are asked, as laws of many histories would take many saves.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks.checkpoints import Checkpoint, Mode, Retention
from asynchooks.checkpoints._retention import best_first, superfluous

from .stores import names_in, opened, writer


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
def test_deleting_after_each_save_keeps_what_deleting_once_does_and_each_rule_its_own(
    history: list[Checkpoint], retention: Retention
) -> None:
    there: list[Checkpoint] = []
    for each in history:
        there.append(each)
        gone = superfluous(there, retention)
        there = [one for one in there if one not in gone]
        assert superfluous(there, retention) == []
    stays = kept(history, retention)
    assert [each.serial for each in there] == stays
    count = retention.max_to_keep
    recent = [each.serial for each in history][-count if count else 0 :]
    sign = 1 if retention.mode is Mode.MIN else -1
    ranked = sorted(
        (sign * each.metric, each.serial) for each in history if each.metric is not None
    )
    assert [each.serial for each in best_first(history, retention)] == [each for _, each in ranked]
    best = [serial for _, serial in ranked[: retention.keep_best]]
    assert {*recent, *best} <= {*stays}
    assert retention.keep_every_n_hours is not None or {*stays} <= {*recent, *best}


@pytest.mark.parametrize(
    ("hours", "serials"),
    [
        ([0.5, 1.0, 1.5, 2.4, 2.5, 9.0, 9.5], [0, 2, 4, 5, 6]),
        ([0, 1, 2, 1, 1.5, 2.5, 3, 3.1], [0, 1, 2, 6, 7]),  # training goes back
    ],
)
def test_one_stays_for_every_so_many_hours_of_training_from_the_first_on(
    hours: list[float], serials: list[int]
) -> None:
    history = [at(i, hour * 3600) for i, hour in enumerate(hours)]
    assert kept(history, Retention(max_to_keep=1, keep_every_n_hours=1)) == serials


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ({"max_to_keep": 0}, ValueError, "max_to_keep is 0; give an integer >= 1, or None for all"),
        ({"keep_best": -1}, ValueError, "keep_best is -1; give an integer >= 0"),
        ({"keep_every_n_hours": 0}, ValueError, "keep_every_n_hours is 0; give hours > 0"),
        ({"mode": 1}, TypeError, "mode is 1; give Mode.MIN or Mode.MAX, or the text"),
        ({"mode": "best"}, ValueError, "mode is 'best'; give Mode.MIN or Mode.MAX"),
    ],
)
def test_values_out_of_range_are_refused(
    values: dict[str, object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Retention(**values)  # type: ignore[arg-type]


def test_damaged_ones_stay_and_do_not_count(tmp_path: Path) -> None:
    with opened(tmp_path, retention=Retention(max_to_keep=2)) as directory:
        directory.save(1, writer())
        directory.save(2, writer())
        (tmp_path / "model.ckpt-2/model.ckpt-2").write_bytes(b"trunc")
        directory.save(3, writer())
        (tmp_path / "model.ckpt-3/manifest.json").unlink()
        directory.save(4, writer())
        assert names_in(tmp_path) == [f"model.ckpt-{step}" for step in (1, 2, 3, 4)]
        directory.save(5, writer())
        assert names_in(tmp_path) == [f"model.ckpt-{step}" for step in (2, 3, 4, 5)]
