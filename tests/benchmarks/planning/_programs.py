"""The programs, the settings they are recorded at, and those that are planned."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asynchooks.planning import record

from .programs import batching, gradients, pytorch

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Program:
    """One program; each of its settings in place of those that `main` has as defaults."""

    main: Callable[..., Awaitable[None]]
    recorded: tuple[Settings, ...]
    planned: tuple[Settings, ...]
    always: Settings = field(default_factory=dict)

    async def run_recorded(self, directory: Path, settings: Settings) -> None:
        """Run it really, and leave what was recorded in the directory, which is empty."""
        async with record(directory / "run.pftrace", settings=settings):
            await self.main(**settings)


_PROTOCOLS: tuple[Settings, ...] = tuple(
    {"protocol": each} for each in ("ssp:1", "sync", "kasync:4")
)
_WORKERS: tuple[Settings, ...] = (
    {"num_workers": 4},
    {"num_workers": 16},
    {"num_workers": 32},
    *_PROTOCOLS,
    {"protocol": "kbatch-async:4"},
)

PROGRAMS: Mapping[str, Program] = {
    "batching": Program(
        batching.main,
        recorded=({"concurrency": 4}, {"concurrency": 32}),
        planned=(
            {"concurrency": 8},
            {"concurrency": 16},
            {"concurrency": 64},
            {"concurrency": 16, "ordered": True},
            {"concurrency": 32, "batch_size": 16},
            {"concurrency": 16, "max_staleness": 2},
        ),
    ),
    "gradients": Program(gradients.main, recorded=({},), planned=_WORKERS),
    "seen_gradients": Program(
        gradients.main, recorded=({},), planned=_WORKERS, always={"is_seen": True}
    ),
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
