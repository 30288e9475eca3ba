"""Checks of arguments that sub-commands share. Which there are, each of them says itself."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any


def argument(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """For `type=`: argparse shows a message only if it comes as its own error."""

    def parse(text: str) -> Any:
        try:
            return check(text)
        except (ValueError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def number(text: str, kind: Callable[[str], Any], least: float, allowed: str) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    # NaN is not within any bounds
    if not least <= number < math.inf:
        raise ValueError(f"{text!r}; give {allowed}")
    return number


positive = argument(lambda text: number(text, int, 1, "a whole number >= 1"))
