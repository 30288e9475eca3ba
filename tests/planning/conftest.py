"""Tests that take `backend` run on every kernel."""

from ..simulation.conftest import backend as backend
