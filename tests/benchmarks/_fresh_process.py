"""A function in a process of its own, so that measurements do not disturb each other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def in_fresh_process(fn: Callable[..., T], *args: Any) -> T:
    """So that memory which an earlier measurement freed is not taken for memory not needed."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(fn, *args).result()
