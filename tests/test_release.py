"""What is uploaded: one version everywhere, the files of sdist and wheel, a user of the wheel."""

from __future__ import annotations

import importlib
import importlib.util
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
from typing import NamedTuple

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


def test_relative_links_of_the_readme_lead_to_the_address_of_the_project(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("hatchling")
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    absolute = importlib.import_module("readme_links").absolute
    unchanged = "[e](https://f.example/g) [h](#i) `[j](k)`\n```python\na[0](b)\n```\n"
    text = (
        '[a](a.md "A title") [![b](b.svg)](b.md) [c](./c.md#d) ![d][d] [![e][e]][f] [g]\n\n'
        "[d]: d.png\n[e]: <e.svg>\n[f]: /f.md 'F'\n[g]: https://g.example\n[h]: #h\n[^i]: note\n"
    )
    page, file = "https://host.example/us/blob/HEAD", "https://host.example/us/raw/HEAD"
    assert absolute(text + unchanged, "https://host.example/us") == (
        f'[a]({page}/a.md "A title") [![b]({file}/b.svg)]({page}/b.md) [c]({page}/c.md#d) '
        f"![d][d] [![e][e]][f] [g]\n\n[d]: {file}/d.png\n[e]: <{file}/e.svg>\n"
        f"[f]: {page}/f.md 'F'\n[g]: https://g.example\n[h]: #h\n[^i]: note\n{unchanged}"
    )


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


class Dist(NamedTuple):
    """The distributions; the wheel is built from the sdist."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Dist:
    for module in ("build", "hatchling"):
        pytest.importorskip(module)
    made = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", made, ROOT)
    (sdist,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    return Dist(sdist, wheel)


@pytest.mark.faults
def test_the_sdist_has_what_is_needed_to_test_and_document_it(dist: Dist) -> None:
    folder = f"asynchooks-{asynchooks.__version__}/"
    with tarfile.open(dist.sdist) as archive:
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


@pytest.mark.faults
def test_the_wheel_has_the_package_alone_and_the_metadata_of_the_project(dist: Dist) -> None:
    information = f"asynchooks-{asynchooks.__version__}.dist-info"
    with zipfile.ZipFile(dist.wheel) as archive:
        names = set(archive.namelist())
        entries = archive.read(f"{information}/entry_points.txt").decode()
        about = message_from_bytes(archive.read(f"{information}/METADATA"))
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "asynchooks").rglob("*.py")}
    ours = {each for each in names if each.startswith("asynchooks/")}
    assert ours == {*files, "asynchooks/py.typed"}
    assert {each.split("/")[0] for each in names} == {"asynchooks", information}
    assert f"{information}/licenses/LICENSE" in names
    assert "asynchooks = asynchooks.cli:main" in entries
    assert dist.wheel.name.endswith("-py3-none-any.whl")

    assert about["Version"] == asynchooks.__version__
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Author"] == "The asynchooks developers"
    assert about.get_all("Provides-Extra") == sorted(EXTRAS)
    assert about["Description-Content-Type"] == "text/markdown"
    assert str(about.get_payload()).startswith("# asynchooks\n")
    base = [each for each in about.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert sorted(Requirement(each).name for each in base) == ["anyio", "numpy"]


@pytest.mark.faults
def test_twine_finds_nothing_wrong(dist: Dist) -> None:
    pytest.importorskip("twine")
    assert run(sys.executable, "-m", "twine", "check", "--strict", *dist).count("PASSED") == 2


def requirements(name: str, seen: set[str]) -> Iterator[metadata.Distribution]:
    """A distribution of this environment and all that it requires, without extras."""
    if name not in seen:
        seen.add(name)
        found = metadata.distribution(name)
        yield found
        for required in map(Requirement, found.requires or ()):
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                yield from requirements(required.name, seen)


@pytest.fixture(scope="module")
def programs(dist: Dist, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, anyio and NumPy, and nothing else.

    anyio and NumPy are links to this environment's own, so that nothing is downloaded.
    """
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    seen: set[str] = set()
    for each in (*requirements("anyio", seen), *requirements("numpy", seen)):
        assert each.files is not None
        for top in {file.parts[0] for file in each.files} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(each.locate_file(top))).resolve())
    run(
        sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install",
        "--no-index", "--disable-pip-version-check", dist.wheel,
    )  # fmt: skip
    return environment / "bin"


@pytest.mark.faults
def test_a_program_trains_with_the_wheel_alone_and_its_command_runs(
    programs: Path, tmp_path: Path
) -> None:
    """No TensorFlow, trio, rich or Dask is there."""
    code = "import asynchooks; print(asynchooks.__file__)"
    where = run(programs / "python", "-c", code, cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(programs.parent)
    assert run(programs / "python", CONSUMER, tmp_path / "checkpoints", cwd=tmp_path) == (
        f"asynchooks {asynchooks.__version__}\ntrained: 20 True\nsimulated: 100\n"
    )
    command = (programs / "asynchooks", "simulate", "--updates", "9", "--json")
    assert '"updates": 9' in run(*command, cwd=tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_accepts_a_program_that_uses_the_wheel(
    programs: Path, tmp_path: Path, checker: str
) -> None:
    """Outside of the checkout, whose settings and sources type checkers would find."""
    pytest.importorskip(checker)
    (tmp_path / "training.py").write_text(CONSUMER.read_text())
    command = (sys.executable, "-m", checker)
    if checker == "mypy":
        options = "--strict --config-file= --cache-dir=cache --python-executable"
    else:
        if subprocess.run([*command, "--version"], capture_output=True).returncode != 0:
            pytest.skip("pyright does not start: it needs Node.js, or a network to get it from")
        (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
        options = "--pythonpath"
    run(*command, *options.split(), programs / "python", "training.py", cwd=tmp_path)
