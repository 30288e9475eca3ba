"""The sub-commands of the command line, and what they share: types of arguments, the help."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable
from typing import Any


class HelpFormatter(argparse.HelpFormatter):
    """Fills the paragraphs of descriptions and epilogs; indented lines, commands, stay whole."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            line if line.startswith(" ") else textwrap.fill(line, width, break_on_hyphens=False)
            for line in text.splitlines()
        )


def argument(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type of arguments: argparse shows a message only if it comes as its own error."""

    def parse(text: str) -> Any:
        try:
            return check(text)
        except (ValueError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def number(
    text: str, kind: Callable[[str], Any], least: float, allowed: str, most: float = math.inf
) -> Any:
    """The finite number that the text says, within bounds; `allowed` is for the error."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    # NaN is not within any bounds
    if not least <= value <= most or value == math.inf:
        raise ValueError(f"{text!r}; give {allowed}")
    return value


def numeric(
    kind: Callable[[str], Any], least: float, allowed: str, most: float = math.inf
) -> Callable[[str], Any]:
    """A type of arguments that are one number."""
    return argument(lambda text: number(text, kind, least, allowed, most))


positive = numeric(int, 1, "a whole number >= 1")
