"""The quick tests on every supported version of Python that is installed here.

    python -m tests.python_versions
    python -m tests.python_versions --only 3.12 3.13 -- --eager-tasks tests/data

For each version it makes a virtual environment, installs the package with the extra "test" and
runs `python -m pytest` there, with the arguments after `--`. A requirement that cannot be
installed for a version (TensorFlow and uvloop come late to a new one) is left out and named; tests
that need it skip themselves. It exits with 1 if a version failed, or if none was found, unless
that is allowed. It installs no Python.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

VERSIONS = ("3.11", "3.12", "3.13")
ROOT = Path(__file__).parents[1]


def find_python(version: str) -> str | None:
    """The path of this version's interpreter: on PATH, or the newest that pyenv has installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    installed = sorted(
        pyenv.glob(f"{version}.*"), key=lambda place: [*map(int, re.findall(r"\d+", place.name))]
    )
    on_path = shutil.which(f"python{version}")
    for each in (on_path, *(str(place / "bin/python") for place in reversed(installed))):
        # a shim of pyenv fails if its version is not selected
        if each is not None and subprocess.run([each, "-V"], capture_output=True).returncode == 0:
            return each
    return None


def requirements(project: dict[str, Any], extra: str) -> list[str]:
    """The package's requirements and those of an extra, with the extras that it names."""
    found, waiting = list(project["dependencies"]), [extra]
    for name in waiting:  # which grows meanwhile
        for each in project["optional-dependencies"][name]:
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", each)
            if own is None:
                found.append(each)
            else:
                waiting += [more for more in own[1].split(",") if more not in waiting]
    return list(dict.fromkeys(found))


def run_tests(found: str, environment: Path, wanted: list[str], arguments: list[str]) -> str:
    """Make the environment and run the tests in it; what came of it begins with "green" or not.

    Those that fail run once more, alone: a deadline that the machine missed passes then.
    """
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--prefer-binary"]

    def installs(*each: str) -> bool:
        return subprocess.run([*pip, *each], capture_output=True).returncode == 0

    subprocess.run([found, "-m", "venv", str(environment)], check=True)
    missing = [] if installs(*wanted) else [each for each in wanted if not installs(each)]
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    tests = [python, "-m", "pytest", "-q", "-o", f"cache_dir={environment / 'cache'}", *arguments]
    again = ["-n", "0", "--last-failed", "--last-failed-no-failures", "none"]
    remarks = [f"without {each}" for each in missing]
    code = subprocess.run(tests, cwd=ROOT).returncode
    if code == 1:
        remarks.append("some failed at first")
        code = subprocess.run([*tests, *again], cwd=ROOT).returncode
    return "; ".join(["green" if code == 0 else f"FAILED with {code}", *remarks])


def main() -> int:
    """Run the tests on each version; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.python_versions")
    add = parser.add_argument
    add("--only", choices=VERSIONS, nargs="+", default=VERSIONS, help="leave out the others")
    add("--requirements", nargs="+", metavar="NAME", help="install these alone")
    add("--may-be-missing", action="store_true", help="it is right if no version is found")
    add("arguments", nargs="*", help="of pytest, after --")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = requirements(project, "test")
    if options.requirements:
        by_name = {re.split(r"[\[<>=!~; ]", each)[0]: each for each in wanted}
        wanted = project["dependencies"] + [by_name[name] for name in options.requirements]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for version in options.only:
            found = find_python(version)
            print(f"== Python {version}: {found or 'not installed, left out'}", flush=True)
            if found is not None:
                environment = Path(folder) / version
                results[version] = run_tests(found, environment, wanted, options.arguments)
    for version, result in results.items():
        print(f"Python {version}: {result}")
    is_green = all(result.startswith("green") for result in results.values())
    return 0 if is_green and (results or options.may_be_missing) else 1


if __name__ == "__main__":
    sys.exit(main())
