"""Imports point down, and `import asynchooks` loads neither TensorFlow nor trio."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import asynchooks

PACKAGE = Path(asynchooks.__file__).parent

LAYERS = [
    [
        "_errors",
        "_version",
        "_old_objects",
        "_later",
        "_signal",
        "_engine",
        "_real_time",
        "_wakeup_fd",
        "_stop",
        "_stop_reason",
        "_step_source",
    ],
    [
        "_gate",
        "_waiters",
        "_step_runs",
        "_fed_runs",
        "_global_step",
        "_timer",
        "_lock",
        "_portal",
        "_stacks",
        "checkpoints",
    ],
    [
        "_coordinator",
        "_side_tasks",
        "_session_stop",
        "_hook",
        "_listener",
        "_runner",
        "_work_thread",
        "_step_fn",
        "_or_stop",
        "_recovery",
        "_raw_session",
        "_session_creator",
    ],
    ["data"],
    [
        "_function_session",
        "_shared_session",
        "_merge",
        "_hook_calls",
        "_hook_state",
        "_hook_list",
        "_raw_run",
        "_connection",
        "_ending",
        "_phase",
        "_supervised",
    ],
    ["_session"],
    ["hooks", "protocols"],
    ["simulation"],
    ["distributed"],
    ["tf"],
    ["_arguments", "_simulate_output", "launch"],
    ["_simulate_command", "_launch_command"],
    ["cli"],
    ["__main__"],
    ["testing"],
    ["__init__"],
]
SAME_LAYER = {
    ("_engine", "_signal"),
    ("_engine", "_real_time"),  # when it is first asked for
    ("_real_time", "_engine"),
    ("_real_time", "_wakeup_fd"),  # on asyncio
    ("_stop", "_engine"),
    ("_waiters", "_engine"),
    ("_step_runs", "_gate"),
    ("_step_runs", "_waiters"),
    ("_fed_runs", "_step_runs"),
    ("_global_step", "_fed_runs"),
    ("_global_step", "_step_runs"),
    ("_global_step", "_waiters"),
    ("_coordinator", "_or_stop"),
    ("_coordinator", "_side_tasks"),
    ("_coordinator", "_recovery"),
    ("_side_tasks", "_recovery"),
    ("_session_stop", "_side_tasks"),
    ("_session_stop", "_recovery"),
    ("_raw_session", "_runner"),
    ("_session_creator", "_raw_session"),
    ("_session_creator", "_coordinator"),
    ("_session_creator", "_runner"),
    ("_session_creator", "_work_thread"),
    ("_step_fn", "_session_creator"),
    ("_raw_session", "_work_thread"),
    ("_runner", "_work_thread"),
    ("_or_stop", "_work_thread"),
    ("_raw_session", "_hook"),
    ("_step_fn", "_hook"),
    ("_step_fn", "_raw_session"),
    ("_step_fn", "_runner"),
    ("_hook_list", "_merge"),
    ("_hook_list", "_hook_calls"),
    ("_raw_run", "_merge"),
    ("_connection", "_hook_list"),
    ("_supervised", "_connection"),
    ("_supervised", "_phase"),
    ("_ending", "_connection"),
    ("_raw_run", "_connection"),
    ("_ending", "_hook_list"),
}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def place_of(path: Path) -> str:
    """The file's module, or the package that it is in."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> list[tuple[str, bool]]:
    """(what of asynchooks a file imports, whether only for types)."""
    tree = ast.parse(path.read_text())
    depth = len(path.relative_to(PACKAGE).parts)
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for node in ast.walk(branch)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [(name.split(".")[0], id(node) in typing_only) for name in names]
    return found


def foreign(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


DASK = {
    "_actor_calls.py", "_dask.py", "_dask_place.py", "_dask_plugin.py", "_dask_workers.py",
}  # fmt: skip
EVENT_LOOPS = {
    "_actor_calls.py", "_asyncio.py", "_dask_loop.py", "_dask_plugin.py", "_dask_stream.py",
    "_dask_workers.py",
    "_real_time.py", "_runner.py", "_trio.py", "_wakeup_fd.py",
}  # fmt: skip

FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_has_its_layer() -> None:
    assert {place_of(path) for path in FILES} == set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = place_of(path)
    for there, only_types in imports(path):
        if only_types or there == here or (here, there) in SAME_LAYER:
            continue
        assert LEVEL[there] < LEVEL[here], f"{here} imports {there}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_event_loops_and_tensorflow_are_imported_in_their_places_only(path: Path) -> None:
    names = foreign(path)
    if path.name not in EVENT_LOOPS:
        assert not names & {"asyncio", "trio"}
    if path.name not in DASK:
        assert not names & {"dask", "distributed"}
    if place_of(path) != "tf":
        assert "tensorflow" not in names
    if place_of(path) in ("_launch_command", "launch"):  # it starts processes, and is small
        assert not names & {"dask", "distributed"}
    if path.name not in ("_engine.py", "_real_time.py", "_summaries.py", "_real_sleep.py"):
        assert "time" not in names
    kernels = ("_anyio_kernel.py", "_asyncio.py", "_trio.py")
    is_program = place_of(path) == "launch"  # which has an event loop of its own
    if not is_program and path.name not in ("_engine.py", "_real_time.py", "_portal.py", *kernels):
        assert "anyio" not in names


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


def test_every_public_name_is_there_and_documented() -> None:
    for name in asynchooks.__all__:
        if name != "ChiefSessionCreator":  # needs TensorFlow
            assert getattr(asynchooks, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        asynchooks.Nonsense  # type: ignore[attr-defined]  # noqa: B018
