"""`tests.python_versions` installs what the extras name, and reports what pytest counted."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from .python_versions import ROOT, Result, chosen, count, find_python, requirements, table

JUNIT = """<testsuites>
<testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" time="5.5"></testsuite>
</testsuites>"""


def test_extras_that_an_extra_names_are_followed() -> None:
    project = {
        "name": "us",
        "dependencies": ["a>=1"],
        "optional-dependencies": {"test": ["us[x,y]", "b"], "x": ["c"], "y": ["us[x]", "d"]},
    }
    assert sorted(requirements(project, "test")) == ["a>=1", "b", "c", "d"]


def test_every_requirement_of_the_tests_is_a_distribution_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = requirements(project, "test")
    assert {"anyio", "pytest", "trio"} <= {each.partition(">")[0] for each in found}
    assert not [each for each in found if each.startswith("asynchooks")]


def test_requirements_are_chosen_by_name_and_an_unknown_name_is_refused() -> None:
    wanted = ["moto[s3,server]>=5.1", "trio>=0.31", "uvloop>=0.21; sys_platform != 'win32'"]
    assert chosen(wanted, ["uvloop", "moto"]) == [wanted[2], wanted[0]]
    with pytest.raises(ValueError, match=r"\['triou'\] are no requirements"):
        chosen(wanted, ["triou"])


@pytest.mark.faults
def test_the_running_version_is_found_and_an_unknown_one_is_not() -> None:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert find_python("3.99") is None
    found = find_python(running)
    if found is None:
        pytest.skip(f"python{running} is neither on PATH nor under pyenv")
    assert Path(found).name.startswith("python")


def test_the_table_has_what_was_counted_and_names_what_failed(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    result = Result("3.12", secs=5.5, remarks=["without tensorflow>=2.16"])
    count(result, tmp_path / "junit.xml")
    assert (result.passed, result.failed, result.skipped) == (4, 3, 3)
    heading, line = table([result]).splitlines()
    assert heading.split() == ["Python", "passed", "failed", "skipped", "seconds"]
    assert line.split()[:5] == ["3.12", "4", "3", "3", "6"]
    assert line.endswith("FAILED; without tensorflow>=2.16")
