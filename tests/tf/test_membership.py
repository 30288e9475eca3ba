"""What sessions of this process share on a server, and how long other processes' steps are fed."""

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asynchooks import SharedSessionCreator

from .models import ChiefSessionCreator, Model, counting_model, monitored, tf, v1
from .servers import ServerProcess, chief_of, creator_of, listening, worker_of


@pytest.mark.faults
async def test_steps_of_others_come_until_the_last_worker_of_a_shared_session_has_left(
    server: ServerProcess,
) -> None:
    model = counting_model()
    shared = SharedSessionCreator(creator_of(ChiefSessionCreator, server, model))
    async with monitored(model.graph, None, shared) as session:
        async with monitored(model.graph, None, shared):
            pass
        assert session.global_step.statistics().source is not None
        assert await session.run(model.train_op) == 1
    assert session.global_step.statistics().source is None


class Held(ChiefSessionCreator):
    """Its first `create_session` waits, in its thread, until it is let go on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_inside, self.may_go_on = threading.Event(), threading.Event()
        self.log: list[str] = []
        self._numbers = itertools.count()

    def create_session(self) -> Any:
        number = next(self._numbers)
        self.log.append(f"begins {number}")
        if number == 0:
            self.is_inside.set()
            assert self.may_go_on.wait(60)
        session = super().create_session()
        self.log.append(f"made {number}")
        return session


@pytest.mark.faults
async def test_a_chief_that_was_left_behind_restores_nothing_beside_the_one_that_followed(
    server: ServerProcess,
) -> None:
    model = counting_model()
    creator = creator_of(Held, server, model)
    is_open, steps = anyio.Event(), []
    async with anyio.create_task_group() as group:

        async def train() -> None:
            async with monitored(model.graph, None, creator) as session:
                steps.extend([await session.run(model.train_op) for _ in range(3)])
                is_open.set()
                await anyio.sleep_forever()

        group.start_soon(train)
        await anyio.to_thread.run_sync(creator.is_inside.wait)
        recreates = anyio.Event()
        with listening("recreating it", recreates.set):
            server.stop()
            await recreates.wait()
        server.go_on()
        assert creator.log == ["begins 0"], "the other one waits for its turn"
        creator.may_go_on.set()
        with anyio.fail_after(60):
            await is_open.wait()
        assert creator.log == ["begins 0", "made 0", "begins 1", "made 1"]
        assert steps == [1, 2, 3]
        group.cancel_scope.cancel()


def test_one_address_and_step_have_one_step_as_long_as_it_is_used() -> None:
    def handle_at(master: str) -> Any:
        with counting_model().graph.as_default():
            return ChiefSessionCreator(master=master).handle()

    one, again = handle_at("grpc://127.0.0.1:1"), handle_at("grpc://127.0.0.1:1")
    assert one.global_step.multi_process
    one.global_step.publish(3)
    assert again.global_step.value == 3
    assert handle_at("grpc://127.0.0.1:2").global_step.value == 0
    assert not handle_at("").global_step.multi_process


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """No object is left out of garbage collections before the test; the old ones are after it."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.mark.faults
@pytest.mark.usefixtures("nothing_frozen")
async def test_old_objects_are_left_out_of_collections_until_the_last_session_closes(
    server: ServerProcess,
) -> None:
    old = Cycle()
    before = weakref.ref(old)
    async with chief_of(server, counting_model()):
        async with worker_of(server, counting_model()):
            pass
        assert gc.get_freeze_count() > 100_000, "TensorFlow's modules alone are more"
        new = Cycle()
        since = weakref.ref(new)
        del old, new
        gc.collect()
        assert before() is not None
        assert since() is None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None
    async with monitored(counting_model().graph):
        assert gc.get_freeze_count() == 0, "in this process none are"


@pytest.mark.faults
@pytest.mark.usefixtures("nothing_frozen")
async def test_what_the_program_has_frozen_stays_so(server: ServerProcess) -> None:
    gc.freeze()
    async with chief_of(server, counting_model()):
        pass
    assert gc.get_freeze_count() > 100_000


def updates_of_the_step(model: Model, use_resource: bool) -> list[tuple[Any, int]]:
    """Fetches, and by how much a run of them moves the step."""
    step = model.step
    others = {"a": [model.train_op], "b": step.read_value()}
    both = [v1.assign_add(step, 1), v1.assign_add(step, 1)]
    if use_resource:
        within = tf.cond(tf.constant(True), lambda: v1.assign_add(step, 1), step.read_value)
        both.append(within)
    return [(model.train_op, 1), (others, 1), (both[:2], 2), *((each, 1) for each in both[2:])]


@pytest.mark.faults
@pytest.mark.parametrize("use_resource", [False, True])
async def test_whatever_moves_the_step_wakes_those_who_wait_for_it_elsewhere(
    server: ServerProcess, use_resource: bool
) -> None:
    """Also where the step is colocated with a variable of the model."""

    def colocated() -> Model:
        with tf.Graph().as_default() as graph, v1.variable_scope("", use_resource=use_resource):
            with v1.colocate_with(v1.get_variable("other", []).op):
                step = v1.train.get_or_create_global_step()
            return Model(graph, step, v1.assign_add(step, 1))

    model, other = colocated(), colocated()
    with model.graph.as_default():
        updates = updates_of_the_step(model, use_resource)
    async with chief_of(server, model) as session, worker_of(server, other) as elsewhere:
        for fetches, by in updates * 2:
            before = session.global_step.value
            await session.run(fetches)
            assert session.global_step.value == before + by
            with anyio.fail_after(60):
                assert await elsewhere.global_step.wait_for(before + by) == before + by
