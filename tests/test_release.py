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
from collections.abc import Iterator, Mapping
from email import message_from_bytes
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import asynchooks

from .python_versions import ROOT, VERSIONS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CITATION = (ROOT / "CITATION.cff").read_text()
CONSUMER = Path(__file__).parent / "consumer" / "training.py"
CACHES = re.compile(
    r"__pycache__|\.py[co]$|\.(mypy|pytest|ruff)_cache|\.hypothesis|\.ipynb_checkpoints|_build/"
    r"|\.egg-info|\.coverage|events\.out\.tfevents|(^|/)\.git/|\.venv/"
)


def cited(key: str) -> str | None:
    """The text of a key at the top of CITATION.cff."""
    found = re.search(rf"^{key}: (.*)$", CITATION, flags=re.MULTILINE)
    return found and found[1]


def test_the_version_is_the_same_everywhere() -> None:
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert heading is not None
    newest = re.fullmatch(r"(\S+) \((unreleased|\d{4}-\d\d-\d\d)\)", heading[1])
    assert newest is not None, f"give {heading[1]!r} as in '0.1.0 (unreleased)', or with a date"
    assert newest[1] == cited("version") == asynchooks.__version__
    assert cited("date-released") == (None if newest[2] == "unreleased" else newest[2])
    assert "version" in PROJECT["dynamic"]


def test_the_licence_and_the_authors_are_the_same_everywhere() -> None:
    (author,) = PROJECT["authors"]
    assert f"  - name: {author['name']}\n" in CITATION
    assert cited("license") == PROJECT["license"]


def test_classifiers_name_the_versions_of_python_that_are_tested() -> None:
    named = [each.split(" :: ")[-1] for each in PROJECT["classifiers"] if ":: 3." in each]
    assert named == list(VERSIONS)
    assert PROJECT["requires-python"] == f">={VERSIONS[0]}"


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_requirements_of_an_extra_can_be_read_and_name_extras_that_exist(extra: str) -> None:
    found = [Requirement(each) for each in EXTRAS[extra]]
    assert found
    for each in found:
        if each.name == PROJECT["name"]:
            assert each.extras <= EXTRAS.keys()
        else:
            assert each.specifier or each.name == "pytest-anyio", "a lower bound"


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program, without the paths and settings of this process's own Python."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MYPY"))}
    return subprocess.run(
        command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=300, check=False
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with sdist and wheel; the wheel is built from the sdist."""
    for module in ("build", "hatchling"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; pip install 'asynchooks[test]'")
    made = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", made, ROOT)
    assert done.returncode == 0, said(done)
    return made


def test_relative_links_of_the_readme_lead_to_the_address_of_the_project(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("hatchling")
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    absolute = importlib.import_module("readme_links").absolute
    unchanged = "[e](https://f.example/g) [h](#i) `[j](k)`\n```python\na[0](b)\n```\n"
    assert absolute(f"[a](docs/a.md#b) ![c](d.png) {unchanged}", "https://host.example/us") == (
        "[a](https://host.example/us/blob/HEAD/docs/a.md#b) "
        f"![c](https://host.example/us/raw/HEAD/d.png) {unchanged}"
    )


def test_definitions_titles_and_badges_are_links_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hatchling")
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    absolute = importlib.import_module("readme_links").absolute
    text = (
        '[a](a.md "A title") [![b](b.svg)](b.md) [c](./c.md) ![d][d] [![e][e]][f] [g]\n\n'
        "[d]: d.png\n[e]: <e.svg>\n[f]: /f.md 'F'\n[g]: https://g.example\n[h]: #h\n[^i]: note\n"
    )
    page, file = "https://host.example/us/blob/HEAD", "https://host.example/us/raw/HEAD"
    assert absolute(text, "https://host.example/us") == (
        f'[a]({page}/a.md "A title") [![b]({file}/b.svg)]({page}/b.md) [c]({page}/c.md) '
        f"![d][d] [![e][e]][f] [g]\n\n[d]: {file}/d.png\n[e]: <{file}/e.svg>\n"
        f"[f]: {page}/f.md 'F'\n[g]: https://g.example\n[h]: #h\n[^i]: note\n"
    )


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
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, said(done)

    (path,) = tmp_path.glob("*.dist-info/METADATA")
    text = str(message_from_bytes(path.read_bytes()).get_payload())
    targets = re.findall(r'(?:href|src)="([^"]*)"', markdown.render(text))
    assert f"{address}/blob/HEAD/docs/tutorial/index.md" in targets
    assert [each for each in targets if not re.match("https?://|#", each)] == []
    for each in targets:
        if each.startswith(address):
            assert (ROOT / each.removeprefix(f"{address}/blob/HEAD/").partition("#")[0]).exists()


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Mapping[str, bytes]:
    """The files of the sdist, by their paths below its one directory."""
    (path,) = dist.glob("*.tar.gz")
    folder = f"asynchooks-{asynchooks.__version__}/"
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            assert member.name.startswith(folder)
            assert member.isfile(), f"{member.name} is no plain file"
            opened = archive.extractfile(member)
            assert opened is not None
            found[member.name.removeprefix(folder)] = opened.read()
    return found


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def about(wheel: Path) -> Message:
    """The metadata of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


@pytest.mark.faults
def test_the_sdist_has_what_is_needed_to_test_and_document_it(sdist: Mapping[str, bytes]) -> None:
    assert {name.split("/")[0] for name in sdist} == {
        ".ci", ".gitignore", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE",
        "PKG-INFO", "README.md", "SECURITY.md", "asynchooks", "docs", "examples", "pyproject.toml",
        "tests",
    }  # fmt: skip
    assert [name for name in sdist if CACHES.search(name)] == []
    for folder in ("asynchooks", "tests", "examples"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
        assert files <= sdist.keys()


@pytest.mark.faults
def test_the_wheel_has_the_package_alone(wheel: Path) -> None:
    information = f"asynchooks-{asynchooks.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entries = archive.read(f"{information}/entry_points.txt").decode()
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "asynchooks").rglob("*.py")}
    assert {each for each in names if each.startswith("asynchooks/")} == {
        *files, "asynchooks/py.typed",
    }  # fmt: skip
    assert {each.split("/")[0] for each in names} == {"asynchooks", information}
    assert f"{information}/licenses/LICENSE" in names
    assert "asynchooks = asynchooks.cli:main" in entries
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.faults
def test_the_metadata_are_those_of_the_project(about: Message) -> None:
    assert about["Version"] == asynchooks.__version__
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Author"] == "The asynchooks developers"
    assert about.get_all("Provides-Extra") == sorted(EXTRAS)
    assert about["Description-Content-Type"] == "text/markdown"
    assert str(about.get_payload()).startswith("# asynchooks\n")
    base = [each for each in about.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert sorted(Requirement(each).name for each in base) == ["anyio", "numpy"]


@pytest.mark.faults
def test_twine_finds_nothing_wrong(dist: Path) -> None:
    pytest.importorskip("twine")
    done = run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    assert done.returncode == 0, said(done)
    assert said(done).count("PASSED") == 2


def requirements(name: str, seen: set[str]) -> Iterator[metadata.Distribution]:
    """A distribution of this environment and all that it requires, without extras."""
    if name in seen:
        return
    seen.add(name)
    found = metadata.distribution(name)
    yield found
    for text in found.requires or ():
        required = Requirement(text)
        if required.marker is None or required.marker.evaluate({"extra": ""}):
            yield from requirements(required.name, seen)


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, anyio and NumPy, and nothing else.

    anyio and NumPy are links to this environment's own, so that nothing is downloaded.
    """
    environment = tmp_path_factory.mktemp("environment")
    done = run(sys.executable, "-m", "venv", "--without-pip", environment)
    assert done.returncode == 0, said(done)
    (packages,) = environment.glob("lib/python*/site-packages")
    seen: set[str] = set()
    for name in ("anyio", "numpy"):
        for each in requirements(name, seen):
            assert each.files is not None
            for top in {file.parts[0] for file in each.files} - {"..", "__pycache__"}:
                (packages / top).symlink_to(Path(str(each.locate_file(top))).resolve())
    done = run(
        sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install",
        "--no-index", "--disable-pip-version-check", wheel,
    )  # fmt: skip
    assert done.returncode == 0, said(done)
    return environment / "bin"


@pytest.mark.faults
def test_the_wheel_is_imported_and_its_command_runs(programs: Path, tmp_path: Path) -> None:
    code = "import asynchooks; print(asynchooks.__file__, asynchooks.__version__)"
    done = run(programs / "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, said(done)
    path, version = done.stdout.split()
    assert Path(path).is_relative_to(programs.parent)
    assert version == asynchooks.__version__
    done = run(programs / "asynchooks", "--help", cwd=tmp_path)
    assert done.returncode == 0, said(done)
    assert done.stdout.startswith("usage: asynchooks ")
    done = run(programs / "asynchooks", "simulate", "--updates", "9", "--json", cwd=tmp_path)
    assert done.returncode == 0, said(done)
    assert '"updates": 9' in done.stdout


@pytest.mark.faults
def test_a_program_trains_with_the_wheel_alone(programs: Path, tmp_path: Path) -> None:
    """No TensorFlow, trio, rich or Dask is there."""
    done = run(programs / "python", CONSUMER, tmp_path / "checkpoints", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"asynchooks {asynchooks.__version__}", "trained: 20 True", "simulated: 100",
    ]  # fmt: skip


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A copy outside of the checkout, whose settings and sources type checkers would find."""
    copy = tmp_path / "training.py"
    copy.write_text(CONSUMER.read_text())
    return copy


@pytest.mark.faults
def test_mypy_accepts_a_program_that_uses_the_wheel(programs: Path, program: Path) -> None:
    pytest.importorskip("mypy")
    done = run(
        sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=cache",
        "--python-executable", programs / "python", program, cwd=program.parent,
    )  # fmt: skip
    assert done.returncode == 0, said(done)


@pytest.mark.faults
def test_pyright_accepts_a_program_that_uses_the_wheel(programs: Path, program: Path) -> None:
    pytest.importorskip("pyright")
    pyright = sys.executable, "-m", "pyright"
    if run(*pyright, "--version").returncode != 0:
        pytest.skip("pyright does not start: it needs Node.js, or a network to get it from")
    (program.parent / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    done = run(*pyright, "--pythonpath", programs / "python", program, cwd=program.parent)
    assert done.returncode == 0, said(done)
