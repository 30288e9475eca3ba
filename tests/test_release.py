"""What is uploaded: one version everywhere, the files of sdist and wheel, a user of the wheel."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import asynchooks

from .python_versions import ROOT, VERSIONS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSUMER = Path(__file__).parent / "consumer" / "training.py"
CACHES = re.compile(
    r"__pycache__|\.py[co]$|\.(mypy|pytest|ruff)_cache|\.hypothesis|\.ipynb_checkpoints|_build/"
    r"|\.egg-info|\.coverage|events\.out\.tfevents|(^|/)\.git/|\.venv/"
)


def test_version_licence_and_author_are_the_same_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    cited = dict(re.findall(r"^([\w-]+): (.*)$", citation, flags=re.MULTILINE))
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert heading is not None
    newest = re.fullmatch(r"(\S+) \((unreleased|\d{4}-\d\d-\d\d)\)", heading[1])
    assert newest is not None, f"give {heading[1]!r} as in '0.1.0 (unreleased)', or with a date"
    assert newest[1] == cited["version"] == asynchooks.__version__
    assert cited.get("date-released", "unreleased") == newest[2]
    assert cited["license"] == PROJECT["license"]
    (author,) = PROJECT["authors"]
    assert f"  - name: {author['name']}\n" in citation


def test_classifiers_name_the_versions_of_python_that_are_tested() -> None:
    named = [each.split(" :: ")[-1] for each in PROJECT["classifiers"] if ":: 3." in each]
    assert named == list(VERSIONS)
    assert PROJECT["requires-python"] == f">={VERSIONS[0]}"


def test_the_requirements_of_the_extras_can_be_read_and_name_extras_that_exist() -> None:
    for each in (Requirement(text) for extra in EXTRAS.values() for text in extra):
        if each.name == PROJECT["name"]:
            assert each.extras <= EXTRAS.keys()
        else:
            assert each.specifier or each.name == "pytest-anyio", "a lower bound"


def run(*command: str | Path, cwd: Path | None = None, code: int = 0) -> str:
    """What a program says, without the paths and settings of this process's own Python."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MYPY"))}
    done = subprocess.run(
        command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.faults
def test_no_link_of_the_metadata_is_relative_once_the_project_has_an_address(
    tmp_path: Path,
) -> None:
    pytest.importorskip("hatchling")
    markdown = pytest.importorskip("markdown_it").MarkdownIt()
    for name in ("README.md", "LICENSE", ".ci/readme_links.py", "asynchooks/_version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    address = "https://host.example/us"
    unpublished, published = "# [project.urls]\n# Repository = ", "[project.urls]\nRepository = "
    settings = (ROOT / "pyproject.toml").read_text()
    assert unpublished in settings
    settings = settings.replace(f'{unpublished}"..."', f'{published}"{address}"')
    (tmp_path / "pyproject.toml").write_text(settings)
    code = "from hatchling.build import *; prepare_metadata_for_build_wheel('.')"
    run(sys.executable, "-c", code, cwd=tmp_path)
    (path,) = tmp_path.glob("*.dist-info/METADATA")
    text = str(message_from_bytes(path.read_bytes()).get_payload())
    targets = re.findall(r'(?:href|src)="([^"]*)"', markdown.render(text))
    assert f"{address}/blob/HEAD/docs/tutorial/index.md" in targets
    assert [each for each in targets if not re.match("https?://|#", each)] == []
    for each in targets:
        if each.startswith(address):
            assert (ROOT / each.removeprefix(f"{address}/blob/HEAD/").partition("#")[0]).exists()


def check_sdist(path: Path) -> None:
    """It has what is needed to test and to document the package, and no caches."""
    folder = f"asynchooks-{asynchooks.__version__}/"
    with tarfile.open(path) as archive:
        assert [each.name for each in archive if not each.isfile()] == []
        names = archive.getnames()
    assert all(name.startswith(folder) for name in names)
    found = {name.removeprefix(folder) for name in names}
    assert {name.split("/")[0] for name in found} == {
        ".ci", ".gitignore", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE",
        "PKG-INFO", "README.md", "SECURITY.md", "asynchooks", "docs", "examples", "pyproject.toml",
        "tests",
    }  # fmt: skip
    assert [name for name in found if CACHES.search(name)] == []
    for part in ("asynchooks", "tests", "examples"):
        assert {each.relative_to(ROOT).as_posix() for each in (ROOT / part).rglob("*.py")} <= found


def check_wheel(path: Path) -> None:
    """It has the package alone, and the metadata of the project."""
    information = f"asynchooks-{asynchooks.__version__}.dist-info"
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        entries = archive.read(f"{information}/entry_points.txt").decode()
        about = message_from_bytes(archive.read(f"{information}/METADATA"))
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "asynchooks").rglob("*.py")}
    ours = {each for each in names if each.startswith("asynchooks/")}
    assert ours == {*files, "asynchooks/py.typed"}
    assert {each.split("/")[0] for each in names} == {"asynchooks", information}
    assert f"{information}/licenses/LICENSE" in names
    assert "asynchooks = asynchooks.cli:main" in entries
    assert path.name.endswith("-py3-none-any.whl")

    assert about["Version"] == asynchooks.__version__
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Author"] == "The asynchooks developers"
    assert about.get_all("Provides-Extra") == sorted(EXTRAS)
    assert about["Description-Content-Type"] == "text/markdown"
    assert str(about.get_payload()).startswith("# asynchooks\n")
    base = [each for each in about.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert sorted(Requirement(each).name for each in base) == ["anyio", "numpy"]


def requirements(name: str, seen: set[str]) -> Iterator[metadata.Distribution]:
    """A distribution of this environment and all that it requires, without extras."""
    if name not in seen:
        seen.add(name)
        found = metadata.distribution(name)
        yield found
        for required in map(Requirement, found.requires or ()):
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                yield from requirements(required.name, seen)


def environment_with(wheel: Path, environment: Path) -> Path:
    """The programs of a new environment with the wheel, anyio and NumPy, and nothing else.

    anyio and NumPy are links to this environment's own, so that nothing is downloaded.
    """
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    seen: set[str] = set()
    for each in (*requirements("anyio", seen), *requirements("numpy", seen)):
        assert each.files is not None
        for top in {file.parts[0] for file in each.files} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(each.locate_file(top))).resolve())
    run(
        sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install",
        "--no-index", "--disable-pip-version-check", wheel,
    )  # fmt: skip
    return environment / "bin"


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_the_distributions_are_whole_and_a_user_of_the_wheel_trains_and_checks_types(
    tmp_path: Path,
) -> None:
    """One test, as two processes of tests would build them twice; the wheel is of the sdist."""
    for module in ("build", "hatchling", "twine"):
        pytest.importorskip(module)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", ROOT)
    sdist, wheel = sorted((tmp_path / "dist").iterdir(), key=lambda path: path.suffix)
    check_sdist(sdist)
    check_wheel(wheel)
    assert (
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel).count("PASSED") == 2
    )

    # no TensorFlow, trio, rich or Dask is there
    programs = environment_with(wheel, tmp_path / "environment")
    user = tmp_path / "user"  # outside of the checkout, whose settings type checkers would find
    user.mkdir()
    (user / "training.py").write_text(CONSUMER.read_text())
    code = "import asynchooks; print(asynchooks.__file__)"
    where = run(programs / "python", "-c", code, cwd=user)
    assert Path(where.strip()).is_relative_to(programs.parent)
    assert run(programs / "python", "training.py", "checkpoints", cwd=user) == (
        f"asynchooks {asynchooks.__version__}\ntrained: 20 True\nsimulated: 100\n"
    )
    command = (programs / "asynchooks", "simulate", "--updates", "9", "--json")
    assert '"updates": 9' in run(*command, cwd=user)

    (user / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    for checker, options in (
        ("mypy", "--strict --config-file= --cache-dir=cache --python-executable"),
        ("pyright", "--pythonpath"),
    ):
        checks = [sys.executable, "-m", checker]
        # pyright needs Node.js, or a network to get it from
        if subprocess.run([*checks, "--version"], capture_output=True).returncode == 0:
            run(*checks, *options.split(), programs / "python", "training.py", cwd=user)
