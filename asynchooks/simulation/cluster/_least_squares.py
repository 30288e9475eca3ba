"""A small real problem for simulated workers: least squares with noisy gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._worker import Worker

_NUM_EXAMPLES, _NUM_WEIGHTS, _BATCH = 256, 16, 8
_NOISE = 0.1


class LeastSquares:
    """Weights that fit examples; a gradient is that of a few examples, drawn by its worker.

    Args:
        seed: of the examples, an integer >= 0.

    Example:
        problem = LeastSquares(7)
        cluster = Simulation(7).cluster(8, parameters=problem.first)
        cluster.run(gradient=problem.gradient, loss=problem.loss, updates=100)
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._inputs = rng.normal(size=(_NUM_EXAMPLES, _NUM_WEIGHTS))
        noise = rng.normal(scale=_NOISE, size=_NUM_EXAMPLES)
        self._targets = self._inputs @ rng.normal(size=_NUM_WEIGHTS) + noise

    @property
    def first(self) -> Any:
        """The weights to begin with: float64, shape (16,), zeros."""
        return np.zeros(_NUM_WEIGHTS)

    def gradient(self, weights: Any, worker: Worker) -> Any:
        """The gradient of half the mean squared error over eight examples; shape (16,)."""
        rows = worker.rng.integers(_NUM_EXAMPLES, size=_BATCH)
        inputs = self._inputs[rows]
        return (inputs @ weights - self._targets[rows]) @ inputs / _BATCH

    def loss(self, weights: Any) -> float:
        """Half the mean squared error over all examples."""
        errors = self._inputs @ weights - self._targets
        return float(errors @ errors) / (2 * _NUM_EXAMPLES)
