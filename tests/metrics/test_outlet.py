"""The queue and the thread of one sink.

Through MetricsHook the same needs sessions, and what waits could not be chosen.
"""

import json
import threading
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from asynchooks._engine.current import current_engine
from asynchooks.metrics import Histogram, Point, Resume, Sink
from asynchooks.metrics._outlet import Outlet
from asynchooks.simulation import Simulation, current_simulation

from ..support.kept import Kept


class Gated(Kept):
    """It keeps points as long as it is let, in the thread that has opened it."""

    open_secs = 0.0

    def __init__(self, *, is_stuck: bool = False, **raises: BaseException) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.may_write, self.is_asked = threading.Event(), threading.Event()
        if not is_stuck:
            self.may_write.set()
        self.raises = raises
        self.thread = 0

    def open(self, resume: Resume) -> None:
        self._call("open")
        self.thread = threading.get_ident()
        super().open(resume)

    def write(self, point: Point) -> None:
        self.is_asked.set()
        self.may_write.wait()
        assert threading.get_ident() == self.thread
        self._call(f"write_{point.step}")
        super().write(point)

    def flush(self) -> int:
        self._call("flush")
        return super().flush()

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        if name in self.raises:
            raise self.raises[name]
        self.calls.append(name)


async def opened(sink: Sink, *, step: int = 0, pending: Any = (), **options: Any) -> Outlet:
    outlet = Outlet(sink, **options)
    outlet.claim()
    await outlet.open(current_engine(), Resume(step, None), pending)
    return outlet


async def close(outlet: Outlet, secs: float = 30) -> None:
    await outlet.close(current_engine().now() + secs)


async def stuck(sink: Gated, **options: Any) -> Outlet:
    """The outlet of a sink that hangs in its first point."""
    outlet = await opened(sink, **options)
    outlet.put(1, {"loss": 1.0})
    sink.is_asked.wait()
    return outlet


async def test_points_reach_the_sink_in_order_and_are_flushed_before_it_is_closed() -> None:
    sink = Gated()
    outlet = await opened(sink)
    for step in range(1, 101):
        outlet.put(step, {"loss": 1 / step})
    await close(outlet)
    assert sink.points == [(step, {"loss": 1 / step}) for step in range(1, 101)]
    assert (sink.calls[0], sink.calls[-2:]) == ("open", ["flush", "close"])
    assert outlet.num_dropped == 0
    assert outlet.state_dict() == {"position": 100, "pending": []}
    assert "asynchooks-Gated" not in [each.name for each in threading.enumerate()]
    outlet.put(101, {"loss": 1.0})  # which comes after the end
    assert (len(sink.points), outlet.num_dropped) == (100, 1)


async def test_values_of_one_step_that_wait_become_one_point() -> None:
    sink = Gated(is_stuck=True)
    outlet = await stuck(sink)
    outlet.put(2, {"loss": 0.5})
    outlet.put(2, {"rate": 0.1})
    outlet.put(1, {"late": 3.0})  # of an evaluation that took longer
    outlet.put(2, {"loss": 9.0})  # of two values of one name and step the first stays
    sink.may_write.set()
    await close(outlet)
    assert sink.points == [
        (1, {"loss": 1.0}),
        (1, {"late": 3.0}),
        (2, {"loss": 0.5, "rate": 0.1}),
    ]


async def test_a_stuck_sink_has_every_second_point_dropped_and_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Gated(is_stuck=True)
    outlet = await stuck(sink, capacity=8)
    for step in range(2, 1002):
        outlet.put(step, {"loss": 1.0})
    assert caplog.text.count("does not keep up: every second of the 8 points") == 1
    sink.may_write.set()
    await close(outlet)
    assert (sink.steps[0], sink.steps[-1]) == (1, 1001)
    assert 4 < len(sink.steps) <= 9
    assert sink.steps == sorted(sink.steps)
    assert len(sink.points) + outlet.num_dropped == 1001
    assert f"{outlet.num_dropped} points of this session were not written" in caplog.text


async def test_arrays_of_histograms_that_wait_take_a_limited_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asynchooks.metrics._outlet._ARRAY_BYTES", 10 * 800)
    sink = Gated(is_stuck=True)
    outlet = await stuck(sink)
    for step in range(2, 202):
        outlet.put(step, {"loss": 1.0, "weights": np.zeros(100)} if step % 2 else {"loss": 1.0})
    sink.may_write.set()
    await close(outlet)
    assert 4 < len(sink.of("weights")) <= 10
    assert set(range(2, 202, 2)) <= set(sink.steps)
    assert len(sink.points) + outlet.num_dropped == 201


async def test_a_sink_that_hangs_is_left_alone_when_time_is_up_and_opened_again_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Gated(is_stuck=True)
    first = await stuck(sink)
    for step in range(2, 11):
        first.put(step, {"loss": 1.0})
    assert Outlet.is_used(sink)
    with anyio.move_on_after(0) as scope:  # which may be cancelled, and called again
        await close(first)
    assert scope.cancelled_caught
    for _ in range(2):  # once more changes nothing
        await close(first, secs=0)
    assert caplog.text.count("left alone; 10 points of this session were not written") == 1
    assert not Outlet.is_used(sink)
    second = await opened(sink)
    second.put(11, {"loss": 1.0})
    sink.may_write.set()
    await close(second)
    assert [each for each in sink.calls if each in ("open", "close")] == 2 * ["open", "close"]
    assert sink.steps[-1] == 11


async def test_what_a_sink_raises_is_logged_once_and_costs_that_point_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors: list[BaseException] = []
    # what ends a thread elsewhere is an error of the sink like others
    sink = Gated(write_2=ConnectionError("no 2"), write_3=SystemExit(1))
    outlet = await opened(sink, on_error=errors.append)
    for step in range(1, 6):
        outlet.put(step, {"loss": 1.0})
    await close(outlet)
    assert sink.steps == [1, 4, 5]
    assert outlet.num_dropped == 2
    assert [str(error) for error in errors] == ["no 2"]
    assert caplog.text.count("failed, and may go on failing") == 1


@pytest.mark.parametrize("name", ["open", "flush"])
async def test_what_a_sink_cannot_open_or_make_durable_counts_as_dropped(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    raises: Any = {name: OSError("no space left")}
    sink = Gated(**raises)
    outlet = await opened(sink)
    outlet.put(1, {"loss": 1.0})
    await close(outlet)
    assert outlet.num_dropped == 1
    assert outlet.state_dict() == {"position": None, "pending": []}
    assert "1 points of this session were not written" in caplog.text


async def test_opening_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynchooks.metrics._outlet._FIRST_PAUSE_SECS", 0.0)

    class OpensLater(Gated):
        def open(self, resume: Resume) -> None:
            if self.raises.pop("once", None) is None:
                super().open(resume)
            else:
                raise ConnectionError("not yet")

    sink = OpensLater(once=ConnectionError())
    await close(await stuck(sink))
    assert sink.points == [(1, {"loss": 1.0})]


async def test_the_state_holds_what_is_not_durable_and_the_next_life_writes_it_first() -> None:
    sink, later = Gated(is_stuck=True), Gated()
    outlet = await stuck(sink)
    outlet.put(2, {"weights": np.array([1.0, 2.0]), "nan": float("nan")})
    state = outlet.state_dict()
    assert state["position"] == 0  # the sink says where it writes to before the first point
    assert [each["step"] for each in state["pending"]] == [1, 2]
    sink.may_write.set()
    await close(outlet)
    outlet = await opened(later, step=2, pending=state["pending"])
    assert await anyio.to_thread.run_sync(later.is_asked.wait, 10)  # no point is put
    outlet.put(3, {"loss": 0.5})
    await close(outlet)
    assert later.resumes == [Resume(2, None)]
    assert later.steps == [1, 2, 3]
    [(_, spread)] = later.of("weights")
    assert isinstance(spread, Histogram)
    assert (spread.least, spread.greatest, spread.num) == (1.0, 2.0, 2)
    assert str(later.of("nan")) == "[(2, nan)]"


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_a_set_back_takes_back_what_the_sink_has_and_what_waits_and_is_part_of_the_state(
    is_stuck: bool,
) -> None:
    sink, later = Gated(is_stuck=is_stuck), Gated()
    outlet = await stuck(sink)
    for step in (2, 3):
        outlet.put(step, {"loss": 1.0})
    outlet.rewind(1)
    outlet.rewind(5)  # not back: nothing is taken back
    outlet.put(2, {"loss": 0.5})
    pending = outlet.state_dict()["pending"]
    sink.may_write.set()
    await close(outlet)
    await close(await opened(later, step=2, pending=json.loads(json.dumps(pending))))
    expected = [(1, {"loss": 1.0}), (2, {"loss": 0.5})]
    assert sink.points == expected
    assert not is_stuck or later.points == expected


@pytest.mark.parametrize("backend", ["asyncio", "trio", "turbo"])
def test_in_virtual_time_there_is_no_thread(backend: Any) -> None:
    sink = Gated()

    async def main() -> Any:
        outlet = await opened(sink)
        for step in range(1, 6):
            await current_simulation().sleep(1.0)
            outlet.put(step, {"loss": 1.0})
        state = outlet.state_dict()
        await close(outlet)
        return state

    assert Simulation(backend=backend).run(main) == {"position": 5, "pending": []}
    assert sink.thread == threading.get_ident()
    assert (sink.steps, sink.calls[-1]) == ([1, 2, 3, 4, 5], "close")
