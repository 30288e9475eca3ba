"""The README's shape: short, with an example on its first screen, and CI's own command lines.

Its code, links and words are tested with those of the other pages, in test_pages.py.
"""

from __future__ import annotations

import re

from .support.examples import ROOT
from .test_pages import BLOCK, TARGET, prose

README = (ROOT / "README.md").read_text(encoding="utf-8")
SET_UP = "python3 -m venv .venv && .venv/bin/pip install"


def test_readme_is_short_and_its_first_screen_holds_a_complete_example() -> None:
    assert len(README.split()) <= 1200
    example = BLOCK.search(README)
    assert example is not None
    assert example[2] is not None
    assert README.count("\n", 0, example.end()) <= 60  # to the end of its output


def test_each_link_has_a_target_in_the_list_at_the_end() -> None:
    text = prose(README)
    used = re.findall(r"\[([^\]]+)\](?:\[([^\]]+)\])?", TARGET.sub("", text))
    defined = re.findall(r"^\[([^\]]+)\]: ", text, re.M)
    assert {" ".join((label or shown).lower().split()) for shown, label in used} == {
        each.lower() for each in defined
    }


def test_the_quickstart_and_the_tests_are_one_line_each_and_ci_runs_that_of_the_tests() -> None:
    tests = f"{SET_UP} -e '.[test]' && .venv/bin/python -m pytest -n 2"
    quickstart = f"{SET_UP} '.[examples]' && .venv/bin/python examples/quickstart.py"
    assert {tests, quickstart} <= set(README.splitlines())
    assert tests in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
