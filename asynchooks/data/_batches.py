"""session.batches: the items of a pipeline, for as long as training goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

from .._errors import StopTraining
from .._global_step import GlobalStep
from .._session_stop import SessionStop
from ._drawer import Drawer
from ._draws import draws_of
from ._training_end import TrainingEnd


class Batches:
    """An async iterator over a source, made by `session.batches`; the session closes it at its end.

    It ends with the source, and when the session should stop, also while it waits.

    Example:
        async with MonitoredSession(hooks, creator) as session:
            batches = session.batches(records)
            async for images in batches:
                await session.run("loss", {"images": images})
            await batches.aclose()  # the source is closed here, not at the end of the session
    """

    def __init__(
        self, source: Any, stops: SessionStop, step: GlobalStep, should_stop: Callable[[], bool]
    ) -> None:
        draws = draws_of(source)
        for drawer in draws.drawers:
            if drawer.owner is stops and drawer.loop is not None and drawer.loop() is None:
                drawer.give_back()  # that loop was left early
        self._drawer = Drawer(draws, stops, loop=weakref.ref(self))
        stops.add_input(self._drawer.leave)
        self._end = TrainingEnd(stops.stop, step)
        self._should_stop = should_stop
        self._drawer.join()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        self._drawer.use()
        if self._should_stop():
            raise StopAsyncIteration
        try:
            return await self._drawer.take(self._end)
        except StopTraining:
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Let go of the source before the session ends; a loop that was left early does so then."""
        await self._drawer.leave()
