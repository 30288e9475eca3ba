"""Imports point down, and `import asynchooks` loads neither TensorFlow nor trio."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import asynchooks

PACKAGE = Path(asynchooks.__file__).parent

ROW = re.compile(r"    (\S+(?: \S+)*)  +\S")
LINES = [ROW.match(line) for line in (asynchooks.__doc__ or "").splitlines()]
ROOMS = [room for line in LINES if line for room in line[1].split()]
"""From the top to the bottom, as the package's own docstring has them."""
FILES = sorted(PACKAGE.rglob("*.py"))
FOREIGN = {
    "tensorflow": ["tf"],
    "dask": ["distributed"],
    "distributed": ["distributed"],
    "asyncio": ["_engine/real_time.py", "simulation/kernel", "distributed"],
    "trio": ["_engine/real_time.py", "simulation/kernel", "distributed"],
    "anyio": [
        "_engine/real_time.py", "_engine/current.py", "simulation/kernel",
        "adapters",
    ],
    "time": [
        "_engine/real_time.py", "_engine/current.py", "simulation/kernel/_interpreter.py",
        "_tracing/_opentelemetry.py", "_tracing/_recorder.py",  # processor time
        "metrics/_event_files.py", "metrics/_outlet.py",
        "metrics/_tensorboard.py", "planning/_child.py",  # of a child alone
        "planning/_record.py",  # processor time
    ],
}  # fmt: skip
"""Where other libraries may be imported: event loops and clocks behind the engine alone."""


def room_of(module: str) -> str:
    """The file or folder at the top of the package that a module is in."""
    return module.split(".")[1] if "." in module else "__init__"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """The modules of asynchooks that a file imports anywhere in it, for types, too."""
    package = path.relative_to(PACKAGE.parent).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join(package[: len(package) - node.level + 1])
            module = f"{base}.{node.module}" if node.module else base
            names = {f"{module}.{each.name}" for each in node.names}
            found |= {name if name in MODULES else module for name in names}
    return found - {module_of(path)}


def foreign(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_the_map_of_the_package_names_every_room_once() -> None:
    assert sorted(ROOMS) == sorted({room_of(module) for module in MODULES} - {"__init__"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = room_of(module_of(path))
    if here == "__init__":
        return
    for there in map(room_of, imports(path)):
        if there != here:
            assert ROOMS.index(there) > ROOMS.index(here), f"{there} is not below {here}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = {module: imports(path) for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which says the way


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_other_libraries_are_imported_in_their_places_only(path: Path) -> None:
    here = path.relative_to(PACKAGE).as_posix()
    for name in foreign(path) & FOREIGN.keys():
        assert here.startswith(tuple(FOREIGN[name])), f"{here} imports {name}"


@pytest.mark.faults
@pytest.mark.parametrize(
    "module", ["asynchooks", "asynchooks.testing", "asynchooks.hooks", "asynchooks.distributed"]
)
def test_importing_loads_neither_tensorflow_nor_trio_nor_numpy(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print({'tensorflow', 'trio', 'numpy', 'tensorboard', 'distributed'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


PACKAGES = [
    "checkpoints", "data", "distributed", "hooks", "metrics", "planning", "protocols", "simulation",
    "testing",
]  # fmt: skip


@pytest.mark.faults
@pytest.mark.parametrize("package", PACKAGES)
def test_a_public_package_is_an_attribute_that_loads_neither_tensorflow_nor_trio(
    package: str,
) -> None:
    code = (
        "import sys, asynchooks; "
        f"print('asynchooks.{package}' in sys.modules or asynchooks.{package}.__name__); "
        "print({'tensorflow', 'trio', 'tensorboard', 'distributed'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, loaded = done.stdout.split(maxsplit=1)
    assert name in ("True", f"asynchooks.{package}")
    assert loaded.strip() == "set()"


@pytest.mark.parametrize("package", PACKAGES)
def test_dir_of_a_public_package_shows_its_public_names(package: str) -> None:
    module = importlib.import_module(f"asynchooks.{package}")
    assert dir(module) == sorted(module.__all__)
    assert getattr(asynchooks, package) is module


def test_dir_of_asynchooks_shows_what_is_public() -> None:
    assert not [name for name in dir(asynchooks) if name.startswith("_")]
    assert {*asynchooks.__all__, *PACKAGES, "tf", "ChiefSessionCreator"} < set(dir(asynchooks))
    assert "TYPE_CHECKING" not in dir(asynchooks)


@pytest.mark.tensorflow
def test_the_package_for_tensorflow_is_an_attribute_too() -> None:
    pytest.importorskip("tensorflow")
    assert dir(asynchooks.tf) == sorted(asynchooks.tf.__all__)


def test_every_public_name_is_there_and_documented() -> None:
    for name in asynchooks.__all__:
        if name != "ChiefSessionCreator":  # needs TensorFlow
            assert getattr(asynchooks, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        asynchooks.Nonsense  # type: ignore[attr-defined]  # noqa: B018
