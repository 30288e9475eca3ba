"""The quick tests on every supported version of Python that is installed here.

    python -m tests.python_versions
    python -m tests.python_versions --only 3.12 3.13 -- --eager-tasks tests/data

For each version it makes a virtual environment, installs the package with the extra "test" and
runs `python -m pytest` there, with the arguments after `--`. With `--requirements` these alone are
installed; tests that need others skip themselves. It exits with 1 if a version failed, or if none
was found, unless that is allowed. It installs no Python.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

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


def run_tests(found: str, environment: Path, wanted: list[str], arguments: list[str]) -> str:
    """Make the environment and run the tests in it; what came of it begins with "green" or not.

    Those that fail run once more, alone: a deadline that the machine missed passes then.
    """
    python = str(environment / "bin" / "python")
    subprocess.run([found, "-m", "venv", str(environment)], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--prefer-binary", *wanted]
    subprocess.run(pip, cwd=ROOT, check=True)
    tests = [python, "-m", "pytest", "-q", "-o", f"cache_dir={environment / 'cache'}", *arguments]
    again = ["-n", "0", "--last-failed", "--last-failed-no-failures", "none"]
    remark, code = "", subprocess.run(tests, cwd=ROOT).returncode
    if code == 1:
        remark = "; some failed at first"
        code = subprocess.run([*tests, *again], cwd=ROOT).returncode
    return ("green" if code == 0 else f"FAILED with {code}") + remark


def main() -> int:
    """Run the tests on each version; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.python_versions")
    add = parser.add_argument
    add("--only", choices=VERSIONS, nargs="+", default=VERSIONS, help="leave out the others")
    add("--requirements", nargs="+", metavar="NAME", help="install these alone")
    add("--may-be-missing", action="store_true", help="it is right if no version is found")
    add("arguments", nargs="*", help="of pytest, after --")
    options = parser.parse_args()
    wanted = ["-e", ".[test]"]
    if options.requirements:
        wanted = ["-e", ".", *options.requirements]
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
