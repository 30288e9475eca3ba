"""MetricsHook: gives what runs compute to sinks, which can never hold up training."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from .. import _check
from .._engine.current import current_engine
from .._errors import shown
from .._running.hook_state import HookState
from .._stopping.coordinator import Coordinator
from .._stopping.tasks import OnFailure
from ..backends._raw_session import raw_session_of
from ..metrics._outlet import Outlet, restored
from ..metrics._sink import FunctionSink, Resume, Sink
from ._values import KeepsValues, Wanted

SinkLike = Sink | Callable[[int, dict[str, Any]], object]

_LONGEST_CLOSE_SECS = 30.0


@_check.names_options
class MetricsHook(KeepsValues):
    """Gives metrics to sinks: TensorBoard, a file, a tracker, or a function.

    It takes them after the run of step 1 and of each multiple of `every_n_steps`, labelled with the
    step that the run made, and all that `session.log_metrics` is given meanwhile. A value keeps its
    step however late it comes; of two values of one name at one step the first stays. At the end of
    the session the last step comes, too: means since the last point, functions, and outputs if
    training has reached its limit.

    Each sink has a queue of 16,384 points and a thread of its own, in which its library is
    imported, initialised and called: a sink that hangs or fails costs training nothing. If the
    queue is full, every second point in it is dropped; that is logged once, and their number at the
    end. At the end of the session sinks have the grace period, 30 s at most, to take what waits;
    then their threads are left alone.

    With a `CheckpointSaverHook` a resumed training goes on with the same run of the sink: points
    that the killed process wrote after the last checkpoint are taken back, or not written again,
    as far as the sink can do that, and those that it had not written yet are in the checkpoint.

    Args:
        sink: a sink of `asynchooks.metrics`, a function of the step and a dict of values, or
            several of these in a list. A sink belongs to one session at a time.
        values: what to take: names of outputs, tensors, `mean(...)`, `histogram(...)`, statistics
            such as `steps_per_sec()`, metrics of an `EvaluationHook` (each when it comes, at the
            step that was evaluated), or functions without arguments that return a number, a mapping
            of names to numbers, or None; one of them, a list, or a mapping with names of their own.
            None: only what is logged.
        every_n_steps: steps between two points, >= 1; 100 if neither this nor the next is given.
        every_n_secs: seconds between two points, >= 0.
        on_failure: what the first error of a sink leads to: `OnFailure.LOG`, it is logged and
            training goes on without what the sink does not take; `OnFailure.STOP`, it stops the
            session and leaves it.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value, or two values one name.
        ImportError: in begin: a sink's library is not installed (says the extra).
        MetricError: in a run: a value is not a number. NaN and infinities are.
        FetchError: in a run: the step function has no such output (says which there are).

    Example:
        values = ["loss", mean("accuracy"), steps_per_sec()]
        hooks = [MetricsHook(TensorBoardSink("logs"), values, every_n_steps=100)]
    """

    acts_outside = True
    uses_default_graph = False
    _shown = (("sink", "sinks"), ("values", "_wanted"))

    def __init__(
        self,
        sink: SinkLike | Sequence[SinkLike],
        values: Wanted = None,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
        *,
        on_failure: OnFailure = OnFailure.LOG,
    ) -> None:
        given = sink if isinstance(sink, (list, tuple)) else [sink]
        if not given:
            raise ValueError("sink is an empty list; give at least one sink")
        self.sinks = [_as_sink(each) for each in given]
        for index, each in enumerate(self.sinks):
            if any(each is other for other in self.sinks[:index]):
                raise ValueError(f"{each!r} is there twice; give each sink once")
        _check.instance("on_failure", on_failure, OnFailure, "OnFailure.LOG or OnFailure.STOP")
        super().__init__(values, every_n_steps, every_n_secs)
        self._on_failure = on_failure
        self._outlets: list[Outlet] = []
        self._is_open = False
        self._states: Sequence[Any] = ()  # of the sinks, from a checkpoint
        self._error: BaseException | None = None  # of a sink: the first one
        self._coord: Coordinator | None = None  # of the session

    @property
    def num_dropped(self) -> int:
        """Points that sinks have not taken in this session, or in the last one, all together."""
        return sum(outlet.num_dropped for outlet in self._outlets)

    async def begin(self) -> None:
        if self._outlets and self._is_by_hand:  # whose `end` was not called after an error
            self.on_drop()
        for sink in self.sinks:
            sink.check()
            if Outlet.is_used(sink):
                raise RuntimeError(
                    f"{sink!r} is used by another hook, or by a session that has not been closed; "
                    "give each hook a sink of its own, and close the session first"
                )
        self._error, self._coord, self._is_open = None, None, False
        await super().begin()
        on_error = self._note_error if self._on_failure is OnFailure.STOP else None
        self._outlets = [Outlet(sink, on_error) for sink in self.sinks]
        for outlet in self._outlets:
            outlet.claim()

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await super().after_create_session(session, coord)  # first: others may move the step
        engine, step = current_engine(), session.global_step.value
        self._grace_secs = min(raw_session_of(session).grace_secs, _LONGEST_CLOSE_SECS)
        self._engine, self._coord = engine, coord
        if self._error is not None:  # from before there was a coordinator, or a recovery
            coord.request_stop(self._error)
        if self._is_open:
            for outlet in self._outlets:
                outlet.rewind(step)
        else:
            self._is_open = True
            states, self._states = self._states or [_NO_STATE] * len(self._outlets), ()
            for outlet, state in zip(self._outlets, states, strict=True):
                await outlet.open(engine, Resume(step, state["position"]), state["pending"])
            # opening sinks is no training
            self._values.begin_session(raw_session_of(session), engine.now())

    def _forget_after(self, step: int) -> None:
        super()._forget_after(step)
        if self._is_open:  # what sinks have of the old steps, they keep
            for outlet in self._outlets:
                outlet.complete()

    def _keep(self, step: int, values: Mapping[str, Any]) -> None:
        for outlet in self._outlets:
            outlet.put(step, values)

    async def end(self, session: Any) -> None:
        await super().end(session)
        if self._is_by_hand:
            self._raise_error()

    async def after_close(self, exception: BaseException | None) -> bool | None:
        await super().after_close(exception)
        if exception is None:
            self._raise_error()
        return None

    async def _close(self) -> None:
        await super()._close()
        if self._is_open:
            self._is_open = False
            until = self._engine.now() + self._grace_secs
            for outlet in self._outlets:
                outlet.drop()  # all at once
            for outlet in self._outlets:
                await outlet.close(until)
        else:
            self.on_drop()  # another hook has failed in its begin

    def on_drop(self) -> None:
        for outlet in self._outlets:
            outlet.drop()

    def state_dict(self) -> dict[str, Any]:
        """Where the points of each sink end that are durable there, and those after them."""
        states = self._states
        if self._is_open or not states:
            states = [{**_identity(each.sink), **each.state_dict()} for each in self._outlets]
        place = ", ".join(_identity(each)["place"] for each in self.sinks)
        return HookState({"sinks": list(states), **super().state_dict()}, place=place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        states = _checked(state["sinks"])
        if not self._is_open:  # else the sinks are told the step that the session is set back to
            self._states = _taken(states, self.sinks)

    def _note_error(self, error: BaseException) -> None:
        """In the thread of a sink."""
        self._error = self._error or error
        if self._coord is not None:
            with suppress(type(error)):  # where the session has ended: `after_close` raises it
                self._coord.request_stop(error)

    def _raise_error(self) -> None:
        """Raise an error that came as the session ended."""
        if self._error is not None:
            raise self._error


_NO_STATE: Mapping[str, Any] = {"position": None, "pending": ()}


def _identity(sink: Sink) -> dict[str, str]:
    """What tells its state from those of others: its class, and what its repr shows."""
    is_shown = type(sink).__repr__ is not object.__repr__
    place = re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(sink)) if is_shown else ""
    return {"sink": type(sink).__qualname__, "place": place}


def _checked(states: object) -> list[Mapping[str, Any]]:
    """The states of sinks; TypeError, ValueError, LookupError: they are none."""
    found = _check.instance("the saved states of sinks", states, (list, tuple), "a list")
    for state in found:
        _check.instance("the saved state of a sink", state, Mapping, "a mapping")
        _check.instance("the saved class of a sink", state["sink"], str, "its name")
        restored(state["pending"])
        state["position"]
    return list(found)


def _taken(states: Sequence[Mapping[str, Any]], sinks: Sequence[Sink]) -> list[Mapping[str, Any]]:
    """The state of each sink; of sinks of a class that all are elsewhere now, by their order."""
    left, found = list(states), dict[int, Mapping[str, Any]]()
    for place, sink in enumerate(sinks):
        its = [each for each in left if _identity(sink).items() <= each.items()]
        if its:
            found[place] = its[0]
            left = [each for each in left if each is not its[0]]
    for kind in {type(sink) for sink in sinks} - {type(sinks[place]) for place in found}:
        there = [place for place, sink in enumerate(sinks) if type(sink) is kind]
        its = [each for each in left if each["sink"] == kind.__qualname__]
        if len(its) == len(there):
            found.update(zip(there, its, strict=True))
    return [found.get(place, _NO_STATE) for place in range(len(sinks))]


def _as_sink(each: object) -> Sink:
    if isinstance(each, Sink):
        return each
    if isinstance(each, type) or not callable(each):
        raise TypeError(
            f"sink is {shown(each)}; give a sink of asynchooks.metrics, such as "
            'TensorBoardSink("logs"), or a function that takes a step and a dict of values'
        )
    return FunctionSink(each)
