"""Compiled callables that leave TensorFlow's pool of threads to steps that gain by it.

Handing a small step to the pool and back costs 20 of its 30 us; with the run option for it the
calling thread computes it alone (seen with TensorFlow 2.21 on 2 cores). A large step would lose
its parallel ops by that, so both ways are timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from .._engine import now

TRIED_SECS = 2e-4
"""A step that takes longer in the pool stays there: less than a tenth is to be gained."""
_NUM_TIMED = 4
_MAX_OPS = 5000
_NEVER_WAIT = (
    "Apply", "Assert", "Assign", "IsVariableInitialized", "Multinomial", "RandomGamma",
    "RandomPoisson", "RandomStandardNormal", "RandomUniform", "ReadVariable", "ResourceApply",
    "ResourceGather", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign",
    "Scatter", "SparseApply", "TruncatedNormal", "VarHandle", "VarIsInitialized", "Variable",
)  # fmt: skip
"""Beginnings of the types of stateful ops that wait for no other op: variables and dice."""


class PooledOrAlone:
    """One compiled step; `call` runs it. It times the first few calls, and settles on one way.

    Args:
        make: compiles it for a pool of TensorFlow's, by its number; -1 is the calling thread.
        ops: what it runs. If one may wait for another, as ops of queues do, it stays in the pool.
    """

    def __init__(self, make: Callable[[int], Callable[..., Any]], ops: list[tf.Operation]) -> None:
        self._make = make
        self._pooled = make(0)
        self._alone: Callable[..., Any] = self._pooled
        self._num_calls = 0
        self._fastest = [math.inf, math.inf]  # seconds, in the pool and alone
        self.call = self._time if _never_wait(ops) else self._pooled

    def _time(self, *values: Any) -> Any:
        """Run it, in the pool at first, then alone; of each the first call only warms up."""
        place, number = divmod(self._num_calls, _NUM_TIMED + 1)
        if place > 1:  # the last of the timed calls failed, or is another thread's
            self._settle(1)
            return self.call(*values)
        if place and self._alone is self._pooled:
            self._alone = self._make(-1)
        self._num_calls += 1
        run = self._alone if place else self._pooled
        begun = now()
        outputs = run(*values)
        if number:
            self._fastest[place] = min(self._fastest[place], now() - begun)
        if number == _NUM_TIMED:
            self._settle(place)
        return outputs

    def _settle(self, place: int) -> None:
        pooled, alone = self._fastest
        if place == 0 and pooled > TRIED_SECS:
            self.call = self._pooled
        elif place:
            self.call = self._alone if alone < pooled else self._pooled


def _never_wait(ops: list[tf.Operation]) -> bool:
    """Whether no op among these, and those that they need, waits for another one to run."""
    seen, todo = set(ops), list(ops)
    while todo and len(seen) <= _MAX_OPS:
        op = todo.pop()
        if op.op_def.is_stateful and not op.type.startswith(_NEVER_WAIT):
            return False
        new = {each.op for each in op.inputs} | set(op.control_inputs)
        todo += new - seen
        seen |= new
    return not todo
