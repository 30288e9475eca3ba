"""The programs, the settings they are recorded at, and those that are planned."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from asynchooks.planning import record

from .programs import batching, gradients, pytorch

Settings = Mapping[str, Any]


class Program(NamedTuple):
    """One program; each of its settings in place of those that `main` has as defaults."""

    main: Callable[..., Awaitable[None]]
    recorded: tuple[Settings, ...]
    planned: tuple[Settings, ...]
    always: Settings = MappingProxyType({})


GRADIENTS = Program(
    gradients.main,
    recorded=({},),
    planned=(
        *({"num_workers": num} for num in (4, 16, 32)),
        *({"protocol": each} for each in ("ssp:1", "sync", "kasync:4", "kbatch-async:4")),
    ),
)
PROGRAMS: Mapping[str, Program] = {
    "batching": Program(
        batching.main,
        recorded=({"concurrency": 4}, {"concurrency": 32}),
        planned=(
            *({"concurrency": num} for num in (8, 16, 64)),
            {"concurrency": 16, "ordered": True},
            {"concurrency": 32, "batch_size": 16},
            {"concurrency": 16, "max_staleness": 2},
        ),
    ),
    "gradients": GRADIENTS,
    "seen_gradients": GRADIENTS._replace(always={"is_seen": True}),
    "pytorch": Program(
        pytorch.main,
        recorded=({"batch_size": 16}, {"batch_size": 64}),
        planned=(
            {"batch_size": 32},
            {"batch_size": 32, "concurrency": 8},
            {"batch_size": 32, "concurrency": 32},
            {"batch_size": 32, "num_ahead": 0},
            {"batch_size": 64, "concurrency": 32, "num_ahead": 2},
            {"batch_size": 128},
        ),
    ),
}


async def run_recorded(name: str, path: Path, settings: Settings) -> None:
    """Run a program really, and leave what was recorded at the path."""
    logging.disable(logging.WARNING)
    async with record(path, settings=settings):
        await PROGRAMS[name].main(**settings)
