"""The program that `asynchooks plan` runs, found by its file or module."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from .._engine.threads import is_async


def load_program(text: str) -> Any:
    """The async function of "learner.py:main" or "package.module:main".

    Raises:
        ValueError: the text is none of these, or the function is not there, or is not async.
        ImportError: the file or the module cannot be imported (says why).
    """
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(
            f"--program {text!r}; give FILE:NAME or MODULE:NAME, such as learner.py:main"
        )
    found = vars(_module(place))
    programs = {key for key, each in found.items() if callable(each) and is_async(each)}
    if name not in programs:
        known = ", ".join(sorted(programs)) or "none"
        got = f"{name} is {found[name]!r}" if name in found else f"{place} has no {name!r}"
        raise ValueError(
            f"--program {text!r}: {got}; give the async function that anyio.run or asyncio.run is "
            f"called with. The async functions of {place}: {known}"
        )
    return found[name]


def _module(place: str) -> ModuleType:
    """The module, imported as `python learner.py` and `python -m package.module` import it."""
    is_file = place.endswith(".py") or os.sep in place
    if is_file and not os.path.isfile(place):
        raise ValueError(f"--program: there is no file {place!r}; name one, such as learner.py")
    directory = os.path.dirname(os.path.abspath(place)) if is_file else os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        with redirect_stdout(sys.stderr):  # what it prints is no part of the table or JSON
            return _of_file(place) if is_file else importlib.import_module(place)
    except Exception as error:
        raise ImportError(
            f"--program: {place} cannot be imported: {error!r}; mend it, or name another"
        ) from error
    except SystemExit as error:
        raise ImportError(
            f"--program: {place} ends with exit code {error.code} as it is imported; put what is "
            "to run under `if __name__ == '__main__':`"
        ) from error


def _of_file(place: str) -> ModuleType:
    """A file under a name of its own: its name may be that of a library, as random.py is."""
    name = f"asynchooks_planned_{Path(place).stem}"
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
