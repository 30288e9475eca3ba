"""The README's shape: short, with an example on its first screen, and CI's own command lines.

Its code, links and words are tested with those of the other pages, in test_pages.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .test_pages import BLOCK, TARGET, prose

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_WORDS = 1200
FIRST_SCREEN = 60  # lines, from the top to the end of the first example's output
QUICKSTART_COMMAND = (
    "python3 -m venv .venv && .venv/bin/pip install '.[examples]' && "
    ".venv/bin/python examples/quickstart.py"
)
TEST_COMMAND = (
    "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest -n 2"
)


def test_readme_is_short() -> None:
    assert len(README.split()) <= MAX_WORDS


def test_first_screen_holds_a_complete_example_with_its_output() -> None:
    found = BLOCK.search(README)
    assert found is not None
    assert found[2] is not None
    assert README.count("\n", 0, found.end()) <= FIRST_SCREEN


def test_each_link_has_a_target_in_the_list_at_the_end() -> None:
    text = prose(README)
    used = re.findall(r"\[([^\]]+)\](?:\[([^\]]+)\])?", TARGET.sub("", text))
    defined = re.findall(r"^\[([^\]]+)\]: ", text, re.M)
    assert {" ".join((label or shown).lower().split()) for shown, label in used} == {
        each.lower() for each in defined
    }


@pytest.mark.parametrize("command", [QUICKSTART_COMMAND, TEST_COMMAND])
def test_command_line_is_one_line_of_the_readme(command: str) -> None:
    assert command in README.splitlines()


def test_ci_runs_the_readme_test_command() -> None:
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
