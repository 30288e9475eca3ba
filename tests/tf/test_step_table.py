"""The table's operations side by side: a run that makes what another process just asks for.

They are private, but the moment between the two is too short to be met through sessions.
"""

from collections.abc import Callable
from typing import Any

import pytest

from .models import tf, v1

table = pytest.importorskip("asynchooks.tf.cluster._table")


class Interrupted(table.StepTable):  # type: ignore[misc, name-defined]
    """Something happens right before it is written."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def _assign(self, rows: Any) -> Any:
        def interrupt(_: Any) -> Any:
            self.meanwhile()
            return rows.dtype.as_numpy_dtype(0)

        with tf.control_dependencies([tf.numpy_function(interrupt, [rows], rows.dtype)]):
            return super()._assign(rows)


def test_a_task_that_asks_for_a_step_while_it_is_made_learns_of_it() -> None:
    with tf.Graph().as_default() as graph:
        step = v1.train.get_or_create_global_step()
        make_step = v1.assign_add(step, 1)
        init = v1.global_variables_initializer()
        steps = Interrupted(step, 1, 0)
        make = steps.news_after(make_step)
    with v1.Session(graph=graph) as session:
        session.run(init)
        session.run(steps.begin_epoch, {steps.known_epoch: 0})
        # the run finds no task that waits for its step
        steps.meanwhile = lambda: session.run(make)
        reply = session.run(steps.exchange, {steps.request: [0, table.ANY, 1, 0, 1, 0, 1, 0]})
    assert reply[0][0] == 1
