"""Which asynchooks runs here: processes that train together must run the same."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Of the package that is installed; "unknown" where it runs from its sources."""
    try:
        return metadata.version("asynchooks")
    except metadata.PackageNotFoundError:
        return "unknown"


__version__ = version()
