"""The quick tests on every supported version of Python that is installed here.

    python -m tests.python_versions
    python -m tests.python_versions --only 3.13 --environments ../environments -- tests/step -x
    python -m tests.python_versions --only 3.12 3.13 -- --eager-tasks tests/data

For each version it makes a virtual environment, installs the package with the extra "test" and
runs `python -m pytest` there, with the arguments after `--`. A requirement that cannot be
installed for a version (TensorFlow and uvloop come late to a new one) is left out and named; tests
that need it skip themselves. It prints a table, and exits with 1 if a version failed, or if none
was found, unless that is allowed. It installs no Python.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSIONS = ("3.11", "3.12", "3.13")
ROOT = Path(__file__).parents[1]


@dataclass
class Result:
    """How the tests went on one version."""

    version: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    secs: float = 0.0
    is_green: bool = False
    remarks: list[str] = field(default_factory=list)


def find_python(version: str) -> str | None:
    """The path of this version's interpreter: on PATH, or the newest that pyenv has installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    installed = sorted(pyenv.glob(f"{version}.*"), key=_numbers_of, reverse=True)
    on_path = shutil.which(f"python{version}")
    for each in filter(None, (on_path, *(str(place / "bin/python") for place in installed))):
        if _version_of(each) == version:  # a shim of pyenv fails if its version is not selected
            return each
    return None


def _numbers_of(place: Path) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", place.name)]


def _version_of(python: str) -> str | None:
    show = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        asked = subprocess.run([python, "-c", show], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def requirements(project: dict[str, Any], extra: str) -> list[str]:
    """The package's requirements and those of an extra, with the extras that it names."""
    found = dict.fromkeys(project["dependencies"])  # in order, each once
    waiting = [extra]
    seen = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for each in project["optional-dependencies"][name]:
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", each)
            if own:
                waiting += own[1].split(",")
            else:
                found[each] = None
    return list(found)


def chosen(wanted: list[str], names: list[str]) -> list[str]:
    """Those of the requirements that have one of the names.

    Raises:
        ValueError: a name is none of them.
    """
    by_name = {re.split(r"[\[<>=!~; ]", each)[0]: each for each in wanted}
    unknown = sorted(set(names) - set(by_name))
    if unknown:
        raise ValueError(f"{unknown} are no requirements of the tests; there are {sorted(by_name)}")
    return [by_name[each] for each in names]


def install(python: str, wanted: list[str]) -> list[str]:
    """Install the package and what it wants; returns what cannot be installed.

    Raises:
        subprocess.CalledProcessError: the package itself cannot be installed.
    """
    missing = []
    if not _installs(python, wanted):
        missing = [each for each in wanted if not _installs(python, [each])]
    subprocess.run([*_pip(python), "--no-deps", "-e", str(ROOT)], check=True)
    return missing


def _pip(python: str) -> list[str]:
    return [python, "-m", "pip", "install", "--quiet", "--prefer-binary"]


def _installs(python: str, wanted: Iterable[str]) -> bool:
    done = subprocess.run([*_pip(python), *wanted], capture_output=True, text=True)
    return done.returncode == 0


def run_tests(
    version: str, found: str, environment: Path, wanted: list[str], arguments: list[str]
) -> Result:
    """Make the environment, unless it is there, and run the tests in it.

    Those that fail run once more, alone: a deadline that the machine missed passes then.
    """
    result = Result(version)
    python = str(environment / "bin" / "python")
    try:
        if _version_of(python) != version:
            subprocess.run([found, "-m", "venv", "--clear", str(environment)], check=True)
        missing = install(python, wanted)
    except subprocess.CalledProcessError as error:
        result.remarks.append(f"no environment: {error}")
        return result
    result.remarks += [f"without {each}" for each in missing]
    counts = environment / "junit.xml"
    counts.unlink(missing_ok=True)
    begun = time.perf_counter()
    tests = [python, "-m", "pytest", "-q", "-o", f"cache_dir={environment / 'cache'}", *arguments]
    done = subprocess.run([*tests, f"--junitxml={counts}"], cwd=ROOT)
    if done.returncode == 1:
        again = ["-n", "0", "--last-failed", "--last-failed-no-failures", "none"]
        done = subprocess.run([*tests, *again], cwd=ROOT)
        if done.returncode == 0:
            result.remarks.append("what failed has passed alone")
    result.secs = time.perf_counter() - begun
    if counts.exists():
        count(result, counts)
    else:
        result.remarks.append(f"pytest ended with {done.returncode} and counted nothing")
    result.is_green = done.returncode == 0
    return result


def count(result: Result, junit: Path) -> None:
    """Add the counts of a file that pytest's `--junitxml` has written."""
    for suite in ET.parse(junit).getroot().iter("testsuite"):
        num = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        result.failed += num["failures"] + num["errors"]
        result.skipped += num["skipped"]
        result.passed += num["tests"] - num["failures"] - num["errors"] - num["skipped"]


def table(results: Iterable[Result]) -> str:
    """A line for each version."""
    lines = [f"{'Python':8}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"]
    for each in results:
        counts = f"{each.passed:8}{each.failed:8}{each.skipped:9}{each.secs:9.0f}"
        remarks = "; ".join([*([] if each.is_green else ["FAILED"]), *each.remarks])
        lines.append(f"{each.version:8}{counts}  {remarks}".rstrip())
    return "\n".join(lines)


def main() -> int:
    """Run the tests on each version; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.python_versions", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--only", choices=VERSIONS, nargs="+", default=VERSIONS, metavar="VERSION",
        help="of Python, to leave out the others",
    )  # fmt: skip
    parser.add_argument(
        "--environments", type=Path,
        help="a folder in which the environments are kept and reused; default: removed at the end",
    )  # fmt: skip
    parser.add_argument(
        "--requirements", nargs="+", metavar="NAME",
        help="what to install of all that the tests may need; default: everything",
    )  # fmt: skip
    parser.add_argument(
        "--may-be-missing", action="store_true", help="whether it is right if no version is found"
    )
    parser.add_argument("arguments", nargs="*", help="of pytest, after --")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = requirements(project, "test")
    if options.requirements:
        wanted = project["dependencies"] + chosen(wanted, options.requirements)
    results = []
    with tempfile.TemporaryDirectory() as removed:
        folder: Path = options.environments or Path(removed)
        for version in options.only:
            found = find_python(version)
            if found is None:
                print(f"Python {version} is not installed: left out", flush=True)
                continue
            print(f"\n== Python {version}: {found}", flush=True)
            environment = folder.absolute() / version
            results.append(run_tests(version, found, environment, wanted, options.arguments))
    if not results and options.may_be_missing:
        return 0
    print(f"\n{table(results)}")
    return 0 if results and all(each.is_green for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
