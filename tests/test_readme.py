"""The README's code blocks, run, with what they print; and its command lines."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from asynchooks.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART_COMMAND = (
    "python3 -m venv .venv && .venv/bin/pip install '.[examples]' && "
    ".venv/bin/python examples/quickstart.py"
)
TEST_COMMAND = (
    "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest -n 2"
)


class Block(NamedTuple):
    """One block of Python in the README, and the text block straight after it, if any."""

    line: int
    code: str
    output: str | None


def find_blocks(text: str) -> list[Block]:
    fenced = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.M | re.S)
    return [
        Block(text.count("\n", 0, found.start(1)) + 1, found[1], found[2])
        for found in fenced.finditer(text)
    ]


def parameters() -> list[object]:
    return [
        pytest.param(
            block,
            id=f"line-{block.line}",
            marks=[
                *([pytest.mark.tensorflow] if "tensorflow" in block.code else []),
                *([pytest.mark.timeout(300)] if SCRIPT.match(block.code) else []),
            ],
        )
        for block in find_blocks(README)
    ]


SCRIPT = re.compile(r"# (\S+), for: asynchooks (launch .*)\n")


def check_launched(block: Block, name: str, command: str) -> None:
    """Run a block as a cluster: each line that the README shows is printed by that task."""
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


@pytest.mark.faults
@pytest.mark.parametrize("block", parameters())
def test_block_prints_what_the_readme_shows(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tensorflow", "distributed"):
        if module in block.code:
            pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    script = SCRIPT.match(block.code)
    if script is not None:
        check_launched(block, *script.groups())
        return

    # empty lines in front: an error then names the README's own line
    code = compile("\n" * (block.line - 1) + block.code, str(ROOT / "README.md"), "exec")
    printed = io.StringIO()
    # busy workers share the loop by time: without collections of what other tests have left, which
    # a reader's process has not, and which move the step at which a worker comes
    gc.collect()
    gc.freeze()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, {"__name__": "__main__"})
    finally:
        gc.unfreeze()

    if block.output is not None:
        assert printed.getvalue() == block.output


COMMANDS = re.findall(
    r"^```sh\n(asynchooks [^\n]*)\n```\n\n```text\n(.*?)^```\n", README, re.M | re.S
)


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[each[0][:19] for each in COMMANDS])
def test_command_prints_what_the_readme_shows(
    command: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    assert main(command.split()[1:]) == 0
    # the table fills its lines with spaces
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == output.splitlines()


def test_the_readme_shows_the_command_line() -> None:
    assert COMMANDS


def test_first_screen_holds_a_complete_example_with_its_output() -> None:
    first = find_blocks(README)[0]
    assert first.line < 40
    assert first.output is not None
    assert "tensorflow" not in first.code


@pytest.mark.parametrize("command", [QUICKSTART_COMMAND, TEST_COMMAND])
def test_command_line_is_one_line_of_the_readme(command: str) -> None:
    assert command in README.splitlines()


def test_ci_runs_the_readme_test_command() -> None:
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
