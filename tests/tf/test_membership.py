"""What sessions of this process share on a server, and how long it is in the membership table."""

from __future__ import annotations

import gc
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from asynchooks import SharedSessionCreator
from asynchooks._engine.base import Slot
from asynchooks._engine.current import current_engine
from asynchooks.tf.cluster._membership_client import MembershipClient, Notification
from asynchooks.tf.cluster._membership_table import Place
from asynchooks.tf.cluster._server import Server

from .models import ChiefSessionCreator, Model, counting_model, let_others_run, monitored
from .servers import ServerProcess, chief_of, creator_of, listening, worker_of

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


async def comes(fact: Callable[[], bool]) -> None:
    """Wait until something is so, that other threads do."""
    with anyio.fail_after(60):
        while not await anyio.to_thread.run_sync(fact):  # noqa: ASYNC110 - they set no event
            await anyio.sleep(0.01)


NumOthers = Callable[[], int]


@pytest.fixture
def neighbour(server: ServerProcess) -> Iterator[Callable[[Model], NumOthers]]:
    """Another process joins the table; it counts the others there."""
    with ExitStack() as stack:

        def join(model: Model) -> NumOthers:
            client = MembershipClient(Place.of(model.step), server.target, None, 4242, 10**9)
            stack.enter_context(closing(client)).take_slot()
            return lambda: int(np.count_nonzero(client.heartbeat()[1][:, 0])) - 1

        yield join


@pytest.mark.faults
async def test_a_process_stays_until_the_last_worker_of_a_shared_session_has_left(
    server: ServerProcess, neighbour: Callable[[Model], NumOthers]
) -> None:
    model = counting_model()
    shared = SharedSessionCreator(creator_of(ChiefSessionCreator, server, model))
    async with monitored(model.graph, None, shared) as session:
        num_others = await anyio.to_thread.run_sync(neighbour, model)
        await comes(lambda: num_others() == 1)
        async with monitored(model.graph, None, shared):
            pass
        assert session.global_step.statistics().source is not None
        assert await session.run(model.train_op) == 1
        assert await anyio.to_thread.run_sync(num_others) == 1
    assert session.global_step.statistics().source is None
    await comes(lambda: num_others() == 0)


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
            self.thread = threading.current_thread()
            self.is_inside.set()
            assert self.may_go_on.wait(60)
        session = super().create_session()
        self.log.append(f"made {number}")
        return session


@pytest.mark.faults
async def test_a_session_that_comes_after_its_task_was_cancelled_joins_nothing(
    server: ServerProcess,
) -> None:
    model = counting_model()
    creator = creator_of(Held, server, model, heartbeat_secs=5.0)
    known = Server.at(server.target, "global_step")  # as the session will find it
    assert known is not None
    async with anyio.create_task_group() as group:

        async def train() -> None:
            async with monitored(model.graph, None, creator, stop_grace_period_secs=0):
                pytest.fail("it was cancelled before it was there")

        group.start_soon(train)
        await anyio.to_thread.run_sync(creator.is_inside.wait)
        group.cancel_scope.cancel()
    creator.may_go_on.set()
    await anyio.to_thread.run_sync(creator.thread.join, 60)
    assert not creator.thread.is_alive()
    assert creator.log == ["begins 0", "made 0"]
    assert known.global_step.statistics().source is None


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


@pytest.mark.faults
async def test_a_slot_is_freed_though_the_server_was_silent_at_the_end(
    server: ServerProcess, neighbour: Callable[[Model], NumOthers]
) -> None:
    model = counting_model()
    session = chief_of(server, model, stop_grace_period_secs=0.1)
    lost = threading.Event()  # a thread says so
    await session.__aenter__()
    num_others = await anyio.to_thread.run_sync(neighbour, model)
    await comes(lambda: num_others() == 1)
    with listening("The source of global_step is lost", lost.set):
        server.stop()
        assert await anyio.to_thread.run_sync(lost.wait, 60)
    with anyio.move_on_after(5), anyio.CancelScope() as scope:
        scope.cancel()
        await session.__aexit__(None, None, None)
    assert session.global_step.statistics().source is None
    server.go_on()
    await comes(lambda: num_others() == 0)


@pytest.mark.faults
async def test_a_process_in_a_late_slot_is_notified_of_a_new_epoch_at_once(
    server: ServerProcess,
) -> None:
    model = counting_model()
    place = Place.of(model.step)
    received: list[Notification] = []
    with ExitStack() as stack:
        async with chief_of(server, model):
            for each in range(10):
                late = MembershipClient(place, server.target, None, 4000 + each, 10**9)
                stack.enter_context(closing(late))
                await anyio.to_thread.run_sync(late.take_slot)
            assert late.slot >= 8
            late.listen(received.append, lambda: None)
            assert received == []
            async with chief_of(server, counting_model()):
                await comes(lambda: len(received) > 0)
        assert received[-1].epoch > late.first.epoch


def test_one_address_and_step_are_one_server_as_long_as_it_is_used() -> None:
    master = "grpc://127.0.0.1:1"
    assert Server.at("", "global_step") is None
    assert Server.at("local", "global_step") is None
    server = Server.at(master, "global_step")
    assert Server.at(master, "global_step") is server
    assert Server.at(master, "other_step") is not server
    assert Server.at("grpc://127.0.0.1:2", "global_step") is not server
    assert server is not None
    server.global_step.publish(3)
    del server
    gc.collect()
    again = Server.at(master, "global_step")
    assert again is not None
    assert again.global_step.value == 0, "forgotten with its last user"


async def test_a_waiter_for_a_chief_is_woken_by_one_that_was_not_seen() -> None:
    server, engine, chief = Server("grpc://127.0.0.1:1", "step"), current_engine(), Slot
    server.expect_chief(chief)
    assert server.has_chief_to_come
    log: list[str] = []

    async def wait() -> None:
        await server.wait_for_chief(engine, 0, math.inf)
        log.append("woken")

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        group.start_soon(wait)
        await let_others_run()
        log.append("comes")
        server.note_chief(chief, has_come=True)
    assert log == ["comes", "woken", "woken"]
    assert not server.has_chief_to_come
    await server.wait_for_chief(engine, 0, math.inf)  # it has come already
    begun = engine.now()
    await server.wait_for_chief(engine, 1, begun + 0.01)  # no other comes
    assert engine.now() - begun >= 0.01


async def test_a_cancelled_wait_for_a_chief_leaves_nothing_behind() -> None:
    server, engine = Server("grpc://127.0.0.1:1", "step"), current_engine()
    async with anyio.create_task_group() as group:
        group.start_soon(server.wait_for_chief, engine, 0, math.inf)
        await let_others_run()
        group.cancel_scope.cancel()
    assert not server._slots


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
async def test_old_objects_are_left_out_until_the_last_session_closes(
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


@pytest.mark.faults
@pytest.mark.usefixtures("nothing_frozen")
async def test_what_the_program_has_frozen_stays_so(server: ServerProcess) -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    new = Cycle()
    async with chief_of(server, counting_model()):
        assert gc.get_freeze_count() <= count
    assert gc.get_freeze_count() > 100_000
    since = weakref.ref(new)
    del new
    gc.collect()
    assert since() is None


@pytest.mark.usefixtures("nothing_frozen")
async def test_a_session_in_this_process_leaves_collections_alone() -> None:
    async with monitored(counting_model().graph):
        assert gc.get_freeze_count() == 0
