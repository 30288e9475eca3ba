"""The version of asynchooks, in its one place: the build reads it from here.

Processes that train together compare it. It is a constant rather than the metadata of an
installed package: a checkout that is not installed, or was installed earlier, says what it is.
"""

from __future__ import annotations

__version__ = "0.1.0"
