"""Wrong arguments are refused, each in words that say what to give."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from asynchooks._errors import MetricError
from asynchooks.checkpoints import CheckpointDirectory, Retention

from .stores import names_in, opened, writer


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"step": -1}, ValueError, "step is -1; give an integer >= 0"),
        ({"step": 1.0}, TypeError, "step is 1.0; give an integer"),
        ({"seconds": -1}, ValueError, "seconds is -1; give the seconds of training"),
        ({"seconds": math.inf}, ValueError, "seconds is inf"),
        ({"seconds": math.nan}, ValueError, "seconds is nan"),
        ({"seconds": "1"}, TypeError, "seconds is '1'; give the seconds"),
        ({"metric": math.nan}, MetricError, "metric is NaN"),
        ({"metric": "1"}, TypeError, "metric is '1'; give a number"),
        ({"extra": {"a/b": b""}}, ValueError, "'a/b' is no name of an extra file"),
        ({"extra": {"..": b""}}, ValueError, "is no name of an extra file"),
        ({"extra": {"": b""}}, ValueError, "is no name of an extra file"),
        ({"extra": {5: b""}}, TypeError, "the name of an extra file is 5"),
        ({"extra": {"a": "b"}}, TypeError, "the extra file 'a' is 'b'; give bytes"),
        ({"extra": {"manifest.json": b""}}, ValueError, "'manifest.json' is taken"),
        ({"extra": {"model.ckpt-1.x": b""}}, ValueError, "'model.ckpt-1.x' is taken"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with opened(tmp_path) as directory:
        with pytest.raises(error, match=match):
            directory.save(options.pop("step", 1), pytest.fail, **options)
        assert names_in(tmp_path) == []
        assert directory.save(1, writer()).serial == 1


def test_a_checkpoint_whose_metric_is_not_known_is_never_the_best(tmp_path: Path) -> None:
    retention = Retention(max_to_keep=1, keep_best=1)
    with opened(tmp_path, retention=retention) as directory:
        directory.save(1, writer())
        assert directory.best() is None
        directory.save(2, writer(), metric=1e9)
        directory.save(3, writer())
        best = directory.best()
    assert best is not None
    assert best.step == 2


@pytest.mark.parametrize("basename", ["", ".a", "a/b", "a\\b", "a\0"])
def test_a_basename_is_a_name(tmp_path: Path, basename: str) -> None:
    with pytest.raises(ValueError, match="give a name without separators"):
        CheckpointDirectory(tmp_path, basename)


def test_arguments_of_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="basename is 5"):
        CheckpointDirectory(tmp_path, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"retention is 5; give a Retention\(max_to_keep=...\)"):
        CheckpointDirectory(tmp_path, retention=5)  # type: ignore[arg-type]
