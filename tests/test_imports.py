"""Imports point down, and `import asynchooks` loads neither TensorFlow nor trio."""

import ast
import importlib
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import asynchooks

PACKAGE = Path(asynchooks.__file__).parent

ROW = re.compile(r"    (\S+(?: \S+)*)  +\S")
LINES = [ROW.match(line) for line in (asynchooks.__doc__ or "").splitlines()]
ROOMS = [room for line in LINES if line for room in line[1].split()]
"""From the top to the bottom, as the package's own docstring has them."""
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


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def imports(path: Path) -> set[str]:
    """The modules of asynchooks that a file imports anywhere in it, for types, too."""
    package = path.relative_to(PACKAGE.parent).parts[:-1]
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join(package[: len(package) - node.level + 1])
            module = f"{base}.{node.module}" if node.module else base
            names = {f"{module}.{each.name}" for each in node.names}
            found |= {name if name in MODULES else module for name in names}
    return found - {module_of(path)}


def foreign(path: Path) -> set[str]:
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_the_map_of_the_package_names_every_room_once() -> None:
    assert sorted(ROOMS) == sorted({room_of(module) for module in MODULES} - {"__init__"})


def test_imports_point_down() -> None:
    for module, path in MODULES.items():
        here = room_of(module)
        for there in {room_of(each) for each in imports(path)} - {here}:
            if here != "__init__":
                assert ROOMS.index(there) > ROOMS.index(here), f"{path}: {there} is not below it"


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = {module: imports(path) for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which says the way


def test_other_libraries_are_imported_in_their_places_only() -> None:
    for path in MODULES.values():
        here = path.relative_to(PACKAGE).as_posix()
        for name in foreign(path) & FOREIGN.keys():
            assert here.startswith(tuple(FOREIGN[name])), f"{here} imports {name}"


PACKAGES = [
    "checkpoints", "data", "distributed", "hooks", "metrics", "planning", "protocols", "simulation",
    "testing",
]  # fmt: skip


@pytest.mark.faults
def test_a_public_package_is_an_attribute_that_loads_neither_tensorflow_nor_trio() -> None:
    """`import asynchooks` loads no NumPy either, nor do the packages without arrays."""
    code = f"""
import sys, asynchooks
heavy = {{"tensorflow", "trio", "tensorboard", "distributed"}}
def loaded(): print(*({{*heavy, "numpy"}} & sys.modules.keys()), sep=",")
asynchooks.testing, asynchooks.hooks, asynchooks.distributed
loaded()
for package in {PACKAGES}:
    assert getattr(asynchooks, package).__name__ == "asynchooks." + package
loaded()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\nnumpy\n"


@pytest.mark.tensorflow
def test_dir_shows_the_public_names() -> None:
    for package in PACKAGES:
        module = importlib.import_module(f"asynchooks.{package}")
        assert dir(module) == sorted(module.__all__)
    assert not [name for name in dir(asynchooks) if name.startswith("_")]
    assert {*asynchooks.__all__, *PACKAGES, "tf", "ChiefSessionCreator"} < set(dir(asynchooks))
    assert "TYPE_CHECKING" not in dir(asynchooks)
    pytest.importorskip("tensorflow")
    assert dir(asynchooks.tf) == sorted(asynchooks.tf.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        asynchooks.Nonsense  # type: ignore[attr-defined]  # noqa: B018
