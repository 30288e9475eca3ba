"""The table's operations side by side: what a run makes while another process asks for it.

They are private, but the moment between the two is too short to be met through sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")
table = pytest.importorskip("asynchooks.tf.cluster._table")
v1 = tf.compat.v1
pytestmark = pytest.mark.tensorflow


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
        request = v1.placeholder(tf.int64, (None,))
        steps = Interrupted(graph, table.Place.of(step), 1)
        make, begin = steps.news_after(make_step), steps.begin_epoch(tf.constant(0, tf.int64))
        exchange = steps.exchange(request)
    with v1.Session(graph=graph) as session:
        session.run(init)
        session.run(begin)
        # the run finds no task that waits for its step
        steps.meanwhile = lambda: session.run(make)
        reply = session.run(exchange, {request: [0, table.ANY, 1, 0, 1, 0, 1, 0]})
    assert reply[0][0] == 1


def test_a_run_that_makes_the_awaited_step_itself_wakes_its_task() -> None:
    with tf.Graph().as_default() as graph:
        step = v1.train.get_or_create_global_step()
        make_step = v1.assign_add(step, 1)
        init = v1.global_variables_initializer()
        request = v1.placeholder(tf.int64, (None,))
        steps = table.StepTable(graph, table.Place.of(step), 1)
        make, begin = steps.news_after(make_step), steps.begin_epoch(tf.constant(0, tf.int64))
        exchange, wait = steps.exchange(request), steps.wait(0)
    soon = v1.RunOptions(timeout_in_ms=10_000)  # else it would wait for ever
    with v1.Session(graph=graph) as session:
        session.run(init)
        session.run(begin)
        session.run(wait, options=soon)  # of the new epoch
        session.run(exchange, {request: [0, table.ANY, 1, 0, 2, 0, 1, 0]})
        session.run(make)
        with pytest.raises(tf.errors.DeadlineExceededError):  # it is not due at step 1
            session.run(wait, options=v1.RunOptions(timeout_in_ms=50))
        session.run(make)
        assert session.run(wait, options=soon)[0] == 2
