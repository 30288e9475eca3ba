"""A learner on each of the two event loops."""

import pytest

from .learning import Learner


@pytest.fixture
def learner(anyio_backend: str) -> Learner:
    return Learner(anyio_backend)
