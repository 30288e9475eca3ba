"""Tests that take `backend`, or a simulation, run on every engine."""

from __future__ import annotations

from typing import Any

import pytest

from asynchooks.simulation import Simulation

from .engines import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def log() -> list[Any]:
    """What a test's tasks have done, in order."""
    return []


@pytest.fixture
def simulation(backend: Any) -> Simulation:
    return Simulation(backend=backend)
