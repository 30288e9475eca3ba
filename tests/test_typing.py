"""Users' programs under `mypy --strict`: what is documented passes, and mistakes are refused."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("typed.txt")


def expected() -> list[tuple[int, str]]:
    """(line, mypy's code) of all that must be refused."""
    lines = enumerate(PROGRAM.read_text().splitlines(), 1)
    marks = ((number, re.search(r"# refused: (\S+)$", line)) for number, line in lines)
    return [(number, mark[1]) for number, mark in marks if mark is not None]


@pytest.mark.exhaustive
def test_strict_types_accept_what_is_documented_and_refuse_mistakes(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    api = pytest.importorskip("mypy.api")
    cache = getattr(pytestconfig, "cache", None)  # None with `-p no:cacheprovider`
    program = tmp_path / "typed.py"
    program.write_text(PROGRAM.read_text())
    monkeypatch.chdir(ROOT)  # and the package beside the tests, not another one
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    said, errors, _ = api.run(
        [
            "--strict",
            "--no-error-summary",
            "--no-pretty",
            "--hide-error-context",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            "--cache-dir",
            str(cache.mkdir("mypy") if cache else tmp_path / "mypy"),
            str(program),
        ]
    )
    assert errors == ""
    found = re.findall(r"^(\S+):(\d+): error: .*\[([\w-]+)\]$", said, flags=re.MULTILINE)
    assert [(int(line), code) for _, line, code in found] == expected(), said
    assert {Path(path).name for path, _, _ in found} == {program.name}
