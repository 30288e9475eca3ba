"""HooksCallback: hooks in Keras's `model.fit`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import keras

from ..._engine.current import current_engine
from ..._engine.stop import Stop
from ..._errors import FetchError, StopTraining
from ..._hook import AnyHook, SessionRunArgs, SessionRunContext
from ..._running.dispatch import HookList, values_of
from ..._running.merge import MergedRun
from ..._step.global_step import GlobalStep
from ..._stopping.coordinator import Coordinator, CoordinatorOwner
from ...backends._function import pick
from ...backends._raw_session import RawSession
from ._portal import GRACE_SECS, BlockingPortal, HookPortal, end_side_tasks


class HooksCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """A Keras callback that calls hooks around each batch of `model.fit`.

    Fetches are names of Keras's logs ("loss" and the metrics, means over the epoch so far), nested
    as you like. The global step is the optimizer's count of iterations. A hook that asks to stop,
    a StopAtStepHook at its step, and the end of a hook's input end `fit` after the batch. The
    coroutines run in an event loop in a thread while `fit` waits, each moment in a task of its
    own. Hooks that need a graph, feeds and run options do not work here; Keras makes and restores
    the model itself, so `restore_model`, `on_cancelled_run` and `on_drop` are not called. Where
    training ends before a batch (the input of a hook, or a StopAtStepHook that finds its step there
    already), Keras warns that its own input ran out of data.

    `with HooksCallback(hooks) as callback:` around `fit` calls `on_error` of hooks when `fit`
    fails; without it they get only their own errors.

    Args:
        hooks: an iterable of `SessionRunHook`; may be used for one `fit` after the other.
        portal: anyio's blocking portal to an event loop of yours; None starts one (asyncio).

    Raises:
        BaseException: out of `fit`: what a hook raised, with a note of which it was.

    Example:
        model.fit(x, y, epochs=5, callbacks=[HooksCallback([NanTensorHook("loss")])])
    """

    def __init__(self, hooks: Iterable[AnyHook], *, portal: BlockingPortal | None = None) -> None:
        super().__init__()
        self._stop = Stop()  # of the present fit
        self._hooks = HookList(hooks, self._stop)
        self._hooks.call_plain = _call_here
        self._portal = HookPortal(portal)
        self._coord: Coordinator | None = None
        self._raw: _KerasSession

    def on_train_begin(self, logs: Any = None) -> None:
        lost = "the fit before this one failed, which Keras reports to no callback"
        self._fail(RuntimeError(lost))
        self._guarded(self._begin)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        try:
            self._guarded(self._before)
        except StopTraining as error:
            self.model.stop_training = True
            raise StopIteration from error  # Keras ends the epoch without this batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        try:
            self._guarded(self._after, dict(logs or {}))
        except StopTraining:  # a stop ended the wait of a hook
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        self._guarded(self._end)
        self._portal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None:
            self._fail(exc)
            self._portal.close()

    def _guarded(self, fn: Any, *args: Any) -> None:
        """Call it in the event loop; an error other than the end of training ends the hooks."""
        try:
            self._portal.call(fn, *args)
        except StopTraining:
            raise
        except BaseException as error:
            self._fail(error)
            self._portal.close()
            raise

    def _fail(self, error: BaseException) -> None:
        """Call what follows an error, unless the hooks have ended."""
        coord, self._coord = self._coord, None
        if coord is not None:
            self._portal.call(self._end_failed, coord, error)

    async def _begin(self) -> None:
        self._stop.clear()
        self._raw = _KerasSession(self.model, self._stop)
        step = GlobalStep(self._raw.read_step(), num_workers=1)
        self._raw.attach(step)
        self._step = step.bound(self._stop, step.open_worker())
        coord = self._coord = Coordinator(clean_stop_exception_types=())
        coord.attach(self._raw)
        await self._hooks.begin(lambda: True)
        await self._hooks.after_create_session(self._raw, coord)

    async def _before(self) -> None:
        hooks, args = self._hooks, SessionRunArgs([])
        self._context = SessionRunContext(args, self._raw, self._step)
        self._context.called_by = hooks
        self._merged = MergedRun(self._raw, args, None, hooks.hooks)
        with self._blaming():
            for call, method, group in hooks.before_runs:
                hooks.current = call
                if group:
                    await hooks.before_run_of_group(group, self._context, self._raw, self._merged)
                elif (request := await method(self._context)) is not None:
                    self._merged.add(call.place, call.hook, request)
        self._merged.finish_options()
        if self._merged.feed_dict:
            raise ValueError(
                f"a hook feeds {sorted(map(str, self._merged.feed_dict))}, but Keras feeds its "
                "batches itself; give the data to model.fit"
            )

    async def _after(self, logs: dict[str, Any]) -> None:
        self._step.publish(self._raw.read_step())
        try:
            outputs = pick(logs, self._merged.fetches)
        except FetchError as error:
            self._merged.blame(error)
            raise
        _, results = self._merged.split(outputs)
        hooks, values = self._hooks, self._merged.unasked()
        with self._blaming():
            for call, method, group in hooks.after_runs:
                hooks.current = call
                if group:
                    await hooks.after_run_of_group(group, self._context, values, results)
                else:
                    await method(self._context, values_of(call, values, results))
            await self._context.finish()
        if self._context.stop_requested or self._step.is_at_limit:
            self.model.stop_training = True

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Errors name the hook whose call is under way."""
        try:
            yield
        except BaseException as error:
            leaving = self._hooks.explained(error, self._merged, self._hooks.current)
            if leaving is error:
                raise
            raise leaving from error
        self._hooks.current = None

    async def _end(self) -> None:
        coord = self._coord
        assert coord is not None
        first = await self._hooks.end(self._raw)
        await end_side_tasks(coord)
        failure = coord.error or first
        if failure is not None:
            raise failure  # then `_fail` calls what follows an error
        self._coord = None
        failure = await self._hooks.after_close(None)
        if failure is not None:
            raise failure

    async def _end_failed(self, coord: Coordinator, error: BaseException) -> None:
        await self._hooks.on_error(self._raw, error, current_engine(), GRACE_SECS)
        await end_side_tasks(coord)
        await self._hooks.after_close(error)


class _KerasSession(RawSession, CoordinatorOwner):
    """The session for hooks: the model that Keras trains; to the coordinator, it is the session."""

    def __init__(self, model: Any, stop: Stop) -> None:
        super().__init__()
        self.model = model
        self._stop = stop

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        raise RuntimeError(
            "Keras runs the steps: fetch its logs through before_run, or use `session.model`"
        )

    def close(self) -> None:
        """Nothing to free: the model is the caller's."""

    def read_step(self) -> int:
        return int(self.model.optimizer.iterations)

    async def take_up_step(self) -> None:
        if self.read_step() < self.global_step.value:
            self.global_step.restart(self.read_step())
        self.global_step.publish(self.read_step())

    def stop_changed(self, is_set: bool) -> None:
        if is_set:
            self._stop.set()
            self.model.stop_training = True


def _call_here(fn: Any, kind: Any, ends_at_stop: bool) -> None:
    fn()
