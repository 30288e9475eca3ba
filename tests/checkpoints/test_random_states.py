"""RandomStates: what was drawn behind a save is drawn again behind its restore."""

import random
from pathlib import Path

import numpy as np
import pytest

from asynchooks import CheckpointError, RandomStates, StateDictSaver


def test_a_file_of_the_states_repeats_what_was_drawn(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def drawn() -> list[object]:
        of_python = [random.random(), random.gauss(0, 1)]
        return [*of_python, np.random.normal(), *torch.rand(3).tolist(), *torch.randn(2).tolist()]

    saver, python, numpy = StateDictSaver(random=RandomStates()), random.getstate(), np.random
    before = numpy.get_state()
    drawn()  # gauss and normal keep every second number for the next call
    saver.save(str(tmp_path / "model"))
    expected = [drawn() for _ in range(3)]
    saver.restore(str(tmp_path / "model"))
    assert [drawn() for _ in range(3)] == expected
    random.setstate(python)  # other tests draw what they would have
    numpy.set_state(before)


def test_another_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"the keys \['seed'\]; give what its state_dict"):
        RandomStates().load_state_dict({"seed": 3})
