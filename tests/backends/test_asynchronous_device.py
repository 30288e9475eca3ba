"""Steps on a device that computes later, as CUDA does: what "auto" decides, and who waits where."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    NanTensorHook,
    SessionRunHook,
    StopAtStepHook,
)

from ..support.helpers import another_task

pytestmark = pytest.mark.anyio

SECS = 0.006
"""What a step takes on the device: more than "auto" lets hold the event loop."""


class Device:
    """A stream: what is queued runs in order, later; a full queue makes the caller wait."""

    def __init__(self, max_queued: int = 0) -> None:
        self._jobs: queue.Queue[Future[float] | None] = queue.Queue(max_queued)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def launch(self) -> DeviceNumber:
        number: Future[float] = Future()
        self._jobs.put(number)
        return DeviceNumber(number)

    def _serve(self) -> None:
        while (number := self._jobs.get()) is not None:
            time.sleep(SECS)  # computes, and holds no GIL
            number.set_result(0.5)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()


class DeviceNumber:
    """A tensor of shape () on the device; to read it is a synchronisation."""

    shape = ()
    waited_in: list[int]

    def __init__(self, value: Future[float]) -> None:
        self._value = value

    def __float__(self) -> float:
        if not self._value.done():
            DeviceNumber.waited_in.append(threading.get_ident())
        return self._value.result()

    def __eq__(self, other: object) -> Any:
        return self  # a comparison is queued, too, and read by `bool`

    def __bool__(self) -> bool:
        return float(self) > 0

    __hash__ = object.__hash__


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    DeviceNumber.waited_in = []
    device = Device(getattr(request, "param", 0))
    yield device
    device.close()


async def places_of(step: Any, num_steps: int, *hooks: SessionRunHook) -> list[bool]:
    """For each step, whether it ran on the event loop, where others could run meanwhile."""
    loop, places = threading.get_ident(), []

    def noted() -> dict[str, Any]:
        places.append(threading.get_ident() == loop)
        return {"loss": step()}

    stop = StopAtStepHook(last_step=num_steps)
    creator = FunctionSessionCreator(noted)
    async with another_task(), MonitoredSession([stop, *hooks], creator) as session:
        while not session.should_stop():
            await session.run("loss")
    return places


async def test_a_step_that_reads_its_loss_is_timed_with_the_device_and_leaves_the_loop(
    device: Device,
) -> None:
    places = await places_of(lambda: float(device.launch()), 14)
    assert places == [False] * 14
    assert threading.get_ident() not in DeviceNumber.waited_in


async def test_a_step_that_only_queues_its_work_stays_and_a_hook_that_reads_holds_the_loop(
    device: Device,
) -> None:
    places = await places_of(device.launch, 14, NanTensorHook("loss"))
    assert places[0] is False
    assert sum(places) > 7, "queueing is fast, unless another process has the processor"
    assert DeviceNumber.waited_in.count(threading.get_ident()) > 7


@pytest.mark.parametrize("device", [4], indirect=True)
async def test_a_full_queue_makes_queueing_slow_and_the_step_leaves_the_loop(
    device: Device,
) -> None:
    places = await places_of(device.launch, 24)
    assert sum(places[-8:]) <= 2, "a look at whether it is fast again, or two"
