"""RandomStates: what was drawn behind a save is drawn again behind its restore."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asynchooks import CheckpointError, RandomStates, StateDictSaver


@pytest.fixture(autouse=True)
def others_draw_what_they_would_have() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def drawn() -> tuple[object, ...]:
    torch = sys.modules.get("torch")
    of_torch = () if torch is None else (torch.rand(3).tolist(), torch.randn(2).tolist())
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.normal(),
        np.random.rand(2).tolist(),
        *of_torch,
    )


def test_a_file_of_the_states_repeats_what_was_drawn(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    saver = StateDictSaver(random=RandomStates())
    drawn()  # gauss and normal keep every second number for the next call
    saver.save(str(tmp_path / "model"))
    expected = [drawn() for _ in range(3)]
    saver.restore(str(tmp_path / "model"))
    assert [drawn() for _ in range(3)] == expected


def test_another_state_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"the keys \['seed'\]; give what its state_dict"):
        RandomStates().load_state_dict({"seed": 3})


@pytest.mark.faults
def test_no_library_is_imported_to_save() -> None:
    code = (
        "import sys; from asynchooks import RandomStates; state = RandomStates().state_dict(); "
        "RandomStates().load_state_dict(state); print(sorted(state), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.endswith("'python'] False\n"), done.stdout
