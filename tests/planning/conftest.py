"""Tests that take `backend` run on every kernel."""

from __future__ import annotations

from typing import Any

import pytest

from .planned import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param
