"""What callers of `CheckpointDirectory` may give. Nothing here touches the disk."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping
from typing import SupportsFloat, SupportsIndex

from .._errors import MetricError
from ._manifest import MANIFEST
from ._retention import Retention


def checked_basename(basename: object) -> str:
    if not isinstance(basename, str):
        raise TypeError(f'basename is {basename!r}; give a string, as in basename="model.ckpt"')
    if not basename or basename.startswith(".") or any(each in basename for each in "/\\\0"):
        raise ValueError(
            f"basename is {basename!r}; give a name without separators and without a leading dot, "
            "and the directory as the directory"
        )
    return basename


def checked_retention(retention: object) -> Retention:
    if retention is None:
        return Retention()
    if not isinstance(retention, Retention):
        raise TypeError(f"retention is {retention!r}; give a Retention(max_to_keep=...)")
    return retention


def checked_step(step: SupportsIndex) -> int:
    try:
        number = operator.index(step)
    except TypeError as error:
        raise TypeError(f"step is {step!r}; give a whole number >= 0") from error
    if number < 0:
        raise ValueError(f"step is {number}; give a whole number >= 0")
    return number


def checked_limit(up_to_step: SupportsIndex | None) -> int | None:
    return None if up_to_step is None else checked_step(up_to_step)


def checked_seconds(seconds: SupportsFloat) -> float:
    number = _checked_number("seconds", seconds)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"seconds is {number!r}; give the seconds of training so far, >= 0")
    return number


def checked_metric(metric: SupportsFloat | None) -> float | None:
    if metric is None:
        return None
    number = _checked_number("metric", metric)
    if math.isnan(number):
        raise MetricError(
            "metric is NaN, which is neither better nor worse than any other; give a number, or "
            "find out what made it NaN"
        )
    return number


def _checked_number(name: str, value: SupportsFloat) -> float:
    if isinstance(value, (str, bytes)) or not isinstance(value, SupportsFloat | SupportsIndex):
        raise TypeError(f"{name} is {value!r}; give a number")
    return float(value)


def checked_extra_name(name: object, prefix_name: str) -> str:
    """A file's name beside the saver's files: no separators, not the saver's, not ours."""
    if not isinstance(name, str):
        raise TypeError(f'the name of an extra file is {name!r}; give a string, as "hooks.json"')
    is_plain = bool(name) and os.path.basename(name) == name and not name.startswith(".")
    if not is_plain or any(each in name for each in "\\\0"):
        raise ValueError(f"{name!r} is no name of an extra file; give one as in 'hooks.json'")
    if name.startswith(prefix_name) or name in (MANIFEST, f"{MANIFEST}.new"):
        raise ValueError(
            f"{name!r} is taken: names that begin with {prefix_name!r} are the saver's, and "
            f"{MANIFEST} is the checkpoint's own; give another name for the extra file"
        )
    return name


def checked_extra(extra: Mapping[str, bytes] | None, prefix_name: str) -> dict[str, bytes]:
    files = dict(extra or {})
    for name, content in files.items():
        checked_extra_name(name, prefix_name)
        if not isinstance(content, (bytes, bytearray, memoryview)):
            raise TypeError(f"the extra file {name!r} is {content!r}; give bytes")
    return files
