"""Hooks around the steps of another library's training loop, which blocks.

Each moment runs in an event loop in a thread, in a task of its own, while the loop waits. An
adapter says when a step begins and ends, and what the step has given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from anyio.from_thread import BlockingPortal

from .._engine.stop import StopReason
from .._errors import DamagedCheckpointError, FetchError, StopTraining, add_note, shown
from .._hook import AnyHook, SessionRunContext
from .._running.hook_state import load_hooks, save_hooks
from .._running.hooks import HookList, MergedRun, RunArguments
from .._step.global_step import GlobalStep
from .._stopping.coordinator import Coordinator
from ..backends._function import pick
from ..backends._raw_session import RawSession
from ._portal import GRACE_SECS, HookPortal, end_side_tasks


class LoopDriver:
    """Hooks of one training after the other; all methods block.

    Args:
        hooks: of one worker; may be used again after `end`, or `fail`.
        portal: anyio's blocking portal to an event loop of the user's; None starts one (asyncio).
        trainer: the name of the other library's loop, for messages.
    """

    def __init__(
        self, hooks: Iterable[AnyHook], portal: BlockingPortal | None, trainer: str
    ) -> None:
        self._hooks = HookList(hooks)
        self._hooks.call_plain = _call_here
        self._stop = self._hooks.stop  # of the present training
        self._portal = HookPortal(portal)
        self._trainer = trainer
        self._coord: Coordinator | None = None
        self._saved: bytes | None = None  # what the hooks are to go on from
        self._at_end: bytes | None = None  # as of the last step of the training before
        self._session: TrainerSession
        self._is_in_step = False

    @property
    def _is_open(self) -> bool:
        """Whether a training is under way."""
        return self._coord is not None

    def begin(self, session: TrainerSession) -> None:
        """Call begin and after_create_session; a training before it that failed ends now."""
        if self._is_open:
            lost = f"the fit before this one failed, which {self._trainer} reports to no callback"
            self.fail(RuntimeError(lost))
        self._guarded(self._begin, session)
        self._pass_stop_on()

    def before_step(self, *, is_late: bool = False) -> bool:
        """Call before_run, unless training is to stop; returns whether there is to be a step.

        Args:
            is_late: whether the step is made also if a stop was asked for since the last one.
        """
        if self._pass_stop_on() and not is_late:
            return False
        try:
            self._guarded(self._before)
        except StopTraining:  # a hook's input may have ended
            self._stop.set()
            self._pass_stop_on()
            return False
        self._is_in_step = True
        return True

    def after_step(self, outputs: Mapping[str, Any]) -> None:
        """Call after_run, with what the step has given, by name; not if no step has begun.

        Another callback may have left it out, and a library may say twice that one has ended.
        """
        if self._is_in_step:
            self._is_in_step = False
            try:
                self._guarded(self._after, dict(outputs))
            except StopTraining:  # a stop ended the wait of a hook
                self._stop.set()
        self._pass_stop_on()

    def _pass_stop_on(self) -> bool:
        """Have the library stop if a hook or a side task has asked for it, or the limit is here."""
        stops = self._is_open and (self._stop.is_set or self._step.is_at_limit)
        if stops:
            self._session.request_stop()
        return stops

    def end(self) -> None:
        """Call before_end, end and after_close; does nothing where no training is under way."""
        if self._is_open:
            self._guarded(self._end)
        self._portal.close()

    def fail(self, error: BaseException) -> None:
        """Call on_error and after_close, unless the hooks have ended."""
        coord, self._coord = self._coord, None
        self._is_in_step = False
        if coord is not None:
            self._portal.call(self._end_failed, coord, error)
        self._portal.close()

    def state(self) -> str:
        """What the hooks' `state_dict` give now, as text; after a training, as of its last step."""
        if not self._is_open:
            return (self._saved or self._at_end or b"{}").decode()
        saved: bytes = self._portal.call(self._save)
        return saved.decode()

    def resume_from(self, state: object) -> None:
        """Let the hooks go on from a state when the next training begins."""
        if not isinstance(state, str):
            raise DamagedCheckpointError(
                f"the saved state of the hooks is damaged: it is {shown(state)}, expected a text; "
                "restore another checkpoint"
            )
        self._saved = state.encode(errors="surrogatepass")  # as `json` reads it

    def _guarded(self, fn: Any, *args: Any) -> None:
        """Call it in the event loop; an error other than the end of training ends the hooks."""
        try:
            self._portal.call(fn, *args)
        except StopTraining:
            raise
        except BaseException as error:
            self.fail(error)
            raise

    async def _begin(self, session: TrainerSession) -> None:
        self._stop.clear()
        self._session = session
        step = GlobalStep(session.read_step(), num_workers=1)
        session.attach(step)
        self._step = step.bound(self._stop, step.gate.open())
        coord = self._coord = Coordinator(clean_stop_exception_types=())
        coord.on_stop = self._coord_stopped
        await self._hooks.begin()
        saved, self._saved = self._saved, None
        if saved is not None:
            load_hooks(self._hooks.hooks, saved)
        await self._hooks.after_create_session(session, coord)

    def _coord_stopped(
        self, error: BaseException | None, reason: StopReason, all_workers: bool
    ) -> None:
        self._stop.set(reason)
        self._session.request_stop()

    async def _before(self) -> None:
        hooks = self._hooks
        args: RunArguments = ([], None, None, None)
        self._context = SessionRunContext(args, self._session, self._step)
        self._context.called_by = hooks
        self._merged = MergedRun(self._session, args, hooks)
        with self._blaming():
            for call in hooks.before_runs:
                hooks.current = call
                request = await call.fn(self._context)
                if request is not None:
                    self._merged.add(call, request)
        self._fetches, feed_dict, _, _ = self._merged.finish()
        if feed_dict:
            raise ValueError(
                f"a hook feeds {sorted(map(str, feed_dict))}, but {self._trainer} feeds its "
                "batches itself; give the data to it"
            )

    async def _after(self, outputs: dict[str, Any]) -> None:
        await self._session.take_up_step()
        self._context.say_made(None)
        try:
            picked = pick(outputs, self._fetches)
        except FetchError as error:
            self._merged.blame(error)
            raise
        hooks = self._hooks
        _, values, asked = self._merged.split(picked)
        with self._blaming():
            for call in hooks.after_runs:
                hooks.current = call
                await call.fn(self._context, asked.get(call.place, values))
            await self._context.finish()
        if self._context.stop_requested:
            self._stop.set()

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Errors name the hook whose call is under way."""
        try:
            yield
        except BaseException as error:
            leaving = self._hooks.explained(error, self._hooks.current, self._merged)
            if leaving is error:
                raise
            raise leaving from error
        finally:
            self._hooks.current = None

    async def _save(self) -> bytes:
        return save_hooks(self._hooks.hooks)

    async def _end(self) -> None:
        coord = self._coord
        assert coord is not None
        self._at_end = await self._save()  # what `end` does is no part of training
        first = await self._hooks.end(self._session)
        await end_side_tasks(coord)
        failure = coord.error or first
        if failure is not None:
            raise failure  # then `fail` calls what follows an error
        self._coord = None
        failure = await self._hooks.after_close(None, GRACE_SECS)
        if failure is not None:
            raise failure

    async def _end_failed(self, coord: Coordinator, error: BaseException) -> None:
        try:
            self._at_end = await self._save()  # for what is saved because of the error
        except Exception as failure:
            add_note(error, f"then the states of hooks could not be saved: {failure!r}")
        await self._hooks.on_error(self._session, error, GRACE_SECS)
        await end_side_tasks(coord)
        await self._hooks.after_close(error, GRACE_SECS)


class TrainingBlock:
    """The `with` block of an adapter around a training: an error out of it ends the hooks."""

    _driver: LoopDriver

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None:
            self._driver.fail(exc)


class TrainerSession(RawSession):
    """The session for hooks.

    Args:
        read_step: how many steps the other library has made.
        request_stop: asks it to stop after its present step; called in any thread.
        library: its name, for messages.
        facts: attributes by which hooks reach its objects: `session.model`.
    """

    begins_training = True

    def __init__(
        self,
        read_step: Callable[[], int],
        request_stop: Callable[[], None],
        library: str,
        /,
        **facts: Any,
    ) -> None:
        super().__init__()
        self._read_step, self.request_stop, self._library = read_step, request_stop, library
        for name, value in facts.items():
            setattr(self, name, value)

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{self._library} runs the steps: fetch what they give through before_run, or use the "
            "attributes of `session`"
        )

    def close(self) -> None:
        """Nothing to free: the model is the caller's."""

    def read_step(self) -> int:
        return self._read_step()

    async def take_up_step(self) -> None:
        if self.read_step() < self.global_step.value:
            self.global_step.restart(self.read_step())
        self.global_step.publish(self.read_step())


async def _call_here(fn: Callable[[], Any], key: Any, stop: object) -> Any:
    return fn()
