"""How long a process stays in a server's membership table, and which others may change that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from asynchooks import SharedSessionCreator
from asynchooks.tf.cluster._membership_client import MembershipClient, Notification
from asynchooks.tf.cluster._membership_table import Place
from asynchooks.tf.cluster._server import Server

from .models import ChiefSessionCreator, Model, counting_model, monitored
from .servers import ServerProcess, listening, session_of

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow, pytest.mark.faults]


async def comes(fact: Callable[[], bool]) -> None:
    """Wait until something is so, that other threads do."""
    with anyio.fail_after(60):
        while True:
            if await anyio.to_thread.run_sync(fact):
                return
            await anyio.sleep(0.01)


class Neighbour:
    """Another process in the table, which reads the slots."""

    def __init__(self, server: ServerProcess, model: Model) -> None:
        self._client = MembershipClient(Place.of(model.step), server.target, None, 4242, 10**9)
        self._client.take_slot()
        self.slot = self._client.slot

    def slots(self) -> np.ndarray:
        """int64, shape (slots, 4): process id, steps held, heartbeats, microseconds between."""
        return self._client.heartbeat()[1]

    def num_others(self) -> int:
        return int(np.count_nonzero(self.slots()[:, 0])) - 1

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def neighbours(server: ServerProcess) -> Iterator[Callable[[Model], Neighbour]]:
    made: list[Neighbour] = []

    def make(model: Model) -> Neighbour:
        made.append(Neighbour(server, model))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def test_a_process_stays_until_the_last_worker_of_a_shared_session_has_left(
    server: ServerProcess, neighbours: Any
) -> None:
    model = counting_model()
    with model.graph.as_default():
        shared = SharedSessionCreator(ChiefSessionCreator(master=server.target, heartbeat_secs=0.5))
    async with monitored(model.graph, None, shared) as session:
        neighbour = await anyio.to_thread.run_sync(neighbours, model)
        await comes(lambda: neighbour.num_others() == 1)
        async with monitored(model.graph, None, shared):
            pass
        assert session.global_step.statistics().source is not None
        assert await session.run(model.train_op) == 1
        assert await anyio.to_thread.run_sync(neighbour.num_others) == 1
    assert session.global_step.statistics().source is None
    await comes(lambda: neighbour.num_others() == 0)


class Held(ChiefSessionCreator):
    """Its first `create_session` waits, in its thread, until it is let go on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_inside, self.may_go_on = threading.Event(), threading.Event()
        self.log: list[str] = []
        self.threads: list[threading.Thread] = []
        self._guard = threading.Lock()

    def create_session(self) -> Any:
        self.threads.append(threading.current_thread())
        with self._guard:
            number = len([each for each in self.log if each.startswith("begins")])
            self.log.append(f"begins {number}")
        if number == 0:
            self.is_inside.set()
            assert self.may_go_on.wait(60)
        session = super().create_session()
        self.log.append(f"made {number}")
        return session


async def test_a_session_that_comes_after_its_task_was_cancelled_joins_nothing(
    server: ServerProcess,
) -> None:
    model = counting_model()
    with model.graph.as_default():
        creator = Held(master=server.target, heartbeat_secs=5.0)
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
    await anyio.to_thread.run_sync(creator.threads[0].join, 60)
    assert not creator.threads[0].is_alive()
    assert creator.log == ["begins 0", "made 0"]
    assert known.global_step.statistics().source is None


async def test_a_chief_that_was_left_behind_restores_nothing_beside_the_one_that_followed(
    server: ServerProcess,
) -> None:
    model = counting_model()
    with model.graph.as_default():
        creator = Held(master=server.target, heartbeat_secs=0.5)
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


async def test_a_slot_is_freed_though_the_server_was_silent_at_the_end(
    server: ServerProcess, neighbours: Any
) -> None:
    model = counting_model()
    session = session_of(server, model, is_chief=True, stop_grace_period_secs=0.1)
    lost = threading.Event()  # a thread says so
    await session.__aenter__()
    neighbour = await anyio.to_thread.run_sync(neighbours, model)
    await comes(lambda: neighbour.num_others() == 1)
    with listening("The source of global_step is lost", lost.set):
        server.stop()
        assert await anyio.to_thread.run_sync(lost.wait, 60)
    with anyio.move_on_after(5), anyio.CancelScope() as scope:
        scope.cancel()
        await session.__aexit__(None, None, None)
    assert session.global_step.statistics().source is None
    server.go_on()
    await comes(lambda: neighbour.num_others() == 0)


async def test_a_process_in_a_late_slot_is_notified_of_a_new_epoch_at_once(
    server: ServerProcess,
) -> None:
    model = counting_model()
    place = Place.of(model.step)
    clients = [
        MembershipClient(place, server.target, None, 4000 + each, 10**9) for each in range(10)
    ]
    received: list[Notification] = []
    try:
        async with session_of(server, model, is_chief=True):
            for each in clients:
                await anyio.to_thread.run_sync(each.take_slot)
            late = clients[-1]
            assert late.slot >= 8
            late.listen(received.append, lambda: None)
            assert received == []
            async with session_of(server, counting_model(), is_chief=True):
                await comes(lambda: len(received) > 0)
        assert received[-1].epoch > late.first.epoch
    finally:
        for each in clients:
            each.close()
