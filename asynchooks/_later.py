"""Names that are imported when they are first used, and classes of libraries that may not be."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def later(
    package: str, places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package.

    Args:
        package: its name.
        places: for each name the module, below the package, that has it; a module's own name
            stands for itself.

    `dir` of the package shows those and the names in its `__all__`.
    """

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f".{places[name]}", package)
        value = module if name == places[name] else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get, listing(package, places)


def is_a(value: object, module: str, name: str) -> bool:
    """Whether it is an instance of a class of a library; the library is not imported for this."""
    kind: Any = sys.modules.get(module)
    for part in name.split("."):  # None also where the library is still being imported
        kind = getattr(kind, part, None)
    return isinstance(kind, type) and isinstance(value, kind)


def listing(package: str, places: Iterable[str] = ()) -> Callable[[], list[str]]:
    """The `__dir__` of a package: the names in its `__all__`, and these that are public."""

    def names() -> list[str]:
        public = {*sys.modules[package].__all__, *places}
        return sorted(name for name in public if not name.startswith("_"))

    return names
