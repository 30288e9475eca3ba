"""Sinks of files under kills at any moment: after each resume, every step is there once."""

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asynchooks.metrics import CsvSink, JsonLinesSink, Sink, TensorBoardSink

from .killed import Trainings
from .readers import json_lines, rows, steps_shown

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def newest(directory: Path) -> Path:
    return max(path for path in directory.iterdir() if "tfevents" in path.name)


# by name: makes the sink, the file that it writes to, the steps in it
SINKS: dict[
    str, tuple[Callable[[Path], Sink], Callable[[Path], Path], Callable[[Path], list[int]]]
] = {
    "json": (
        lambda at: JsonLinesSink(at / "m.jsonl"),
        lambda at: at / "m.jsonl",
        lambda at: [line["step"] for line in json_lines(at / "m.jsonl") if "loss" in line],
    ),
    "csv": (
        lambda at: CsvSink(at / "m.csv"),
        lambda at: at / "m.csv",
        lambda at: [int(row["step"]) for row in rows(at / "m.csv") if row["loss"]],
    ),
    "tensorboard": (TensorBoardSink, newest, steps_shown),
}


def late_names(name: str, path: Path) -> list[str]:
    """The late values in a file of lines."""
    if name == "tensorboard":
        return []
    lines = json_lines(path) if name == "json" else rows(path)
    return [key for line in lines for key, value in line.items() if key[:5] == "late " and value]


MOVES = st.lists(
    st.one_of(
        st.sampled_from(["put", "put", "put", "late", "take", "flush", "save", "set_back", "thin"]),
        st.floats(0, 1),  # a kill, and the share that was written
    ),
    max_size=40,
)


@pytest.mark.parametrize("name", SINKS)
@settings(max_examples=20)
@given(moves=MOVES)
@example(moves=["put", "put", "put", "save", "thin", 1.0])
def test_each_step_is_there_once_and_in_order_after_any_kills(
    name: str, moves: list[str | float]
) -> None:
    new_sink, file, steps = SINKS[name]
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        at = Path(directory)
        trainings = Trainings(
            lambda: new_sink(at),
            lambda: file(at),
            lambda step: {"loss": step / 8} | ({"late": 1.0} if step > 4 else {}),
        )
        for move in moves:
            if isinstance(move, float):
                trainings.kill(move)
            else:
                getattr(trainings, move)()
        trainings.put()
        trainings.end()
        found, expected = steps(at), list(range(1, trainings.step + 1))
        late = late_names(name, file(at))
        assert len(late) == len(set(late)), "each late value once"
        if "thin" in moves:  # a dropped one is missing, or comes late, of a checkpoint before that
            assert sorted(found) == sorted(set(found) & set(expected))
        else:
            assert found == expected
