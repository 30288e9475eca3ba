"""The pictures of the site are those that docs/pictures/draw.py draws."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
MOST_BYTES = 60_000

matplotlib = pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pictures")
    load_draw().draw(directory)
    return directory


def load_draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_pictures", PICTURES / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.svg"))


def is_of_another_matplotlib(svg: str) -> bool:
    """Whether it was drawn by a version whose plots may differ in a few bytes."""
    found = re.search(r"Matplotlib v([0-9.]+[0-9])", svg)
    return found is not None and found[1] != matplotlib.__version__


def test_each_picture_is_drawn_and_no_other_is_there(drawn: Path) -> None:
    assert names_in(drawn) == names_in(PICTURES)


@pytest.mark.parametrize("name", names_in(PICTURES))
def test_a_picture_is_what_its_code_draws(drawn: Path, name: str) -> None:
    committed = (PICTURES / name).read_bytes()
    assert len(committed) <= MOST_BYTES
    root = ElementTree.fromstring((drawn / name).read_bytes())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    if not is_of_another_matplotlib(committed.decode()):
        assert (drawn / name).read_bytes() == committed, (
            "draw it anew, look at it, and commit it: python docs/pictures/draw.py"
        )


@pytest.mark.parametrize("name", names_in(PICTURES))
def test_a_picture_stands_on_a_page_with_words_for_it(name: str) -> None:
    pages = [path.read_text(encoding="utf-8") for path in PICTURES.parent.rglob("*.md")]
    shown = [found for page in pages for found in re.findall(rf"!\[(.*?)\]\(\S*{name}\)", page)]
    assert shown
    assert all(len(words) > 40 for words in shown)
