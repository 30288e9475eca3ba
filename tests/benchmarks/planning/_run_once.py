"""One real run of a program, recorded, in a process of its own.

python -m tests.benchmarks.planning._run_once NAME DIRECTORY SETTINGS_IN_JSON
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import anyio

from ._programs import PROGRAMS


def main() -> None:
    name, directory, settings = sys.argv[1:]
    logging.disable(logging.WARNING)
    anyio.run(PROGRAMS[name].run_recorded, Path(directory), json.loads(settings))


if __name__ == "__main__":
    main()
