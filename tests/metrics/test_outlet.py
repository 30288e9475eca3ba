"""The queue and the thread of one sink."""

from __future__ import annotations

import json
import threading
from typing import Any

import anyio.to_thread
import numpy as np
import pytest

from asynchooks._engine.current import current_engine
from asynchooks.metrics import Histogram, Point, Resume, Sink
from asynchooks.metrics._outlet import Outlet
from asynchooks.simulation import Simulation

pytestmark = pytest.mark.anyio


class Kept(Sink):
    """Keeps points in a list, as long as it is let; `flush` returns how many."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, dict[str, Any]]] = []
        self.calls: list[str] = []
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_asked = threading.Event()
        self.fails_at: set[int] = set()
        self.resume: Resume | None = None
        self.thread = 0

    def open(self, resume: Resume) -> None:
        self.resume, self.thread = resume, threading.get_ident()
        self.calls.append("open")

    def write(self, point: Point) -> None:
        self.is_asked.set()
        self.may_write.wait()
        assert threading.get_ident() == self.thread
        if point.step in self.fails_at:
            raise ConnectionError(f"no {point.step}")
        self.kept.append((point.step, dict(point.values)))

    def flush(self) -> int:
        self.calls.append("flush")
        return len(self.kept)

    def rewind(self, step: int) -> None:
        self.kept = [each for each in self.kept if each[0] <= step]

    def close(self) -> None:
        self.calls.append("close")


async def opened(sink: Sink, *, step: int = 0, pending: Any = (), **options: Any) -> Outlet:
    outlet = Outlet(sink, **options)
    outlet.claim()
    await outlet.open(current_engine(), Resume(step, None), pending)
    return outlet


async def close(outlet: Outlet, secs: float = 30) -> None:
    await outlet.close(current_engine().now() + secs)


def steps(sink: Kept) -> list[int]:
    return [step for step, _ in sink.kept]


async def test_points_reach_the_sink_in_order_and_are_flushed_before_it_is_closed() -> None:
    sink = Kept()
    outlet = await opened(sink)
    for step in range(1, 101):
        outlet.put(step, {"loss": 1 / step})
    await close(outlet)
    assert sink.kept == [(step, {"loss": 1 / step}) for step in range(1, 101)]
    assert (sink.calls[0], sink.calls[-2:]) == ("open", ["flush", "close"])
    assert outlet.num_dropped == 0
    assert outlet.state_dict() == {"position": 100, "pending": []}


async def test_values_of_one_step_that_wait_become_one_point() -> None:
    sink = Kept()
    sink.may_write.clear()
    outlet = await opened(sink)
    outlet.put(1, {"loss": 1.0})
    sink.is_asked.wait()
    outlet.put(2, {"loss": 0.5})
    outlet.put(2, {"rate": 0.1})
    outlet.put(1, {"late": 3.0})  # of an evaluation that took longer
    outlet.put(2, {"loss": 9.0})  # of two values of one name and step the first stays
    sink.may_write.set()
    await close(outlet)
    assert sink.kept == [
        (1, {"loss": 1.0}), (1, {"late": 3.0}), (2, {"loss": 0.5, "rate": 0.1}),
    ]  # fmt: skip


async def test_a_stuck_sink_has_every_second_point_dropped_and_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Kept()
    sink.may_write.clear()
    outlet = await opened(sink, capacity=8)
    outlet.put(1, {"loss": 1.0})
    sink.is_asked.wait()
    for step in range(2, 1002):
        outlet.put(step, {"loss": 1.0})
        assert len(outlet._queue) <= 8
    assert [r.getMessage() for r in caplog.records if "keep up" in r.getMessage()] == [
        f"{sink!r} does not keep up: every second of the 8 points that wait for it is dropped, "
        "whenever there are so many. Training goes on"
    ]
    sink.may_write.set()
    await close(outlet)
    assert (steps(sink)[0], steps(sink)[-1]) == (1, 1001)
    assert steps(sink) == sorted(steps(sink))
    assert len(sink.kept) + outlet.num_dropped == 1001
    assert f"{outlet.num_dropped} points of this session were not written" in caplog.text


async def test_a_sink_that_always_has_more_to_write_is_flushed_and_holds_few_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asynchooks.metrics._outlet._UNFLUSHED_SECS", 0.0)

    class Behind(Kept):
        most_unflushed = 0

        def write(self, point: Point) -> None:
            super().write(point)
            if point.step < 1000:  # training is always ahead of it
                outlet.put(point.step + 2, {"loss": 1.0})
            self.most_unflushed = max(self.most_unflushed, len(outlet._unflushed))

    sink = Behind()
    sink.may_write.clear()
    outlet = await opened(sink)
    for step in (1, 2):
        outlet.put(step, {"loss": 1.0})
    sink.is_asked.wait()
    sink.may_write.set()
    await close(outlet)
    assert steps(sink) == list(range(1, 1002))
    assert sink.calls.count("flush") > 100
    assert sink.most_unflushed <= 2


async def test_arrays_of_histograms_that_wait_take_a_limited_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asynchooks.metrics._outlet._ARRAY_BYTES", 10 * 800)
    sink = Kept()
    sink.may_write.clear()
    outlet = await opened(sink)
    outlet.put(1, {"loss": 1.0})
    sink.is_asked.wait()
    for step in range(2, 202):
        outlet.put(step, {"loss": 1.0, "weights": np.zeros(100)} if step % 2 else {"loss": 1.0})
        waiting = [each.values for each in outlet._queue.values()]
        assert sum("weights" in values for values in waiting) <= 10
    assert ["weights" in values for values in waiting[-2:]] == [False, True]
    sink.may_write.set()
    await close(outlet)
    assert [step for step in range(2, 202, 2) if step not in steps(sink)] == []
    assert len(sink.kept) + outlet.num_dropped == 201


async def test_a_sink_is_opened_again_when_the_thread_that_was_stuck_in_it_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Kept()
    sink.may_write.clear()
    first = await opened(sink)
    first.put(1, {"loss": 1.0})
    sink.is_asked.wait()
    assert Outlet.is_used(sink)
    await close(first, secs=0)
    assert not Outlet.is_used(sink)
    second = await opened(sink)
    second.put(2, {"loss": 1.0})
    sink.may_write.set()
    await close(second)
    assert [each for each in sink.calls if each != "flush"] == ["open", "close", "open", "close"]
    assert steps(sink) == [1, 2]


async def test_what_ends_a_thread_elsewhere_is_an_error_of_the_sink_like_others() -> None:
    class Exits(Kept):
        def write(self, point: Point) -> None:
            raise SystemExit(1)

    sink = Exits()
    outlet = await opened(sink)
    outlet.put(1, {"loss": 1.0})
    await close(outlet)
    assert (outlet.num_dropped, sink.calls[-1]) == (1, "close")


async def test_what_waited_in_the_checkpoint_is_written_at_once() -> None:
    pending = [{"step": 2, "time": 1.0, "values": {"loss": 1.0}}]
    sink = Kept()
    outlet = await opened(sink, step=2, pending=pending)
    assert await anyio.to_thread.run_sync(sink.is_asked.wait, 10)  # no point is put
    await close(outlet)
    assert steps(sink) == [2]


async def test_the_thread_has_ended_when_the_sink_is_closed() -> None:
    for _ in range(20):
        outlet = await opened(Kept())
        outlet.put(1, {"loss": 1.0})
        await close(outlet)
        assert "asynchooks-Kept" not in [each.name for each in threading.enumerate()]


async def test_a_sink_that_does_not_flush_is_not_given_points_again() -> None:
    class Plain(Sink):
        may_write = threading.Event()

        def write(self, point: Point) -> None:
            self.may_write.wait()

    outlet = await opened(Plain())
    outlet.put(1, {"loss": 1.0})
    assert outlet.state_dict() == {"position": None, "pending": []}
    Plain.may_write.set()
    await close(outlet)


async def test_points_that_come_after_the_end_count_as_dropped() -> None:
    sink = Kept()
    outlet = await opened(sink)
    await close(outlet)
    outlet.put(1, {"loss": 1.0})
    assert (steps(sink), outlet.num_dropped) == ([], 1)


async def test_a_sink_that_hangs_is_left_alone_when_time_is_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Kept()
    sink.may_write.clear()
    outlet = await opened(sink)
    for step in range(1, 11):
        outlet.put(step, {"loss": 1.0})
    sink.is_asked.wait()
    await close(outlet, secs=0)
    assert "left alone; 10 points of this session were not written" in caplog.text
    await close(outlet, secs=0)  # once more changes nothing
    assert caplog.text.count("left alone") == 1
    sink.may_write.set()


async def test_what_a_sink_raises_is_logged_once_and_costs_that_point_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Kept()
    errors: list[BaseException] = []
    sink.fails_at = {2, 3}
    outlet = await opened(sink, on_error=errors.append)
    for step in range(1, 6):
        outlet.put(step, {"loss": 1.0})
    await close(outlet)
    assert steps(sink) == [1, 4, 5]
    assert outlet.num_dropped == 2
    assert [str(error) for error in errors] == ["no 2"]
    failures = [r for r in caplog.records if "failed, and may go on failing" in r.getMessage()]
    assert [r.exc_info[1] for r in failures if r.exc_info] == errors


class FailsToFlush(Kept):
    def flush(self) -> int:
        raise OSError("no space left")


async def test_what_cannot_be_made_durable_counts_as_dropped() -> None:
    outlet = await opened(FailsToFlush())
    outlet.put(1, {"loss": 1.0})
    await close(outlet)
    assert outlet.num_dropped == 1
    assert outlet.state_dict() == {"position": None, "pending": []}


class FailsToOpen(Kept):
    def open(self, resume: Resume) -> None:
        raise PermissionError("not yours")


async def test_a_sink_that_cannot_be_opened_is_given_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = FailsToOpen()
    outlet = await opened(sink)
    outlet.put(1, {"loss": 1.0})
    await close(outlet)
    assert (sink.kept, sink.calls, outlet.num_dropped) == ([], [], 1)
    assert "1 points of this session were not written" in caplog.text


class OpensLater(Kept):
    open_secs = 30.0
    num_attempts = 0

    def open(self, resume: Resume) -> None:
        self.num_attempts += 1
        if self.num_attempts == 1:
            raise ConnectionError("not yet")
        super().open(resume)


async def test_opening_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynchooks.metrics._outlet._FIRST_PAUSE_SECS", 0.0)
    sink = OpensLater()
    sink.is_asked.clear()
    outlet = await opened(sink)
    outlet.put(1, {"loss": 1.0})
    sink.is_asked.wait()
    await close(outlet)
    assert sink.kept == [(1, {"loss": 1.0})]


async def test_the_state_holds_what_is_not_durable_and_the_next_life_writes_it_first() -> None:
    sink = Kept()
    sink.may_write.clear()
    outlet = await opened(sink)
    outlet.put(1, {"loss": 1.0, "nan": float("nan")})
    sink.is_asked.wait()
    outlet.put(2, {"weights": np.array([1.0, 2.0])})
    state = outlet.state_dict()
    assert state["position"] == 0  # the sink says where it writes to before the first point
    assert [each["step"] for each in state["pending"]] == [1, 2]
    sink.may_write.set()
    await close(outlet)
    later = Kept()
    outlet = await opened(later, step=2, pending=state["pending"])
    outlet.put(3, {"loss": 0.5})
    await close(outlet)
    assert later.resume == Resume(2, None)
    assert steps(later) == [1, 2, 3]
    assert str(later.kept[0]) == str((1, {"loss": 1.0, "nan": float("nan")}))
    spread = later.kept[1][1]["weights"]
    assert isinstance(spread, Histogram)
    assert (spread.least, spread.greatest, spread.num) == (1.0, 2.0, 2)


async def test_a_session_that_is_set_back_takes_back_what_the_sink_has_and_what_waits() -> None:
    sink = Kept()
    outlet = await opened(sink)
    for step in (1, 2, 3):
        outlet.put(step, {"loss": 1.0})
    sink.is_asked.wait()
    outlet.rewind(1)
    outlet.rewind(5)  # not back: nothing is taken back
    outlet.put(2, {"loss": 0.5})
    await close(outlet)
    assert sink.kept == [(1, {"loss": 1.0}), (2, {"loss": 0.5})]


async def test_a_set_back_that_is_not_durable_is_part_of_the_state() -> None:
    sink = Kept()
    sink.may_write.clear()
    outlet = await opened(sink)
    for step in (1, 2, 3):
        outlet.put(step, {"loss": 1.0})
    sink.is_asked.wait()
    outlet.rewind(1)
    outlet.put(2, {"loss": 0.5})
    pending = outlet.state_dict()["pending"]
    sink.may_write.set()
    await close(outlet)
    later = Kept()
    await close(await opened(later, step=2, pending=json.loads(json.dumps(pending))))
    assert later.kept == [(1, {"loss": 1.0}), (2, {"loss": 0.5})]


async def test_closing_may_be_cancelled_and_called_again() -> None:
    import anyio

    sink = Kept()
    sink.may_write.clear()
    outlet = await opened(sink)
    outlet.put(1, {"loss": 1.0})
    with anyio.move_on_after(0) as scope:
        await close(outlet)
    assert scope.cancelled_caught
    sink.may_write.set()
    await close(outlet)
    assert sink.calls[-1] == "close"


async def test_any_thread_may_put_points() -> None:
    sink = Kept()
    outlet = await opened(sink)

    def put(name: str) -> None:
        for step in range(1, 200):
            outlet.put(step, {name: 1.0})

    threads = [threading.Thread(target=put, args=(str(index),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    await close(outlet)
    seen = sorted((step, name) for step, values in sink.kept for name in values)
    assert seen == [(step, name) for step in range(1, 200) for name in "0123"]
    assert outlet.num_dropped == 0


@pytest.mark.parametrize("backend", ["asyncio", "trio", "turbo"])
def test_in_virtual_time_there_is_no_thread(backend: Any) -> None:
    sink = Kept()
    simulation = Simulation(backend=backend)

    async def main() -> Any:
        outlet = await opened(sink)
        for step in range(1, 6):
            await simulation.sleep(1.0)
            outlet.put(step, {"now": simulation.now})
        state = outlet.state_dict()
        await close(outlet)
        return state

    assert simulation.run(main) == {"position": 5, "pending": []}
    assert sink.thread == threading.get_ident()
    assert steps(sink) == [1, 2, 3, 4, 5]
    assert sink.calls[-1] == "close"
