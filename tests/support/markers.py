"""Values of parameters with markers."""

from typing import Any

import pytest


def exhaustive(*values: object) -> list[Any]:
    """Values of one parameter that quick runs leave out: `[*range(3), *exhaustive(3, 4, 5)]`.

    For further seeds and sizes of what the values beside them show already.
    """
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]
