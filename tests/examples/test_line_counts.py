"""The lines of the two asynchronous learners, as the page that compares them says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.code_lines import num_code_lines

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "explanation" / "asynchronous-rl.md"
ROW = re.compile(r"^\| \[`(async_\w+\.py)`\]\(\S+\).*\| (\d+) \| (\d+) \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


def test_the_page_counts_the_lines_of_both_learners() -> None:
    assert [name for name, *_ in ROWS] == ["async_grpo.py", "async_grpo_by_hand.py"]


@pytest.mark.parametrize(("name", "num_lines", "num_code"), ROWS)
def test_a_learner_has_as_many_lines_as_the_page_says(
    name: str, num_lines: str, num_code: str
) -> None:
    file = ROOT / "examples" / name
    text = file.read_text(encoding="utf-8")
    assert (len(text.splitlines()), num_code_lines(file)) == (int(num_lines), int(num_code))
