"""`tests.python_versions` installs what the extras name, on the interpreters that are there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .python_versions import chosen, find_python, requirements


def test_extras_that_an_extra_names_are_followed() -> None:
    project = {
        "name": "us",
        "dependencies": ["a>=1"],
        "optional-dependencies": {"test": ["us[x,y]", "b"], "x": ["c"], "y": ["us[x]", "d"]},
    }
    assert sorted(requirements(project, "test")) == ["a>=1", "b", "c", "d"]


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
