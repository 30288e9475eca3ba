"""session.batches: the items of a pipeline, for as long as training goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Self

from .._engine.base import Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, Stop
from .._engine.sync import Condition
from .._errors import StopTraining
from .._hook import SessionRunContext, SessionRunHook, SessionRunValues
from .._step.global_step import GlobalStep
from .._stopping.session_stop import SessionStop
from ._consumers import Consumer, Consumers, CurrentRun, TrainingEnd, consumers_of
from ._sources import Source
from ._stage import T, take_all


class Batches(Generic[T]):
    """An async iterator over a source, made by `session.batches`; the session closes it at its end.

    It ends with the source, and when the session should stop, also while it waits. An item counts
    as used when the run behind it has ended.

    Example:
        async with MonitoredSession(hooks, creator) as session:
            batches = session.batches(records)
            async for images in batches:
                await session.run("loss", {"images": images})
            await batches.aclose()  # the source is closed here, not at the end of the session
    """

    def __init__(
        self,
        source: Source[T],
        stops: SessionStop,
        watch_runs: Callable[[Loops], None],
        step: GlobalStep,
        should_stop: Callable[[], bool],
    ) -> None:
        consumers, loops = consumers_of(source), stops.input
        if loops is None:
            loops = stops.input = Loops(stops)
            watch_runs(loops)
            if stops.handle is not None:
                stops.handle.add_input(loops)
        assert isinstance(loops, Loops)
        self._loops = loops
        self._consumer = loops.join(consumers, weakref.ref(self))
        self._end = TrainingEnd(stops.stop, step)
        self._should_stop = should_stop

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        consumer, loops = self._consumer, self._loops
        consumer.use()
        while True:
            if loops.is_held:
                await loops.wait_for_release(self._end)
            if self._should_stop():
                raise StopAsyncIteration
            try:
                item: T = await consumer.take(self._end)
            except StopTraining:
                raise StopAsyncIteration from None
            except StopAsyncIteration:
                if not loops.is_held:  # else the source may go back
                    raise
            else:
                if not loops.is_held:
                    loops.with_item[consumer] = None
                    return item
                consumer.give_back()

    async def aclose(self) -> None:
        """Let go of the source before the session ends; a loop that was left early does so then."""
        await self._loops.leave(self._consumer)


class Loops(SessionRunHook):
    """All loops over `session.batches` of one session, which holds this and not the loops.

    Those are to be collected when the program leaves them.
    """

    def __init__(self, stops: SessionStop) -> None:
        self._run = CurrentRun(stops)
        self._consumers: list[Consumer] = []
        self._hold: Condition | None = None
        self.with_item: dict[Consumer, None] = {}  # no run used it yet; perhaps others
        self._run.end()  # what ran before had none of them

    def join(self, consumers: Consumers, loop: weakref.ref[Any]) -> Consumer:
        for each in consumers.members:
            if each.run is self._run and each.was_left:
                each.give_back()
        consumer = consumers.join(self._run, loop)
        self._consumers.append(consumer)
        return consumer

    async def leave(self, consumer: Consumer) -> None:
        try:
            await consumer.leave()
        finally:
            self._notify()

    async def before_run(self, run_context: SessionRunContext) -> None:
        self._run.begin(run_context)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.on_cancelled_run()

    def on_cancelled_run(self) -> None:
        self._run.end()
        for consumer in self.with_item:
            consumer.use()
        self.with_item.clear()
        self._notify()

    @property
    def has_item(self) -> bool:
        return any(consumer.has_unused_item for consumer in self.with_item)

    @property
    def is_held(self) -> bool:
        return self._hold is not None

    def hold(self, hold: Condition | None) -> None:
        self._hold = hold

    async def wait_for_release(self, stop: Stop) -> None:
        """Wait until items are given out again, or the session stops."""
        self._notify()
        while self._hold is not None and not stop.is_set:
            slot = Slot(current_engine(), "a checkpoint to be restored")
            self._hold.slots += (slot,)
            with EndsAtStop(slot, stop):
                await slot.engine.park(slot)

    async def close(self) -> None:
        leaves = [partial(self.leave, consumer) for consumer in self._consumers]
        await take_all(leaves, "closing another input")

    def _notify(self) -> None:
        if self._hold is not None:
            self._hold.tell()

    def __repr__(self) -> str:
        stages = ", ".join(repr(consumer.stage) for consumer in self.with_item)
        return f"<loops over {stages or 'session.batches'}>"
