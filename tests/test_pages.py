"""The code of the README and of the site's pages, run, with what it prints.

All Python blocks of a page run in order, in one namespace, in a directory of their own; a text
block straight after one is its exact output. Comments on a page's first lines are its options:
`<!-- tests: faults -->` is a marker, `<!-- needs: torch, jax -->` what has to be installed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.M | re.S)
SCRIPT = re.compile(r"# (\S+), for: asynchooks (launch .*)\n")
OPTION = re.compile(r"^<!-- (tests|needs): (.*) -->$", re.M)


class Block(NamedTuple):
    """One block of Python on a page, and the text block straight after it, if any."""

    line: int
    code: str
    output: str | None


def find_blocks(text: str) -> list[Block]:
    return [
        Block(text.count("\n", 0, found.start(1)) + 1, found[1], found[2])
        for found in BLOCK.finditer(text)
    ]


def options(text: str) -> dict[str, list[str]]:
    return {key: values.split(", ") for key, values in OPTION.findall(text)}


def pages() -> list[object]:
    found = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if "_build" in path.parts or not find_blocks(text):
            continue
        marks = [getattr(pytest.mark, name) for name in options(text).get("tests", [])]
        if "tensorflow" in "".join(block.code for block in find_blocks(text)):
            marks.append(pytest.mark.tensorflow)
        name = path.relative_to(ROOT).as_posix()
        found.append(pytest.param(path, id=name, marks=[*marks, pytest.mark.timeout(300)]))
    return found


def check_launched(block: Block, name: str, command: str) -> None:
    """Run a block as a cluster: each line that the page shows is printed by that task."""
    Path(name).write_text(block.code)
    done = subprocess.run(
        [sys.executable, "-m", "asynchooks", *command.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert block.output is not None
    assert set(block.output.splitlines()) <= set(done.stdout.splitlines())


@pytest.mark.parametrize("path", pages())
def test_page_prints_what_it_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = path.read_text(encoding="utf-8")
    for package in options(text).get("needs", []):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    # workers share the loop by time: a collection of what other tests have left, which a reader's
    # process has not, would move the step at which one comes
    gc.collect()
    gc.freeze()
    try:
        for block in find_blocks(text):
            script = SCRIPT.match(block.code)
            if script is not None:
                check_launched(block, *script.groups())
                continue
            printed = io.StringIO()
            # empty lines in front: an error then names the page's own line
            code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
            if block.output is not None:
                assert printed.getvalue() == block.output, f"line {block.line}"
    finally:
        gc.unfreeze()
