"""The pictures of the site are those that docs/pictures/draw.py draws."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
NAMES = sorted(path.name for path in PICTURES.glob("*.svg"))

matplotlib = pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pictures")
    runpy.run_path(str(PICTURES / "draw.py"))["draw"](directory)
    return directory


def is_of_another_matplotlib(svg: str) -> bool:
    """Whether it was drawn by a version whose plots may differ in a few bytes."""
    found = re.search(r"Matplotlib v([0-9.]+[0-9])", svg)
    return found is not None and found[1] != matplotlib.__version__


def test_each_picture_is_drawn_and_no_other_is_there(drawn: Path) -> None:
    assert sorted(path.name for path in drawn.glob("*.svg")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_what_its_code_draws_and_stands_on_a_page_with_words_for_it(
    drawn: Path, name: str
) -> None:
    committed = (PICTURES / name).read_bytes()
    assert len(committed) <= 60_000
    root = ElementTree.fromstring((drawn / name).read_bytes())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    if not is_of_another_matplotlib(committed.decode()):
        assert (drawn / name).read_bytes() == committed, (
            "draw it anew, look at it, and commit it: python docs/pictures/draw.py"
        )
    pages = [path.read_text(encoding="utf-8") for path in PICTURES.parent.rglob("*.md")]
    shown = [found for page in pages for found in re.findall(rf"!\[(.*?)\]\(\S*{name}\)", page)]
    assert shown
    assert all(len(words) > 40 for words in shown)
