"""Without TensorFlow: an error that names the extra, and everything else works."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tensorflow, pytest.mark.faults]

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tensorflow":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import anyio
import asynchooks
"""

USES = {
    "the default creator": "asynchooks.MonitoredSession([])",
    "ChiefSessionCreator": "asynchooks.ChiefSessionCreator",
    "asynchooks.tf": "import asynchooks.tf",
}


def run_blocked(program: str) -> str:
    """What it prints; it must succeed, and print no error."""
    command = [sys.executable, "-c", BLOCK + program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("use", USES)
def test_what_needs_tensorflow_is_an_import_error_that_names_the_extra(use: str) -> None:
    run_blocked(f"""
try:
    {USES[use]}
except ImportError as error:
    assert "pip install 'asynchooks[tensorflow]'" in str(error), error
    assert "MonitoredSession(hooks, step)" in str(error), error
    assert "tensorflow" not in sys.modules
else:
    raise AssertionError("an ImportError was expected")
""")


def test_the_error_of_a_forgotten_creator_names_step_functions_first() -> None:
    run_blocked("""
try:
    asynchooks.MonitoredSession([])
except ImportError as error:
    text = str(error)
    assert 0 < text.index("MonitoredSession(hooks, step)") < text.index("TensorFlow"), text
""")


def test_function_sessions_with_all_hooks_work_without_it() -> None:
    program = """
from asynchooks import (FunctionSessionCreator, GlobalStepWaiterHook, MonitoredSession,
    StepCounterHook, StopAtStepHook)

async def main():
    hooks = [GlobalStepWaiterHook(0), StopAtStepHook(last_step=5), StepCounterHook()]
    async with MonitoredSession(hooks, FunctionSessionCreator(lambda: {"x": 1})) as session:
        while not session.should_stop():
            await session.run("x")
        print(session.global_step.value)

for backend in ("asyncio", "trio"):
    anyio.run(main, backend=backend)
assert "tensorflow" not in sys.modules
"""
    assert run_blocked(program) == "5\n5\n"
