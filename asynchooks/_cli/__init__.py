"""The sub-commands of the command line, and what they share: the parser and types of arguments."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage, which --help shows.

    Options have to be written out: a prefix that is accepted today would be ambiguous, or mean
    something else, when an option is added.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
            **options,
        )
        self.add_argument("-h", "--help", action="help", help="Print this help and exit.")
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def message_of(error: Exception) -> str:
    """What the error says; without the number of an OSError, which helps no reader."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.filename or 'the output'!r}: {error.strerror}"


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type of arguments: argparse shows a message only if it comes as an error of its own."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, OSError, ImportError) as error:
            raise argparse.ArgumentTypeError(message_of(error)) from error

    return checked


def number(kind: Callable[[str], Any], allowed: str, least: float = 0) -> Callable[[str], Any]:
    """A type of arguments that are one finite number; `allowed` is what an error says to give."""

    @argument
    def parse(text: str) -> Any:
        with suppress(ValueError):
            value = kind(text)
            if least <= value < math.inf:  # NaN is within no bounds
                return value
        raise ValueError(f"{text!r}; give {allowed}")

    return parse


positive = number(int, "a whole number >= 1", 1)
count = number(int, "a whole number >= 0")


@argument
def new_file(text: str) -> str:
    """The path of a file that can be written."""
    from ..simulation.output._whole_file import check_writable

    check_writable(text)
    return text


@argument
def plot_file(text: str) -> str:
    """The path of a plot that can be drawn and written."""
    from ..simulation.output._plots import check_format, check_matplotlib

    check_format(text)
    check_matplotlib()
    new_file(text)
    return text
