"""MetricsHook: gives what runs compute to sinks, which can never hold up training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _check
from .._engine.base import STOPPED, Engine, Slot
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop
from .._errors import shown
from .._stopping.coordinator import Coordinator
from .._stopping.tasks import OnFailure
from ..backends._raw_session import raw_session_of
from ..metrics._outlet import Outlet
from ..metrics._sink import FunctionSink, Resume, Sink
from ._values import KeepsValues, Wanted

SinkLike = Sink | Callable[[int, dict[str, Any]], object]

_LONGEST_CLOSE_SECS = 30.0


class MetricsHook(KeepsValues):
    """Gives metrics to sinks: TensorBoard, a file, a tracker, or a function.

    It takes them after the run of step 1 and of each multiple of `every_n_steps`, labelled with the
    step after the run, and all that `session.log_metrics` is given meanwhile. Each sink has a queue
    of 4,096 points and a thread of its own, in which its library is imported, initialised and
    called: a sink that hangs or fails costs training nothing. If the queue is full, every second
    point in it is dropped; that is logged once, and their number at the end. At the end of the
    session sinks have the grace period, 30 s at most, to take what waits; then their threads are
    left alone.

    With a `CheckpointSaverHook` a resumed training goes on with the same run of the sink: points
    that the killed process wrote after the last checkpoint are taken back, or not written again,
    as far as the sink can do that, and those that it had not written yet are in the checkpoint.

    Args:
        sink: a sink of `asynchooks.metrics`, a function of the step and a dict of values, or
            several of these in a list. A sink belongs to one session at a time.
        values: what to take: names of outputs, tensors, `mean(...)`, `histogram(...)`, statistics
            such as `steps_per_sec()`, metrics of an `EvaluationHook` (once each), or functions
            without arguments that return a number, a mapping of names to numbers, or None; one of
            them, a list, or a mapping with names of their own. None: only what is logged.
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
        _check.instance("on_failure", on_failure, OnFailure, "OnFailure.LOG or OnFailure.STOP")
        super().__init__(values, every_n_steps, every_n_secs)
        self._on_failure = on_failure
        self._outlets: list[Outlet] = []
        self._is_open = False
        self._states: Sequence[Any] = ()  # of the sinks, from a checkpoint

    @property
    def num_dropped(self) -> int:
        """Points that sinks have not taken in this session, or in the last one, all together."""
        return sum(outlet.num_dropped for outlet in self._outlets)

    async def begin(self) -> None:
        for sink in self.sinks:
            sink.check()
        self._outlets, self._is_open = [], False
        await super().begin()

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await super().after_create_session(session, coord)  # first: others may move the step
        engine, step = current_engine(), session.global_step.value
        self._grace_secs = min(raw_session_of(session).grace_secs, _LONGEST_CLOSE_SECS)
        self._engine = engine
        on_error = self._stop_at_error(engine, coord) if self._stops_at_errors else None
        if self._is_open:
            for outlet in self._outlets:
                outlet.rewind(step)
        else:
            self._is_open = True
            self._outlets = [Outlet(sink, on_error) for sink in self.sinks]
            states, self._states = self._states, ()
            for index, outlet in enumerate(self._outlets):
                state = states[index] if index < len(states) else _NO_STATE
                await outlet.open(engine, Resume(step, state["position"]), state["pending"])
            self._values.begin_session(engine.now(), step)  # opening sinks is no training

    def _keep(self, step: int, values: Mapping[str, Any]) -> None:
        for outlet in self._outlets:
            outlet.put(step, dict(values))

    async def _close(self) -> None:
        await super()._close()
        if self._is_open:
            self._is_open = False
            until = self._engine.now() + self._grace_secs
            for outlet in self._outlets:
                outlet.drop()  # all at once
            for outlet in self._outlets:
                await outlet.close(until)

    def on_drop(self) -> None:
        for outlet in self._outlets:
            outlet.drop()

    def state_dict(self) -> dict[str, Any]:
        """Where the points of each sink end that are durable there, and those after them."""
        states = [outlet.state_dict() for outlet in self._outlets] or self._states
        return {"sinks": list(states), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if not self._is_open:  # else the sinks are told the step that the session is set back to
            self._states = state["sinks"]

    @property
    def _stops_at_errors(self) -> bool:
        return self._on_failure is OnFailure.STOP

    def _stop_at_error(self, engine: Engine, coord: Coordinator) -> Callable[[BaseException], None]:
        """A side task that raises what a sink raised; returns what gives it the error."""
        slot = Slot(engine, "an error of a sink")

        async def raise_it() -> None:
            with EndsAtStop(slot, coord.stop):
                error = await engine.park(slot)
            if error is not STOPPED:
                raise error

        coord.start_soon(raise_it, name="MetricsHook")
        return slot.wake


_NO_STATE: Mapping[str, Any] = {"position": None, "pending": ()}


def _as_sink(each: object) -> Sink:
    if isinstance(each, Sink):
        return each
    if isinstance(each, type) or not callable(each):
        raise TypeError(
            f"sink is {shown(each)}; give a sink of asynchooks.metrics, such as "
            'TensorBoardSink("logs"), or a function that takes a step and a dict of values'
        )
    return FunctionSink(each)
