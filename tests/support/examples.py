"""The examples, run as `__main__`: in this process, or each in one of its own."""

import contextlib
import gc
import importlib.util
import io
import logging
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@contextlib.contextmanager
def own_logging() -> Iterator[None]:
    """Forget the handlers that a program installs: they write to what a test captured."""
    loggers = [logging.getLogger(), logging.getLogger("asynchooks")]
    before = [(each, each.level, list(each.handlers)) for each in loggers]
    try:
        yield
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers


def run_here(name: str, *args: object) -> str:
    """What an example prints; what it imports is loaded once for all tests of this process.

    As in a process of its own, Python says nothing of sockets that it leaves open.
    """
    argv = [name, *map(str, args)]
    with (
        own_logging(),
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        finally:
            gc.collect()
    return printed.getvalue()


def start_example(
    name: str, *args: object, launcher: Sequence[str] = (), **options: object
) -> subprocess.Popen[str]:
    """The example in a process of its own; its log goes to stderr."""
    environment = {key: os.environ[key] for key in os.environ if key != "TF_CONFIG"}
    command = [sys.executable, "-u", *launcher, str(EXAMPLES / name), *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        command, env={**environment, "PYTHONPATH": str(ROOT)}, text=True, **pipes
    )


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """What it has printed when it has ended with the code."""
    printed, errors = process.communicate(timeout=250)
    assert process.returncode == code, f"{process.returncode}: {printed}{errors}"
    return printed


def load(name: str) -> ModuleType:
    """The example as a module; it stays in `sys.modules`, where dataclasses look."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(pattern: str, printed: str) -> re.Match[str]:
    """Where a line of what was printed fits the pattern."""
    match = re.search(pattern, printed, re.MULTILINE)
    assert match is not None, printed
    return match


def number(pattern: str, printed: str) -> float:
    """The number of its first group."""
    return float(found(pattern, printed)[1])
