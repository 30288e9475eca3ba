"""What tests of simulations share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def log() -> list[Any]:
    """What a test's tasks have done, in order."""
    return []
