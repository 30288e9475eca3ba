"""Code that starts a Jupyter kernel, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run_with_kernels(code: str, *args: object, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the code, which has to end well, in this directory; returns what it printed.

    The kernel's client opens sockets and threads of its own. Nothing of the user's is read or
    written.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(home / name))
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
