"""check_saver lets savers pass and says what to wrap everything else in."""

from __future__ import annotations

import pathlib
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asynchooks.checkpoints import Saver, SnapshotSaver, StateDictSaver, check_saver

from ..test_docstrings import example_of


class Nothing:
    def __repr__(self) -> str:
        return "Nothing()"


class Saves:
    def save(self, path: str) -> None: ...

    def __repr__(self) -> str:
        return "Saves()"


class PlainSaver:
    def save(self, path: str) -> None: ...

    def restore(self, path: str) -> None: ...


class Model:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state_dict: Any) -> None: ...


def test_savers_pass_with_and_without_snapshots() -> None:
    check_saver(PlainSaver())
    check_saver(StateDictSaver(weights={}))
    assert isinstance(StateDictSaver(weights={}), SnapshotSaver)
    assert not isinstance(PlainSaver(), SnapshotSaver)


@pytest.mark.parametrize(
    ("saver", "message"),
    [
        (Nothing(), r"^Nothing\(\) is no saver; give an object with save\(path\) and restore"),
        (None, r"^None is no saver"),
        (Saves(), r"^Saves\(\) is no saver, which has no restore; give an object with save"),
        (PlainSaver, r"it is a class: make an instance, PlainSaver\(\.\.\.\)"),
        (StateDictSaver, r"it is a class: make an instance, StateDictSaver\(\.\.\.\)"),
        (Model(), r"wrap it: StateDictSaver\(model=\.\.\.\)"),
        ({"w": np.zeros(9)}, r"^an object of dict is no saver; wrap it: StateDictSaver\(weights="),
    ],
)
def test_the_error_for_no_saver_says_what_to_wrap(saver: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_saver(saver)


@pytest.mark.parametrize("protocol", [Saver, SnapshotSaver])
def test_the_examples_are_savers(
    protocol: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = SimpleNamespace(count=3)
    names: dict[str, Any] = {"pathlib": pathlib, "model": model, "Callable": Callable}
    exec(textwrap.dedent(example_of(protocol)), names)
    saver: Any = names["CounterSaver"]()
    check_saver(saver)
    assert issubclass(type(saver), protocol)
    saver.save("count")
    model.count = 4
    saver.restore("count")
    assert model.count == 3
