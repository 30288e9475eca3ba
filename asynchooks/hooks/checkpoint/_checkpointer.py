"""What the checkpoints of one session hold, and in which order they are saved and restored.

It does not decide when to save, and knows no files: a `CheckpointFormat` does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ..._engine.current import current_engine
from ..._engine.recording import Kind, begun_span, current_recorder, ended
from ..._engine.stop import StopReason
from ..._engine.sync import Lock
from ..._engine.threads import run_blocking
from ..._errors import CheckpointError, InputStateError, add_note, no_input_end
from ..._log import fields
from ..._running.hook_state import (
    SharedState,
    TimerState,
    have_states_apart_from,
    matched_hooks,
    moved_positions,
    save_hooks,
    shared_states,
    when_saved,
    with_states,
)
from ..._stopping.coordinator import Coordinator
from ..._timer import SecondOrStepTimer
from ...backends._creator import not_alone, take_alone
from ...backends._raw_session import RawSession, raw_session_of
from ...checkpoints import Checkpoint
from ...checkpoints._place import RankFiles
from ...data._division import divided_again
from .._input_position import warn_of_unsaved_input
from .._metrics import Metric
from ._format import CheckpointFormat, Facts, Restored
from ._listeners import Listeners
from ._ranking import Ranking
from ._resume import newest_of

logger = logging.getLogger("asynchooks")

T = TypeVar("T")

_IMPATIENT_SECS = 1.0
"""How long a save waits for running steps, once some were found to wait for it."""
_GRACE_SECS = 30.0
"""How long opening, closing, flushing and writing the hooks' own file go on when cancelled."""

_Write = Callable[[], Awaitable[bool]]
"""Writes a copy of the model; returns whether a listener wants training to stop."""


class _HookStates:
    """The states of a session's hooks for its checkpoints: of now, or from before the end."""

    def __init__(self, hooks: Sequence[Any], *, saves_timers: bool) -> None:
        self._hooks = hooks
        self._saves_timers = saves_timers  # else a session with no other states saves none
        self._shared: dict[str, Any] = {}  # the part that other workers change, too
        self._is_saved_at_end = False
        self.at_end: bytes | None = None  # None before the end, and where they could not be saved
        self._when_saved: Sequence[Callable[[], None]] = ()  # of what was taken last

    def keep_for_end(self) -> None:
        """Keep the states of now: what the hooks' `end` does is no part of training."""
        self.at_end = None
        self._is_saved_at_end = self._are_saved
        self.at_end = save_hooks(self._hooks)
        self._shared = shared_states(self._hooks)

    def take(self, *, at_end: bool) -> bytes | None:
        """What goes into a checkpoint now, perhaps the states from before the end."""
        kept, self._when_saved = self.at_end if at_end else None, ()
        if not (self._are_saved if kept is None else self._is_saved_at_end):
            return None
        self._shared = shared_states(self._hooks, None if kept is None else self._shared)
        self._when_saved = when_saved(self._hooks)
        return save_hooks(self._hooks) if kept is None else with_states(kept, self._shared)

    def note_saved(self) -> None:
        """What was taken last is in a checkpoint that is written."""
        for each in self._when_saved:
            each()

    def take_late(self, at_end: bytes | None) -> bytes:
        """As of now; but what other workers change is as it was when the model was saved."""
        return with_states(save_hooks(self._hooks) if at_end is None else at_end, self._shared)

    @property
    def _are_saved(self) -> bool:
        return self._saves_timers or have_states_apart_from(self._hooks, TimerState)


@dataclass(eq=False, repr=False, kw_only=True)
class Checkpointer:
    """Saves and restores the checkpoints of one session; its hook makes it in begin, and closes it.

    A step that is saved because it is due, and one that is restored, restart the timer.
    """

    form: CheckpointFormat
    listeners: Listeners
    hooks: Sequence[Any]  # all of the session, whose states are saved with the model
    timer: SecondOrStepTimer
    metric: Metric | None
    path: str  # of the checkpoints, up to their steps, for messages
    is_background: bool  # whether to write while training continues
    savers: list[Checkpointer]  # those of the same model that are open

    def __post_init__(self) -> None:
        self._engine = current_engine()
        self.is_virtual = self._engine.is_virtual
        self.is_immediate = self.form.is_immediate
        # TensorFlow saves nothing of its hooks, so timers alone leave no file beside its own
        self.states = _HookStates(self.hooks, saves_timers=not self.is_immediate)
        # The files have one holder at a time: a save, which may leave them to the write that it
        # has begun, a restore, or the close. Who needs both takes exclusive access to the model
        # first, and the files then: so the holder of that access may wait for the files, as a
        # restore for another worker does.
        self._files = Lock("a checkpoint to be written")
        self.is_writing = False  # the holder is a write in the background
        self._write_error: BaseException | None = None  # of such a write, until it is raised
        self._session: Any = None  # the raw one, as hooks see it
        self._coord: Coordinator | None = None  # also where the hook is called without one
        self._patience_secs: float | None = None  # the default
        self._began_at = self._engine.now()  # less the time of training before a restore
        self._seconds: tuple[tuple[int, int], float] | None = None  # of the save of an epoch's step
        self._when_best: list[Callable[[Checkpoint | None, int], None]] = []
        self._has_saved_hooks = False  # together with the model that was saved last
        self._looked_at = -1  # the step of the last `is_better`
        self.ranking = Ranking(self.metric)
        self.due_step: int | None = None  # of a save that is being made because it is due
        self.saved_step: int | None = None
        self.written_step: int | None = None  # the newest step that a checkpoint is known to hold
        self.is_just_restored = False  # the raw session's model, by this hook
        self.is_closed = False

    async def open(self) -> None:
        form = self.form
        for each in self.savers:
            if each.form.saver != form.saver:
                raise CheckpointError(
                    f"{each.path} and {self.path} are written by savers of different objects, so "
                    "that the newest checkpoint may hold a part of the model alone; give the "
                    "CheckpointSaverHooks of one model one saver"
                )
        await run_blocking(
            self._engine, form.open, _GRACE_SECS, "asynchooks-open", lambda _: form.close()
        )
        if self.savers:  # by one clock, seconds say which of their checkpoints is newer
            self._began_at = self.savers[0]._began_at
        self.savers.append(self)

    async def restore(self, raw: RawSession) -> int | None:
        """Restore model and hooks, for a new raw session; returns the model's step, if so.

        From the newest checkpoint of all savers of the model, which go on from there, too.
        """
        savers = list(self.savers)
        async with AsyncExitStack() as locks:
            for each in savers:
                await locks.enter_async_context(each._files)  # what is being written is the newest
                await each._move_bad_aside()
                each.is_just_restored = False
                each.saved_step = None
                each.ranking.forget()
            return await self._restore_newest(raw, savers)

    async def _restore_newest(self, raw: RawSession, savers: list[Checkpointer]) -> int | None:
        metrics: dict[Checkpointer, float | None] = {}
        saver, positions = self, dict[str, Mapping[str, Any]]()

        def find() -> Restored | None:
            nonlocal saver
            if not self.form.restores_model:
                return self.form.restored(raw)
            forms = {each.form: each for each in savers}
            newest = newest_of(forms, is_same_training=raw.replaces_lost)
            if newest is None:
                return None
            form, checkpoint = newest
            for each in savers:  # it may save this step again, as it is here
                metrics[each] = each.form.metric_of(checkpoint.step)
            saver, its = forms[form], form.found(checkpoint)
            if (ranks := its.ranks) is not None:
                form.directory.together(lambda: positions.update(saver._divide(its, ranks)))
            return its

        its = await raw.call_alone(find)
        if its is None:
            return None
        step, facts = its.facts.step, its.facts
        give_states: Callable[[], None] = lambda: None  # noqa: E731
        if facts.hooks is not None:  # whose state is whose is known before anything is changed
            go_on = raw.replaces_lost
            give_states = matched_hooks(saver.hooks, facts.hooks, positions, go_on=go_on)
        if its.load is not None:
            await raw.call_alone(its.load)
        raw.bad_from = None
        for each in savers:
            each._began_at = self._engine.now() - facts.seconds
            each.ranking.restored(step, metrics.get(each, facts.metric))
        logger.info("Resuming from step %d of %s.", step, its.path, extra=_fields(step))
        saver.timer.update_last_triggered_step(step)
        saver.written_step = step
        if its.load is not None:
            saver.is_just_restored, saver.saved_step = True, step
        give_states()
        return None if its.load is None else step

    def _check_sessions(self) -> None:
        """Refuse several sessions of which no one's checkpoint would bring back all states."""
        sessions = {id(each.hooks): each.hooks for each in self.savers}.values()
        kinds = TimerState, SharedState  # which need no restoring, or are the same in all sessions
        if len(sessions) > 1 and any(have_states_apart_from(each, *kinds) for each in sessions):
            raise CheckpointError(
                f"{' and '.join(each.path for each in self.savers)} are written by the sessions of "
                "several workers, whose hooks have states, so that the newest checkpoint may hold "
                "those of one session alone; give the CheckpointSaverHooks of one model, and the "
                "hooks that have a state, to one session"
            )

    def _divide(self, restored: Restored, ranks: RankFiles) -> dict[str, Mapping[str, Any]]:
        """Positions in the data that other ranks have left to this one, by the hook's key."""
        positions: dict[str, Mapping[str, Any]] = {}
        saved = f"{ranks.num_saved} {'rank' if ranks.num_saved == 1 else 'ranks'}"
        for key, (now, states) in moved_positions(self.hooks, ranks.contents).items():
            try:
                positions[key] = divided_again(states, now, ranks.num_here)
            except InputStateError as error:
                raise CheckpointError(
                    f"{restored.path} was saved by {saved}, and there are {ranks.num_here}: the "
                    f"position of {key} is one in the part of the data that each rank had then, "
                    f"and what is left cannot be divided again: {error}. Or resume on {saved}. Or "
                    f"begin the data from its start: call restore({restored.prefix!r}) of the "
                    "saver before the session, and give CheckpointSaverHook a new directory"
                ) from error
        if ranks.contents:
            logger.warning(
                "%s was saved by %s, and there are %d: each rank has the states of its hooks that "
                "the rank of its number had, and a further one those of rank 0",
                restored.path,
                saved,
                ranks.num_here,
                extra=_fields(restored.facts.step),
            )
        return positions

    async def describe(self, session: Any, coord: Coordinator) -> None:
        """Write what all checkpoints of a new raw session have in common."""
        self._coord, self._session = coord, session
        if self.form.restores_model:
            self._check_sessions()
        raw = raw_session_of(session)
        raw.is_saved = not self.is_immediate
        self.ranking.begin(raw)
        await raw.call_blocking(lambda: self.form.describe(session))

    async def save(
        self,
        session: Any,
        *,
        may_stop: bool,
        is_due: bool = True,
        release: Callable[[], None] | None = None,
    ) -> bool:
        """Save the model as it is now; returns whether a listener wants a stop.

        In the background the write is only begun, and with `may_stop` training is asked to stop.

        Args:
            is_due: by the timer; else it is saved because it is better than the best.
            release: ends exclusive access to the model, if it is held already.
        """
        if release is None:
            await self.wait_idle()
            raw = raw_session_of(session)
            release = await self._take_exclusive(raw)
            if not is_due and self.ranking.evaluated_at(raw.global_step.value) is None:
                release()  # another worker has changed the model meanwhile
                return False
        return await self._save_alone(session, release, is_due=is_due, may_stop=may_stop)

    async def save_at_end(self, session: Any) -> int:
        """Save the model as it is now, unless that is saved; returns the global step."""
        raw = raw_session_of(session)
        step = await self._read_step(raw)
        if step != self.saved_step and self.states.at_end is not None:
            await self.wait_idle()
            await self._save_alone(session, await self._take_exclusive(raw), is_due=False)
            await self.save_hooks_late(self.states.at_end)
        return step

    async def save_beside(self, *, timeout: float) -> None:
        """Save while the session does anything else, and return when it is written.

        Saves nothing where that step is saved, before a session is created and after its end.
        TimeoutError: runs were still under way after `timeout` seconds; nothing was saved.
        """
        if self._session is None or self.is_closed:
            return
        await self.wait_idle()  # a save under way has the model, and is no run to be timed
        release = await self._session.global_step.take_exclusive(timeout=timeout)
        await self._save_alone(self._session, release, is_due=False)
        await self.wait_idle()

    async def wait_idle(self) -> None:
        """Return when all is written, or has failed. Cancellation safe: writing goes on."""
        async with self._files:
            pass

    async def _save_alone(
        self,
        session: Any,
        release: Callable[[], None],
        *,
        is_due: bool,
        may_stop: bool = False,
    ) -> bool:
        """Save with exclusive access to the model, which `release` ends once it is copied."""
        held: AbstractContextManager[object] = nullcontext()
        if release is not not_alone:
            held = session.global_step.gate.held_here("a save of a checkpoint")
        with ExitStack() as access:
            access.callback(release)
            async with AsyncExitStack() as files:
                await files.enter_async_context(self._files)
                if self.is_closed:  # the end came first
                    return False
                try:
                    with held:
                        write = await self._take(session, release, access, is_due=is_due)
                    access.close()
                    if isinstance(write, bool):
                        return write
                    if self.is_background:
                        files.pop_all()
                        self.is_writing = True
                        self._engine.start(partial(self._write_in_background, write, may_stop))
                        return False
                    try:
                        with ended(begun_span(self._engine, Kind.SAVE, "write a checkpoint")):
                            return await write()
                    except BaseException:
                        self.saved_step = None
                        raise
                except Exception as error:
                    bug = no_input_end(error, "a save of a checkpoint")
                    if bug is error or self.is_immediate:  # errors of TensorFlow's own saver stay
                        raise
                    raise bug from error

    async def _take_exclusive(self, raw: RawSession) -> Callable[[], None]:
        """Get exclusive access to the model, with bounded waiting; returns what ends it."""
        release = await take_alone(raw.global_step, raw, "saved", self._patience_secs)
        if release is not_alone:
            self._patience_secs = _IMPATIENT_SECS
        return release

    async def _take(
        self, session: Any, release: Callable[[], None], access: ExitStack, *, is_due: bool
    ) -> _Write | bool:
        """Copy the model; `access` ends with `release`, which is left to a copy that goes on.

        Returns what writes the copy; where there is nothing to write, what that would return.
        """
        raw, is_copying = raw_session_of(session), True

        def copy() -> Callable[[], object] | None:
            nonlocal is_copying
            try:
                write = self.form.take(session, facts)
                if write is None:
                    self.written_step = step
                return write
            finally:
                is_copying = False

        step = await self._read_step(raw)
        if ranks := getattr(self.form.saver, "ranks", None):  # one alone may have seen NaN
            gather = partial(ranks.gathered, raw.bad_from)
            bad = filter(None, await self._run_blocking(gather, "asynchooks-save"))
            raw.bad_from = min(bad, default=None)
        if raw.unfit is not None and not self.is_immediate:  # TensorFlow saves what there is
            extra = _fields(step, raw.unfit)
            logger.warning("Step %d is not saved: %s", step, raw.unfit, extra=extra)
            self.timer.update_last_triggered_step(step)
            return False
        if not is_due and step == self.saved_step:
            return False
        await self.listeners.before_save(session, step)
        logger.info("Saving checkpoints for %d into %s.", step, self.path, extra=_fields(step))
        self.due_step = step if is_due else None
        try:
            hooks = self.states.take(at_end=not is_due)
        finally:
            self.due_step = None
        self._has_saved_hooks = hooks is not None
        for stage in raw.inputs:
            warn_of_unsaved_input(stage)
        seconds = self._seconds_of((raw.global_step.epoch, step))
        facts = Facts(step, seconds, hooks, self.ranking.read(raw, step))
        try:
            write = await raw.call_alone(copy, lambda _: release())
        except BaseException as error:
            if is_copying and not isinstance(error, Exception):
                access.pop_all()  # the thread, which still copies, ends it
            raise
        self.saved_step = step
        if is_due or self.is_immediate:  # not before: a save that has failed is due again
            self.timer.update_last_triggered_step(step)
        if write is None:
            self.states.note_saved()
            return await self.listeners.after_save(session, step)
        return partial(self.write, session, step, write)

    def _seconds_of(self, place: tuple[int, int]) -> float:
        """Of training until this step: of two savers' the same, so that what follows is newer."""
        known = [each._seconds for each in self.savers if each._seconds is not None]
        same = [seconds for its, seconds in known if its == place]
        self._seconds = place, min(same, default=self._engine.now() - self._began_at)
        return self._seconds[1]

    async def _read_step(self, raw: RawSession) -> int:
        """The global step, of a variable where there is one, perhaps on a server."""
        if not raw.evaluates:
            return raw.global_step.value
        step: int = await raw.call_blocking(raw.read_step)
        return step

    async def write(self, session: Any, step: int, write: Callable[[], object]) -> bool:
        """Write what was taken; returns whether a listener wants training to stop."""

        def write_and_note() -> None:
            write()
            self.written_step = step  # here, as a cancellation that came meanwhile leaves the wait

        await self._run_blocking(write_and_note, "asynchooks-save")
        self.states.note_saved()
        return await self.listeners.after_save(session, step)

    async def _write_in_background(self, write: _Write, may_stop: bool) -> None:
        """In a task of its own, which the files are left to."""
        try:
            recorder, span = current_recorder(), None
            if recorder is not None:
                span = recorder.task_span(self._engine, Kind.SAVE, "write a checkpoint")
            try:
                with ended(span):
                    should_stop = await write()
                if should_stop and may_stop and self._coord is not None:
                    reason = StopReason(
                        "CheckpointSaverHook", "a CheckpointSaverListener asked for it"
                    )
                    self._coord.request_stop(reason=reason)
            except BaseException as error:
                failure = self._engine.failure_in(error)
                if failure is None:
                    raise
                self._on_failed_write(failure)  # for the session: no caller could catch it here
            if self.is_closed:
                await self._close()
        finally:
            self.is_writing = False
            self._files.leave()

    def _on_failed_write(self, raised: BaseException) -> None:
        error = no_input_end(raised, "a checkpoint that was being written")
        if self._write_error is None:
            self._write_error = error
        else:
            add_note(self._write_error, f"then, writing the next one: {error!r}")
        step, self.saved_step = self.saved_step, None  # the end tries again
        add_note(error, "in a checkpoint that was written in the background")
        extra = _fields(step, repr(error))
        logger.error("A checkpoint could not be written: %r", error, extra=extra)
        if self._coord is not None:
            reason = StopReason("CheckpointSaverHook", f"a checkpoint failed: {error!r}", error)
            self._coord.request_stop(reason=reason)

    def raise_write_error(self) -> None:
        """Raise the error of a write in the background, once."""
        error, self._write_error = self._write_error, None
        if error is not None:
            raise error

    async def save_hooks_late(self, at_end: bytes | None = None) -> None:
        """Save the hooks' states where the model was saved before all hooks had seen the step."""
        step = self.saved_step
        if not (self.is_immediate and self._has_saved_hooks) or step is None:
            return
        write = partial(self.form.save_hooks, step, self.states.take_late(at_end))
        await self._run_blocking(write, "asynchooks-save", _GRACE_SECS)

    async def is_better(self, step: int) -> bool:
        """Whether this step was evaluated, better than the best checkpoints that are there."""
        value, self._looked_at = self.ranking.evaluated_at(step), step
        return value is not None and step != self.saved_step and await self._would_stay(value)

    async def _would_stay(self, metric: float) -> bool:
        """Whether a checkpoint with this metric would be one of the best."""
        is_better = partial(self.form.directory.is_better, metric)
        return await self._run_blocking(is_better, "asynchooks-best")

    async def set_metric(self, step: int, metric: float) -> bool:
        """Set the metric of a saved step; returns whether a metric among the best is lost."""
        # else the run will save it with its metric, or the end, whose evaluation comes before it
        is_past = self._looked_at >= step and not self._ends_at(step)
        async with self._files:  # it may be the one that is being written
            if self.is_closed:
                return False
            set_metric = partial(self.form.directory.set_metric, step, metric)
            found = await self._run_blocking(set_metric, "asynchooks-metric")
            return not found and is_past and await self._would_stay(metric)

    def _ends_at(self, step: int) -> bool:
        """Whether training has ended at this step, which is saved when evaluations have ended."""
        is_ending = self.states.at_end is not None and self._session is not None
        return is_ending and self._session.global_step.value == step

    async def reject(self) -> str | None:
        """Move the checkpoints of a bad model aside; returns the path of the newest left."""
        savers = [each for each in self.savers if not each.is_immediate]
        for each in savers:
            async with each._files:
                await each._move_bad_aside()
        newest = await self._run_blocking(
            lambda: newest_of(each.form for each in savers), "asynchooks-newest"
        )
        return None if newest is None else newest[0].directory.address_of(newest[1])

    async def _move_bad_aside(self) -> None:
        """Reject what this or another worker of the model has found to be bad, if anything is."""
        bad_from = None if self._session is None else raw_session_of(self._session).bad_from
        if bad_from is not None and not self.is_immediate:
            reject = partial(self.form.reject, bad_from, "the loss was NaN soon afterwards")
            await self._run_blocking(reject, "asynchooks-reject")

    def restore_best_at_end(self, then: Callable[[Checkpoint | None, int], None]) -> None:
        """At a clean end, after the last save, restore the model from the best checkpoint.

        `then` is called with that checkpoint, None if there is none, and with the last step.
        """
        self._when_best.append(then)

    async def finish(self, session: Any) -> None:
        """Wait for writes, and raise the error of one; `session` is None after an error."""
        async with self._files:
            await self._move_bad_aside()
        self.raise_write_error()
        if session is not None and self._when_best:
            await self._restore_best(session)

    async def _restore_best(self, session: Any) -> None:
        """Restore the best checkpoint after the last step of every worker: all were stopped."""
        raw = raw_session_of(session)
        session.global_step.gate.close_for_runs()
        release = await self._take_exclusive(raw)
        try:
            best = await raw.call_alone(lambda: self.form.restore_best(session))
        finally:
            release()
        step = session.global_step.last_known
        if best is not None:
            where = self.form.directory.address_of(best)
            text = "The model is that of the best checkpoint, %s."
            logger.info(text, where, extra=_fields(step))
        for then in self._when_best:
            then(best, step)

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint, also of one that is being written; -1 if unknown."""
        step = self.saved_step if self.is_writing else self.written_step
        return -1 if step is None else step

    @property
    def trained_step(self) -> int | None:
        """The step of the model, as it is known; None where there is none that is worth saving."""
        raw = None if self._session is None else raw_session_of(self._session)
        return None if raw is None or raw.bad_from is not None else raw.global_step.last_known

    async def close(self) -> None:
        """Release the directory, perhaps after a save under way, which a cancellation lets end."""
        self._leave()
        if self.is_writing:  # which closes as it ends
            extra = _fields(self.saved_step)
            logger.warning("A checkpoint is still being written into %s", self.path, extra=extra)
        elif self._files.enter_now():
            try:
                await self._close()
            finally:
                self._files.leave()
        else:  # a save while the block ends
            await self._engine.start(self._close_when_saved).wait()

    def abandon(self) -> None:
        """The session was dropped: release the directory, once what is being written has been."""
        self._leave()
        if not self.is_writing:
            self.form.abandon()

    def _leave(self) -> None:
        self.is_closed = True
        with suppress(ValueError):
            self.savers.remove(self)

    async def _close_when_saved(self) -> None:
        async with self._files:
            try:
                await self._close()
            except BaseException as error:
                if self._engine.failure_in(error) is None:
                    raise
                extra = _fields(None, repr(error))
                logger.error("Closing %s failed: %r", self.path, error, extra=extra)

    async def _close(self) -> None:
        def close() -> None:
            try:
                self.form.flush()
            finally:
                self.form.close()

        await self._run_blocking(close, "asynchooks-close", _GRACE_SECS)

    def _run_blocking(
        self, fn: Callable[[], T], name: str, grace_secs: float = math.inf
    ) -> Awaitable[T]:
        return run_blocking(self._engine, fn, grace_secs, name)


def _fields(step: int | None, reason: str | None = None) -> dict[str, Any]:
    return fields("CheckpointSaverHook", step=step, reason=reason)
