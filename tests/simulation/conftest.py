"""What tests of simulations share."""

from typing import Any

import pytest


@pytest.fixture
def log() -> list[Any]:
    """What a test's tasks have done, in order."""
    return []
