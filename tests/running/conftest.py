"""Virtual time, on every engine."""

from __future__ import annotations

import pytest

from asynchooks.simulation import Simulation

from ..simulation.engines import BACKENDS


@pytest.fixture(params=BACKENDS)
def simulation(request: pytest.FixtureRequest) -> Simulation:
    return Simulation(backend=request.param)
