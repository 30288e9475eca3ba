"""Without TensorFlow: an error that names the extra, and everything else works."""

import subprocess
import sys

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.faults

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

PROGRAM = """
first = {}
USES = {
    "the default creator": "asynchooks.MonitoredSession([])",
    "ChiefSessionCreator": "asynchooks.ChiefSessionCreator",
    "asynchooks.tf": "import asynchooks.tf",
}
for name, use in USES.items():
    try:
        exec(use)
    except ImportError as error:
        text = str(error)
        first.setdefault("text", text)
        assert "pip install 'asynchooks[tensorflow]'" in text, (name, text)
        assert "MonitoredSession(hooks, step)" in text, (name, text)
    else:
        raise AssertionError(name)
text = first["text"]
assert 0 < text.index("MonitoredSession(hooks, step)") < text.index("TensorFlow"), text

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


def test_what_needs_tensorflow_names_the_extra_and_function_sessions_work_without_it() -> None:
    """The error names step functions first."""
    command = [sys.executable, "-c", BLOCK + PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "5\n5\n")
