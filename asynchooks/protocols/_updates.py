"""Updates of the parameters, and checks that gradients fit them. Nothing here counts.

Parameters are one array, or a dict of arrays by name; none is ever changed in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import _check as check

Update = Callable[[Any, Any, float], Any]
"""(parameters, gradient, learning rate) -> new parameters."""


def staleness_aware(rate: float) -> Callable[[int], float]:
    """A learning rate that decreases with the staleness of a gradient: rate / max(1, staleness).

    Source: Zhang et al. 2016, "Staleness-Aware Async-SGD for Distributed Deep Learning".

    Args:
        rate: of a gradient that is not stale, finite, >= 0.

    Example:
        rate = staleness_aware(0.1)
        assert (rate(0), rate(1), rate(4)) == (0.1, 0.1, 0.025)
    """
    rate = checked_rate("rate", rate)
    return lambda staleness: rate / max(1, staleness)


def checked_rate(name: str, rate: object) -> float:
    return check.number(name, rate, least=0.0, expected="a finite number >= 0")


class Updates:
    """Computes new parameters from the current ones and a gradient: by `update`, or plain SGD."""

    __slots__ = ("_is_mapping", "_shape", "_update", "first")

    def __init__(self, parameters: Any, update: Update | None) -> None:
        if update is not None:
            expected = "a function of (parameters, gradient, learning rate) -> new parameters"
            check.function("update", update, expected)
        self._is_mapping = isinstance(parameters, Mapping)
        self._update = update
        if not self._is_mapping:
            self.first: Any = _frozen_copy("parameters", parameters)
            """The initial parameters, copied and read-only."""
            self._shape = self.first.shape
            return
        if not parameters:
            raise ValueError("parameters is empty; give at least one array")
        for name in parameters:
            if not isinstance(name, str):
                raise TypeError(f"parameters has the key {name!r}; give texts as names")
        self.first = {
            name: _frozen_copy(f"parameters[{name!r}]", each) for name, each in parameters.items()
        }

    def checked(self, what: str, given: Any) -> Any:
        """The gradient (or parameters) as arrays that fit the parameters, not copied."""
        if not self._is_mapping:
            if type(given) is np.ndarray and given.shape == self._shape:
                return given
            if isinstance(given, Mapping):
                raise TypeError(f"{what} is a mapping; expected one array of shape {self._shape}")
            return _shaped(what, given, self._shape)
        if not isinstance(given, Mapping):
            raise TypeError(
                f"{what} is a {type(given).__name__}; expected a mapping with the names "
                f"{sorted(self.first)}"
            )
        if given.keys() != self.first.keys():
            raise ValueError(
                f"{what} has the names {sorted(map(str, given))}; expected {sorted(self.first)}"
            )
        return {
            name: _shaped(f"{what}[{name!r}]", given[name], first.shape)
            for name, first in self.first.items()
        }

    def kept(self, gradient: Any) -> Any:
        """A copy: the worker may reuse its array for the next gradient."""
        if self._is_mapping:
            return {name: each.copy() for name, each in gradient.items()}
        return gradient.copy()

    def mean(self, gradients: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
        """The (weighted) mean, summed in the order given: equal orders give equal bits."""
        if not self._is_mapping:
            return _mean(gradients, weights)
        return {name: _mean([each[name] for each in gradients], weights) for name in self.first}

    def apply(self, parameters: Any, gradient: Any, rate: float) -> Any:
        """New parameters, read-only."""
        if self._update is not None:
            given = parameters if not self._is_mapping else dict(parameters)
            return self.frozen("the result of update", self._update(given, gradient, rate))
        if not self._is_mapping:
            return _descend(parameters, gradient, rate)
        return {name: _descend(each, gradient[name], rate) for name, each in parameters.items()}

    def frozen(self, what: str, given: Any) -> Any:
        """Checked parameters of user code, made read-only, with the dtypes of the first ones."""
        arrays = self.checked(what, given)
        if not self._is_mapping:
            return _frozen(arrays, self.first.dtype)
        return {name: _frozen(each, self.first[name].dtype) for name, each in arrays.items()}


def _frozen_copy(name: str, value: Any) -> Any:
    array = np.array(value, order="C", subok=False)
    if array.dtype.kind in "biuOSUmM":
        raise TypeError(
            f"{name} is of dtype {array.dtype}, which an update would round; give floating-point "
            "numbers, such as numpy.zeros(3, numpy.float32)"
        )
    array.setflags(write=False)
    return array


def _shaped(what: str, given: Any, shape: tuple[int, ...]) -> Any:
    array = np.asarray(given)
    if array.dtype.kind == "O":  # a coroutine, None, arrays of several shapes
        raise TypeError(f"{what} is {given!r}; expected an array of shape {shape}")
    if array.shape != shape:
        raise ValueError(f"{what} has the shape {array.shape}; expected that of the parameter: "
                         f"{shape}")  # fmt: skip
    return array


def _frozen(array: Any, dtype: Any) -> Any:
    array = np.asarray(array, dtype)
    array.setflags(write=False)
    return array


def _mean(arrays: Sequence[Any], weights: Sequence[float] | None) -> Any:
    if weights is None:
        total = arrays[0]
        for each in arrays[1:]:
            total = total + each
        return total / len(arrays)
    total = arrays[0] * weights[0]
    for each, weight in zip(arrays[1:], weights[1:], strict=True):
        total = total + each * weight
    return total / math.fsum(weights)


def _descend(parameter: Any, gradient: Any, rate: float) -> Any:
    moved = parameter - rate * gradient
    if type(moved) is not np.ndarray or moved.dtype != parameter.dtype:
        moved = np.asarray(moved, parameter.dtype)
    moved.setflags(write=False)
    return moved
