"""The simulation of a test that runs on several engines."""

from __future__ import annotations

from typing import Any

import pytest

from asynchooks.simulation import Simulation


@pytest.fixture
def simulation(backend: Any) -> Simulation:
    return Simulation(backend=backend)
