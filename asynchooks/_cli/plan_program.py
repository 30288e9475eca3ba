"""The program that `asynchooks plan` runs, found by its file or module."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .._engine.threads import is_async


def load_program(text: str) -> Any:
    """The async function of "learner.py:main" or "package.module:main".

    Raises:
        ValueError: the text is none of these, or the function is not there, or is not async.
        FileNotFoundError: there is no such file.
        ImportError: the file or the module cannot be imported (says why).
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ValueError(
            f"--program {text!r}; give FILE:NAME or MODULE:NAME, such as learner.py:main"
        )
    module = _module(place)
    if not hasattr(module, name):
        functions = [
            each
            for each in dir(module)
            if callable(value := getattr(module, each)) and is_async(value)
        ]
        known = f"; its async functions are {', '.join(functions)}" if functions else ""
        raise ValueError(f"--program {text!r}: {place} has no {name!r}{known}")
    main = getattr(module, name)
    if not callable(main) or not is_async(main):
        raise ValueError(
            f"--program {text!r}: {name} is {main!r}; give the async function that anyio.run or "
            "asyncio.run is called with"
        )
    return main


def _module(place: str) -> ModuleType:
    # as `python learner.py` and `python -m module` have it
    is_file = place.endswith(".py") or os.sep in place
    directory = os.path.dirname(os.path.abspath(place)) if is_file else os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    if is_file and not os.path.isfile(place):
        raise FileNotFoundError(f"--program: there is no file {place!r}")
    try:
        return importlib.import_module(_name_of(place) if is_file else place)
    except Exception as error:
        raise ImportError(f"--program: {place} cannot be imported: {error!r}") from error
    except SystemExit as error:
        raise ImportError(
            f"--program: {place} ends with exit code {error.code} as it is imported; put what is "
            "to run under `if __name__ == '__main__':`"
        ) from error


def _name_of(place: str) -> str:
    """The name to import a file by; one of its own where another module has that."""
    name = Path(place).stem
    other = sys.modules.get(name) or _spec(name)
    origin = getattr(other, "__file__", None) or getattr(other, "origin", None)
    if name.isidentifier() and (
        origin is None or os.path.realpath(origin) == os.path.realpath(place)
    ):
        return name
    own = f"asynchooks_planned_{name}"
    spec = importlib.util.spec_from_file_location(own, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own]
        raise
    return own


def _spec(name: str) -> object:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
