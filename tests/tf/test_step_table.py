"""The table's operations side by side: what a run makes while another process asks for it.

They are private, but the moment between the two is too short to be met through sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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
        steps = Interrupted(step, 1, 0)
        make = steps.news_after(make_step)
    with v1.Session(graph=graph) as session:
        session.run(init)
        session.run(steps.begin_epoch, {steps.known_epoch: 0})
        # the run finds no task that waits for its step
        steps.meanwhile = lambda: session.run(make)
        reply = session.run(steps.exchange, {steps.request: [0, table.ANY, 1, 0, 1, 0, 1, 0]})
    assert reply[0][0] == 1


def test_a_run_that_makes_the_awaited_step_itself_wakes_its_task() -> None:
    with tf.Graph().as_default() as graph:
        step = v1.train.get_or_create_global_step()
        make_step = v1.assign_add(step, 1)
        init = v1.global_variables_initializer()
        steps = table.StepTable(step, 1, 0)
        make, wait = steps.news_after(make_step), steps.wait
    soon = v1.RunOptions(timeout_in_ms=10_000)  # else it would wait for ever
    with v1.Session(graph=graph) as session:
        session.run(init)
        session.run(steps.begin_epoch, {steps.known_epoch: 0})
        session.run(wait, options=soon)  # of the new epoch
        session.run(steps.exchange, {steps.request: [0, table.ANY, 1, 0, 2, 0, 1, 0]})
        session.run(make)
        with pytest.raises(tf.errors.DeadlineExceededError):  # it is not due at step 1
            session.run(wait, options=v1.RunOptions(timeout_in_ms=50))
        session.run(make)
        assert session.run(wait, options=soon)[0] == 2


@pytest.mark.faults
@pytest.mark.parametrize("use_resource", [False, True])
@pytest.mark.parametrize("is_colocated", [False, True])
def test_the_graph_of_a_member_has_the_operations_of_the_step_and_the_table_alone(
    use_resource: bool, is_colocated: bool
) -> None:
    with tf.Graph().as_default() as graph, v1.variable_scope("", use_resource=use_resource):
        large = v1.get_variable("large", [1000])
        with v1.colocate_with(large.op) if is_colocated else nullcontext():
            step = v1.train.get_or_create_global_step()
        make_step = v1.assign_add(step, 3)
        init = v1.global_variables_initializer()
        steps = table.StepTable(step, 2, 1)
    alone = steps.graph_alone()
    names = {each.name for each in alone.get_operations()}
    assert {steps.exchange.op.name, steps.news.op.name, steps.wait.op.name} < names
    assert not names & {large.op.name, make_step.op.name, init.name}
    request = [1, table.ANY, 1, 0, 0, 0, 1, 0]
    server = v1.train.Server.create_local_server()  # as two sessions on it share their variables
    with v1.Session(server.target, graph=graph) as session:
        session.run(init)
        session.run(make_step)
        epoch = session.run(steps.begin_epoch, {steps.known_epoch: 0})[1]
    with v1.Session(server.target, graph=alone) as session:
        assert [*session.run(steps.news.name)] == [*session.run(steps.wait.name)] == [3, epoch]
        assert session.run(steps.exchange.name, {steps.request.name: request})[0][0] == 3
