"""Trainings that other libraries' loaders feed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asynchooks import FeedHook, MonitoredSession
from asynchooks.data import Stage

from ..hooks.inputs import Diary, saving


async def trained_with(
    source: Any,
    path: Path | None = None,
    last: int = 999,
    errors: Mapping[int, BaseException] | None = None,
) -> Diary:
    """What a model was trained with, up to a step; it is restored from a path, and saved there."""
    diary = Diary(errors)
    hooks = [FeedHook(source, "x"), *([] if path is None else [saving(path, diary)])]
    async with MonitoredSession(hooks, diary.creator) as session:
        while not session.should_stop() and session.global_step.value < last:
            await session.run([])
    return diary


async def trained_in_lives(make: Callable[[int], Stage[Any]], path: Path, *lasts: int) -> Diary:
    """The same in several lives; each makes its pipeline, with a buffer of another size."""
    for last in lasts:
        diary = await trained_with(make(last % 4 + 1), path, last)
    return diary
