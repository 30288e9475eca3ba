"""The site: every public name has one place in the reference, and Sphinx builds it without a word.

Links within it, those of the docstrings among them, are checked by the build itself (`-n`).
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
MODULES = (
    "asynchooks",
    "asynchooks.checkpoints",
    "asynchooks.data",
    "asynchooks.distributed",
    "asynchooks.metrics",
    "asynchooks.planning",
    "asynchooks.protocols",
    "asynchooks.simulation",
    "asynchooks.testing",
)
TENSORFLOW = {
    "ChiefSessionCreator", "ClusterTask", "GraphCoordinator", "HooksCallback",
    "MonitoredTrainingSession", "ProfilerHook", "SingularMonitoredSession", "TensorFlowSaver",
    "WorkerSessionCreator", "in_graph", "sync_hook",
}  # fmt: skip

ADAPTERS = {"IgniteHooks", "LightningHooks", "TrainerHooks"}
"""Not in the module's `__all__`, as a star import must work without their libraries."""


def documented() -> list[str]:
    """Names in the reference, without their module: each is public in one place only."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md")))
    return re.findall(r"^\.\. auto(?:class|function|exception|data):: (\w+)$", text, re.M)


def test_every_public_name_has_one_place_in_the_reference() -> None:
    public = {name for module in MODULES for name in importlib.import_module(module).__all__}
    assert [name for name, count in Counter(documented()).items() if count > 1] == []
    assert set(documented()) == public | TENSORFLOW | ADAPTERS


def test_the_reference_names_those_of_tensorflow() -> None:
    pytest.importorskip("tensorflow")
    names = set(importlib.import_module("asynchooks.tf").__all__)
    # TensorFlow's own, and one that stands with the other hooks
    assert names - {"Scaffold", "CheckpointSaverHook"} == TENSORFLOW


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "tensorflow", "distributed"):
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q", "docs", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hooks = (tmp_path / "reference" / "hooks.html").read_text(encoding="utf-8")
    assert 'id="asynchooks.StopAtStepHook"' in hooks
