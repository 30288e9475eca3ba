"""The site: every public name has one place in the reference, and Sphinx builds it without a word.

Links within it, those of the docstrings among them, are checked by the build itself (`-n`), which
executes the notebooks, too. It writes `llms.txt` and `llms-full.txt` for programs that read it.
"""

import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .test_docstrings import MODULES

DOCS = Path(__file__).parent.parent / "docs"
TENSORFLOW = {
    "ChiefSessionCreator", "ClusterTask", "GraphCoordinator", "HooksCallback",
    "MonitoredTrainingSession", "ProfilerHook", "SingularMonitoredSession", "TensorFlowSaver",
    "WorkerSessionCreator", "in_graph", "sync_hook",
}  # fmt: skip

ADAPTERS = {"IgniteHooks", "LightningHooks", "TrainerHooks"}
"""Not in the module's `__all__`, as a star import must work without their libraries."""


def test_every_public_name_has_one_place_in_the_reference() -> None:
    modules = [*MODULES, importlib.import_module("asynchooks.distributed")]
    public = {name for module in modules for name in module.__all__}
    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.glob("reference/*.md"))
    documented = re.findall(r"^\.\. auto(?:class|function|exception|data):: (\w+)$", text, re.M)
    assert [name for name, count in Counter(documented).items() if count > 1] == []
    assert set(documented) == public | TENSORFLOW | ADAPTERS


def test_the_reference_names_those_of_tensorflow() -> None:
    pytest.importorskip("tensorflow")
    names = set(importlib.import_module("asynchooks.tf").__all__)
    # TensorFlow's own, and one that stands with the other hooks
    assert names - {"Scaffold", "CheckpointSaverHook"} == TENSORFLOW


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning_with_its_notebooks_and_texts_for_programs(
    tmp_path: Path,
) -> None:
    """One test, as two processes of tests would build it twice."""
    for package in ("sphinx", "myst_nb", "ipykernel", "tensorflow", "distributed"):
        pytest.importorskip(package)
    options = ["-W", "-n", "--keep-going", "-q"]
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    hooks = (tmp_path / "reference" / "hooks.html").read_text(encoding="utf-8")
    assert 'id="asynchooks.StopAtStepHook"' in hooks

    for name in ("first-steps", "live-training", "virtual-time"):
        page = (tmp_path / "notebooks" / f"{name}.html").read_text(encoding="utf-8")
        assert "cell_output" in page
        # a warning or a traceback would stand on the site
        assert re.search(r'class="output (stderr|traceback|error)', page) is None
        assert ("Figure" in page) <= ("_images/" in page)

    lines = (tmp_path / "llms.txt").read_text().splitlines()
    assert lines[0] == "# asynchooks"
    assert lines[2].startswith("> ")
    links = [found[1] for line in lines if (found := re.search(r"\]\((\S+?)\)", line))]
    assert [each for each in links if not (tmp_path / each).is_file()] == []
    pages = [path.relative_to(DOCS) for kind in ("md", "ipynb") for path in DOCS.rglob(f"*.{kind}")]
    listed = {re.sub(r"^_sources/|\.html$|\.md\.txt$", "", each) for each in links}
    expected = {each.with_suffix("").as_posix() for each in pages if "_build" not in each.parts}
    assert listed == expected - {"index"} | {"llms-full.txt"}
    start = "- [Use hooks in other training loops](_sources/how-to/other-trainers.md.txt): Call asy"
    assert [line for line in lines if line.startswith(start)]

    full = (tmp_path / "llms-full.txt").read_text()
    parts = [
        "# Use hooks in other training loops\n",
        "`asynchooks.adapters.LightningHooks` is a callback:\n\n```python\nimport logging\n",
        "asynchooks.StopAtStepHook(",  # of the reference, as text
        "Changelog\n*********\n",
    ]
    assert [each for each in parts if each not in full] == []
    assert "toctree" not in full
