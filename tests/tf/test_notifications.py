"""Which runs move the global step, and what they tell other processes in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from asynchooks.tf._board_ops import BoardOps
from asynchooks.tf._board_pieces import NUM_SEATS, num_boxes_for
from asynchooks.tf._notices import Notices

from .models import Model, counting_model

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = pytest.mark.tensorflow


def noticed(model: Model) -> Notices:
    with model.graph.as_default():
        return Notices(model.graph, model.step)


def with_step(*, use_resource: bool = True) -> tuple[Any, Any]:
    graph = tf.Graph()
    with graph.as_default():
        v1.get_variable_scope().set_use_resource(use_resource)
        return graph, v1.train.get_or_create_global_step()


@pytest.mark.parametrize("use_resource", [True, False])
def test_a_run_that_moves_the_step_is_told_of_in_the_same_run(use_resource: bool) -> None:
    graph, step = with_step(use_resource=use_resource)
    with graph.as_default():
        weight = v1.get_variable("weight", initializer=1.0)
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(weight**2, step)
        notices = Notices(graph, step)
    fetches = {"train": train_op, "weight": weight}
    fused = notices.fused("any key", fetches)
    assert fused is not None
    assert fused[0] is fetches
    assert fused[1] is not None
    assert notices.fused("any key", fetches) is fused, "found once"
    with v1.Session(graph=graph) as session:
        session.run(init_of(graph))
        session.run(notices.prepare)
        for count in (1, 2, 3):
            _, (told, _, _) = session.run(fused)
            assert told == count, "the step after the update"


def init_of(graph: Any) -> Any:
    with graph.as_default():
        return v1.global_variables_initializer()


def test_a_run_that_leaves_the_step_alone_tells_nothing() -> None:
    graph, step = with_step()
    with graph.as_default():
        other = v1.get_variable("other", initializer=0.0)
        moved = v1.assign_add(other, 1.0)
        read = step + 1
        init = step.initializer
        v1.train.Saver()
        notices = Notices(graph, step)
    for fetches in (moved, [read, "global_step:0"], {"a": step}, init, "save/restore_all"):
        assert notices.fused(None, fetches) is None, fetches


@pytest.mark.parametrize(("step_of_a_run", "stride"), [(1, 1), (3, 3)])
def test_the_stride_is_what_the_graph_adds(step_of_a_run: int, stride: int) -> None:
    graph, step = with_step()
    with graph.as_default():
        v1.assign_add(step, step_of_a_run)
        assert Notices(graph, step).stride == stride


def test_two_updates_in_one_run_and_one_within_a_condition_need_a_run_of_their_own() -> None:
    graph, step = with_step()
    with graph.as_default():
        first, second = v1.assign_add(step, 1), v1.assign_add(step, 1)
        notices = Notices(graph, step)
    both = [first, second]
    assert notices.fused(None, both) == (both, None)
    assert notices.fused(None, first) is not None
    with v1.Session(graph=graph) as session:
        session.run(init_of(graph))
        session.run(notices.prepare)
        session.run(both)
        assert session.run(notices.now)[0] == 2


@pytest.fixture
def target() -> Iterator[str]:
    server = tf.distribute.Server.create_local_server()
    yield server.target  # noqa: PT022 - the server lives as long as the test


def test_boxes_are_as_many_as_seats_have_been_taken_and_some_to_spare() -> None:
    assert [num_boxes_for(num) for num in (0, 1, 8, 9, 16, 17, 255, 10_000)] == [
        8, 8, 8, 16, 16, 32, NUM_SEATS, NUM_SEATS,
    ]  # fmt: skip


def test_a_finalized_graph_grows_until_it_rings_the_last_process_that_came(target: str) -> None:
    model = counting_model()
    notices = noticed(model)
    init = init_of(model.graph)
    model.graph.finalize()
    board = tf.Graph()
    ops = BoardOps(board, notices.place)
    with board.as_default():
        request = v1.placeholder(tf.int64, (None,))
    join, arm, wait = ops.join(request), ops.arm(request), ops.wait(11)
    with v1.Session(target, graph=model.graph) as session, v1.Session(target, graph=board) as other:
        session.run(init)
        session.run(notices.prepare)
        seats = [other.run(join, {request: [owner, 1000]})[3] for owner in range(1, 13)]
        assert seats == list(range(12))
        assert other.run(join, {request: [5, 1000]})[3] == 4, "its own, when it comes again"
        other.run(arm, {request: [11, 2]})
        told = [session.run(notices.fused(None, model.train_op))[1] for _ in range(2)]
        assert told[-1].tolist()[::2] == [2, 12], "the step, and how many seats have been taken"
        assert not notices.is_large_enough(12)
        notices.grow(12)
        assert notices.is_large_enough(12)
        assert model.graph.finalized
        session.run(notices.fused(None, model.train_op))
        assert other.run(wait)[0] == 3
