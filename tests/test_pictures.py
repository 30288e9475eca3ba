"""The pictures of the site are those that docs/pictures/draw.py draws."""

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_each_picture_is_what_its_code_draws_and_stands_on_a_page_with_words_for_it(
    tmp_path: Path,
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    runpy.run_path(str(PICTURES / "draw.py"))["draw"](tmp_path)
    pages = [path.read_text(encoding="utf-8") for path in PICTURES.parent.rglob("*.md")]
    committed = {path.name: path.read_bytes() for path in PICTURES.glob("*.svg")}
    assert {path.name for path in tmp_path.glob("*.svg")} == committed.keys() != set()
    for name, svg in committed.items():
        drawn = (tmp_path / name).read_bytes()
        assert len(svg) <= 60_000
        assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
        by = re.search(rb"Matplotlib v([0-9.]+[0-9])", svg)
        # plots of another version may differ in a few bytes
        if by is None or by[1].decode() == matplotlib.__version__:
            assert drawn == svg, f"{name}: draw it anew: python docs/pictures/draw.py"
        shown = [found for page in pages for found in re.findall(rf"!\[(.*?)\]\(\S*{name}\)", page)]
        assert shown, name
        assert all(len(words) > 40 for words in shown)
