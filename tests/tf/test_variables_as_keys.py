"""Variables as keys of feeds and of fetches: each program as under TensorFlow's session."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import asynchooks

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

ROOT = Path(asynchooks.__file__).parent.parent


@pytest.mark.timeout(300)  # 10 s on an idle machine, in a process of its own: a mistake ends it
@pytest.mark.parametrize("behavior", ["v2", "v1"])
def test_each_program_is_as_under_tensorflow(behavior: str, anyio_backend: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.tf.variable_programs"]
    done = subprocess.run(
        [*command, behavior, anyio_backend], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-5000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    theirs = outcomes.pop("theirs")
    assert len(theirs) == 10
    assert len(outcomes) == 4
    for side, ours in outcomes.items():
        for program, expected in theirs.items():
            assert ours[program] == expected, f"{program} ({side})"
