"""`llms.txt` and `llms-full.txt`, which the build of the site writes for programs that read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXTENSIONS = Path(__file__).parents[1] / "docs" / "_extensions"
INDEX = """\
<!-- needs: nothing -->
# The library

It trains.

```{toctree}
guides/index
changes
```
"""
GUIDES = """\
# Guides

How to do things.

```{toctree}
first
notebook
api
```
"""
FIRST = """\
# The first guide

Call {py:func}`sample.add` with
two numbers. It is [short](index.md).

```python
add(1, 2)
```
"""
API = """\
# Functions

All of them.

```{eval-rst}
.. autofunction:: sample.add
```
"""
MODULE = '''\
def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b
'''
NOTEBOOK = {
    "cells": [
        {
            "cell_type": "markdown", "id": "text", "metadata": {},
            "source": ["# A notebook\n", "\n", "It adds."],
        },
        {
            "cell_type": "code", "id": "code", "metadata": {}, "source": ["add(3, 4)"],
            "outputs": [], "execution_count": None,
        },
    ],
    "metadata": {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    },
    "nbformat": 4,
    "nbformat_minor": 5,
}  # fmt: skip
CONF = """\
project = "sample"
extensions = ["myst_nb", "sphinx.ext.autodoc", "llms"]
nb_execution_mode = "off"
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_nb")
    source = tmp_path_factory.mktemp("source")
    (source / "guides").mkdir()
    for name, text in {
        "conf.py": CONF, "sample.py": MODULE, "index.md": INDEX,
        "changes.md": "# Changes\n\n- None so far\n",
        "guides/index.md": GUIDES, "guides/first.md": FIRST, "guides/api.md": API,
        "guides/notebook.ipynb": json.dumps(NOTEBOOK),
    }.items():  # fmt: skip
        (source / name).write_text(text)
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "-n", "-q", source, built],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(EXTENSIONS), str(source)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return built


@pytest.mark.faults
def test_all_pages_are_listed_with_their_first_sentences(site: Path) -> None:
    assert (
        (site / "llms.txt").read_text()
        == """\
# sample

> It trains.

The text of all pages in one file: [llms-full.txt](llms-full.txt)

## Guides

- [Guides](_sources/guides/index.md.txt): How to do things.
- [The first guide](_sources/guides/first.md.txt): Call sample.add() with two numbers. It is short.
- [A notebook](guides/notebook.html): It adds.
- [Functions](guides/api.html): All of them.

## More

- [Changes](_sources/changes.md.txt)
"""
    )


@pytest.mark.faults
def test_every_link_leads_to_a_file(site: Path) -> None:
    links = [line.split("](")[1].split(")")[0] for line in _lines(site) if "](" in line]
    assert len(links) == 6
    assert [each for each in links if not (site / each).is_file()] == []


def _lines(site: Path) -> list[str]:
    return (site / "llms.txt").read_text().splitlines()


@pytest.mark.faults
def test_the_text_of_all_pages_is_in_one_file(site: Path) -> None:
    full = (site / "llms-full.txt").read_text()
    parts = [
        "# The library\n\nIt trains.\n\n# Guides\n\nHow to do things.\n\n# The first guide\n",
        "Call `sample.add` with\ntwo numbers.",
        "```python\nadd(1, 2)\n```\n\n# A notebook\n\nIt adds.\n\n```python\nadd(3, 4)\n```\n\n",
        "Functions\n",
        "sample.add(a: int, b: int = 2) -> int\n\n   Add two numbers.\n",
        "# Changes\n",
    ]
    places = [full.find(each) for each in parts]
    assert -1 not in places, full
    assert places == sorted(places)
    assert "toctree" not in full
