"""Which runs move the global step, and how they notify other processes in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from asynchooks.tf.cluster._membership_table import NUM_SLOTS, MembershipTable, num_subscribers_for
from asynchooks.tf.cluster._notifications import Notifications

from .models import Model, counting_model

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = pytest.mark.tensorflow


def notifications_of(model: Model) -> Notifications:
    with model.graph.as_default():
        return Notifications(model.graph, model.step)


def with_step(*, use_resource: bool = True) -> tuple[Any, Any]:
    graph = tf.Graph()
    with graph.as_default():
        v1.get_variable_scope().set_use_resource(use_resource)
        return graph, v1.train.get_or_create_global_step()


@pytest.mark.parametrize("use_resource", [True, False])
def test_a_run_that_moves_the_step_notifies_in_the_same_run(use_resource: bool) -> None:
    graph, step = with_step(use_resource=use_resource)
    with graph.as_default():
        weight = v1.get_variable("weight", initializer=1.0)
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(weight**2, step)
        notifications = Notifications(graph, step)
    fetches = {"train": train_op, "weight": weight}
    fused = notifications.fused("any key", fetches)
    assert fused is not None
    assert fused[0] is fetches
    assert fused[1] is not None
    assert notifications.fused("any key", fetches) is fused, "found once"
    with v1.Session(graph=graph) as session:
        session.run(init_of(graph))
        session.run(notifications.prepare)
        for count in (1, 2, 3):
            _, (said, _, _) = session.run(fused)
            assert said == count, "the step after the update"


def init_of(graph: Any) -> Any:
    with graph.as_default():
        return v1.global_variables_initializer()


def test_a_run_that_does_not_move_the_step_notifies_nothing() -> None:
    graph, step = with_step()
    with graph.as_default():
        other = v1.get_variable("other", initializer=0.0)
        moved = v1.assign_add(other, 1.0)
        read = step + 1
        init = step.initializer
        v1.train.Saver()
        notifications = Notifications(graph, step)
    for fetches in (moved, [read, "global_step:0"], {"a": step}, init, "save/restore_all"):
        assert notifications.fused(None, fetches) is None, fetches


@pytest.mark.parametrize(("step_of_a_run", "stride"), [(1, 1), (3, 3)])
def test_the_stride_is_what_the_graph_adds(step_of_a_run: int, stride: int) -> None:
    graph, step = with_step()
    with graph.as_default():
        v1.assign_add(step, step_of_a_run)
        assert Notifications(graph, step).stride == stride


def test_two_updates_in_one_run_and_one_within_a_condition_need_a_run_of_their_own() -> None:
    graph, step = with_step()
    with graph.as_default():
        first, second = v1.assign_add(step, 1), v1.assign_add(step, 1)
        notifications = Notifications(graph, step)
    both = [first, second]
    assert notifications.fused(None, both) == (both, None)
    assert notifications.fused(None, first) is not None
    with v1.Session(graph=graph) as session:
        session.run(init_of(graph))
        session.run(notifications.prepare)
        session.run(both)
        assert session.run(notifications.now)[0] == 2


@pytest.fixture
def target() -> Iterator[str]:
    server = tf.distribute.Server.create_local_server()
    yield server.target  # noqa: PT022 - the server lives as long as the test


def test_subscribers_are_as_many_as_slots_have_been_taken_and_some_to_spare() -> None:
    assert [num_subscribers_for(num) for num in (0, 1, 8, 9, 16, 17, 255, 10_000)] == [
        8, 8, 8, 16, 16, 32, NUM_SLOTS, NUM_SLOTS,
    ]  # fmt: skip


def test_a_finalized_graph_grows_until_it_notifies_the_last_process(target: str) -> None:
    model = counting_model()
    notifications = notifications_of(model)
    init = init_of(model.graph)
    model.graph.finalize()
    other_graph = tf.Graph()
    table = MembershipTable(other_graph, notifications.place)
    with other_graph.as_default():
        request = v1.placeholder(tf.int64, (None,))
    join, arm, wait = table.join(request), table.arm(request), table.wait(11)
    with (
        v1.Session(target, graph=model.graph) as session,
        v1.Session(target, graph=other_graph) as other,
    ):
        session.run(init)
        session.run(notifications.prepare)
        slots = [other.run(join, {request: [process_id, 1000]})[3] for process_id in range(1, 13)]
        assert slots == list(range(12))
        assert other.run(join, {request: [5, 1000]})[3] == 4, "its own, when it comes again"
        other.run(arm, {request: [11, 2]})
        said = [session.run(notifications.fused(None, model.train_op))[1] for _ in range(2)]
        assert said[-1].tolist()[::2] == [2, 12], "the step, and how many slots have been taken"
        assert not notifications.is_large_enough(12)
        notifications.grow(12)
        assert notifications.is_large_enough(12)
        assert model.graph.finalized
        session.run(notifications.fused(None, model.train_op))
        assert other.run(wait)[0] == 3
