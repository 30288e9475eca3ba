"""The site's notebooks, executed in a kernel; an error in a cell is an error here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# in a process of its own: the kernel's client opens sockets and threads of its own
EXECUTE = """
import sys
import nbclient
import nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(notebook)
nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def test_there_are_three_notebooks() -> None:
    assert [each.stem for each in NOTEBOOKS] == ["first-steps", "live-training", "virtual-time"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))

    assert notebook["nbformat"] == 4
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    cells = [each for each in notebook["cells"] if each["cell_type"] == "code"]
    assert all(each["outputs"] == [] and each["execution_count"] is None for each in cells)
    lines = [line.rstrip("\n") for each in cells for line in each["source"]]
    assert max(map(len, lines)) <= 84


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))  # nothing of the user's is read or written
    executed = tmp_path / "executed.ipynb"

    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(path), str(executed)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    cells = json.loads(executed.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert outputs
    # a warning or a traceback would stand on the site
    assert {output.get("name") for output in outputs} == {"stdout"}, outputs
