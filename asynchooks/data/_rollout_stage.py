"""rollouts: a function of each item, of several at a time, in batches whose age is bounded.

Which call may begin, and which results make a batch, `Ages` decides. Which items are finished, its
`Position` knows: that counts the items of the source, of which a batch is made.
"""

from __future__ import annotations

import logging
import math
import pickle
import uuid
from bisect import insort
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from inspect import isasyncgenfunction
from operator import attrgetter
from typing import Any

from .. import _check as check
from .._engine.base import TIMED_OUT, Slot
from .._engine.recording import Kind
from .._engine.stop import Stop
from .._engine.threads import close_unrun, run_blocking
from .._errors import is_input_end, is_stop, note_once, shown
from .._later import is_a
from .._step.global_step import GlobalStep
from .._stopping.backoff import Restart
from ..checkpoints._journal import Journal, Record
from ._ages import Ages, Call, PublishedVersion
from ._cancelled_once import CancelledOnce
from ._consumers import TrainingEnd
from ._position import Position
from ._prefetch import Buffered, Taken, Task
from ._rollout import Rollout, RolloutStage, RolloutStatistics, WhenStale
from ._run_once import Parts, checksum, pickled
from ._sources import Source, stage_of
from ._stage import (
    Mark,
    Pair,
    Phase,
    Stage,
    State,
    T,
    no_epoch,
    saved_count,
    state_of,
    wait_to_end,
)

logger = logging.getLogger("asynchooks")

_CLEAN_UP_SECS = 30.0
"""What a cancelled call gets to clean up, without being cancelled again."""
_LEFT_ALONE_SECS = 1.0
"""What it gets then, cancelled once more."""
_PATIENCE_SECS = 5.0
"""How long the learner waits for a version to be published before the log says so."""
_MANY_REFUSED = 32
"""After how many batches' worth of refused results in a row the log says so."""


def rollouts(
    fn: Callable[[T], Awaitable[Any]],
    source: Source[T],
    batch_size: int,
    *,
    concurrency: int,
    max_staleness: int,
    when_stale: WhenStale = WhenStale.WAIT,
    version: GlobalStep | None = None,
    accept: Callable[[Any], bool] | None = None,
    restart: Restart | None = None,
    max_failures: int = 0,
    journal: Any = None,
) -> RolloutStage:
    """Batches of what an async function makes of each item, none of them too old.

    For a learner that trains on what its own weights generate. Just before a call begins, the stage
    writes down the version of the weights; when its result leaves in a batch, the staleness of
    that: how many steps of the learner lie between those weights and the ones that the batch is
    to train. A batch is put together when the learner asks for one, of the oldest results that
    are ready, in the order of their items. A call is not begun if it could come too late even if
    all that is under way came in order.

    It is the last stage: behind another one its batches would be older than promised. Calls begin
    when the learner asks for the first batch. Under `FeedHook` or `session.batches` it has a
    position: items that were trained on, refused, dropped or given up as failed are finished, and
    after a restore all others begin again, in their order, under the restored weights. Batch size,
    concurrency and bound may differ then.

    Args:
        fn: async; takes an item and returns a result, as a rule a group of samples. It is
            cancelled once: what it awaits to clean up goes on, for 30 s at most. See `shielded`
            for a resource of each call.
        source: see `asynchooks.data`.
        batch_size: results in a batch, >= 1; the last batch may be smaller.
        concurrency: items held, under way and ready ones together, >= `batch_size`. About
            concurrency / batch_size is the mean staleness of a learner that is kept busy.
        max_staleness: steps, >= 0. 0 is the synchronous loop, batch for batch. Where several
            batches make one step, or the version is published every so many steps, it is at least
            their number less one: with less the learner would wait for ever.
        when_stale: what is done about results that would be older: see `WhenStale`.
        version: the step that the weights in use have reached, published by the program when they
            have arrived where `fn` uses them, not before. None: `fn` uses the weights that the
            session trains, whose global step this is; without a session, one task reads the stage,
            and each batch is trained on before it asks for the next.
        accept: says of a result whether it is of use. One that is not is counted, and the next
            item takes its place.
        restart: how often, and after which pauses, a failed call is made again, with the weights
            of then. None: not at all.
        max_failures: how many items in a row may fail for good, >= 0; unlike in `map`, where all
            count, a call that succeeds begins the count again. Of each a warning names the item
            and the error; the next error ends training.
        journal: a directory, or a prefix of an object store, given as for checkpoints, and not
            theirs. Results are kept there as they come, with their versions, until a checkpoint
            counts the steps that used them; so are the parts of calls: see `run_once`. After a
            crash those that no counted step has used come first, and are not made again. Those that
            are too old by then are made again under WAIT, given up under DROP, used under ACCEPT. A
            result of a step that was lost counts as new, until the learner has made so many steps
            once more. A disk that is full stops nothing: a warning says so. Results are pickled.
            Before the first checkpoint is written, nothing says whose the journal is: what a crash
            leaves then is removed, with a warning, as that of another training.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        CheckpointInUseError, CheckpointError: out of the iteration: the journal is another run's,
            or cannot be opened.
        Exception: out of the iteration: what `fn` or `accept` raised, with a note that names the
            item. What a task group in `fn` raised leaves without its group if it is alone in it.
        TypeError: out of the iteration: `fn` returned nothing to await.

    Example:
        async def answer(prompt):
            return prompt * 2  # ask the model, judge its answer

        async with rollouts(answer, range(8), 4, concurrency=8, max_staleness=1) as groups:
            async for group in groups:
                assert [each.result for each in group] == [each.item * 2 for each in group]
    """
    check.function("fn", fn, "an async function that takes an item")
    if isasyncgenfunction(fn) or isasyncgenfunction(type(fn).__call__):
        raise TypeError(
            f"fn is {shown(fn)}, an async generator; give an async function that returns one "
            "result of an item, such as a list of samples, in place of yielding them"
        )
    batch_size = check.integer("batch_size", batch_size, least=1)
    concurrency = check.integer(
        "concurrency",
        concurrency,
        least=batch_size,
        expected=f"an integer >= batch_size, which is {batch_size}: a batch must fit into it",
    )
    max_staleness = check.integer("max_staleness", max_staleness, least=0)
    check.instance(
        "when_stale", when_stale, WhenStale, "WhenStale.WAIT, WhenStale.ACCEPT or WhenStale.DROP"
    )
    if version is not None:
        check.instance("version", version, GlobalStep, "a GlobalStep that the learner publishes")
    if accept is not None:
        expected = "a function that takes a result and returns a bool"
        check.function("accept", accept, expected, num_args=1)
    if restart is not None:
        check.instance("restart", restart, Restart, "Restart(max_attempts=...)")
    max_failures = check.integer("max_failures", max_failures, least=0)
    return Rollouts(
        stage_of(source),
        fn,
        batch_size,
        concurrency,
        max_staleness,
        when_stale,
        version,
        accept,
        restart,
        max_failures,
        None if journal is None else Journal(journal),
    )


class Rollouts(Buffered, RolloutStage):
    kind = "rollouts"
    must_be_last = True

    def __init__(
        self,
        source: Stage[Any],
        fn: Callable[[Any], Awaitable[Any]],
        batch_size: int,
        concurrency: int,
        max_staleness: int,
        when_stale: WhenStale,
        version: GlobalStep | None,
        accept: Callable[[Any], bool] | None,
        restart: Restart | None,
        max_failures: int,
        journal: Journal | None,
    ) -> None:
        self._fn = fn
        self._batch_size = batch_size
        self._concurrency = concurrency
        self._max_staleness = max_staleness
        self._when_stale = when_stale
        self._given_version = version
        self._accept_result = accept
        self._restart = restart
        self._max_failures = max_failures
        self._many_refused = _MANY_REFUSED * batch_size
        self._num_asking = 0  # tasks that wait for a batch
        self._journal = journal
        self._num_recovered = self._num_outdated = 0
        super().__init__(source)
        self._parameters = {
            "fn": getattr(fn, "__name__", self.kind),
            "batch_size": batch_size,
            "concurrency": concurrency,
            "max_staleness": max_staleness,
        }

    def _set(self, state: State | None) -> None:
        super()._set(state)
        version = self._given_version
        self._published = None if version is None else PublishedVersion(version)
        self._step = version  # that of the session otherwise, while one asks
        self._num_trained = 0  # batches; without a version of the program these are the version
        self._ages = Ages(self._batch_size, self._max_staleness, self._when_stale)
        self._has_begun = False
        self._pending: deque[Call] = deque()  # read, and not begun
        self._resumed: list[Call] = []  # the same, but held, with parts; oldest version first
        self._source_error: Exception | None = None  # why nothing more is read; after all results
        self._num_calls = 0  # under way, also those that are cancelled and clean up
        self._staleness = Counter[int]()
        self._training_end: Stop | None = None  # of the session that asked last
        self._num_refused_in_a_row = 0
        self._is_timed = False  # the wait for room ends by itself, to say that the learner starves
        self._first_ident = 0  # of its calls, in a record
        self._warned_at: int | None = None  # the version for which the log said so
        # With a journal: which training it is of, the batches that were trained on before, and, of
        # items that are not read yet, by place, what it has, and what is held.
        saved = state or {}
        self._training = ""
        if self._journal is not None:
            self._training = str(saved.get("journal") or uuid.uuid4().hex)
        self._clock = 0
        self._has_recovered = self._journal is None
        self._found: dict[int, list[Record]] = {}
        self._held: dict[int, Call] = {}

    # Calls

    def _start(self) -> None:
        super()._start()
        self._clock = self._counting.num_batches
        if self._recorder is not None:
            self._first_ident = self._recorder.first_ident()

    def _begin_reader(self) -> None:
        """It begins when the learner asks: only then are the weights restored."""

    def _num_room(self) -> int:
        if self._held:  # the learner may wait for them
            return 1
        # at least one is read ahead, so that the end is known when the last call has begun
        return 0 if self._pending or self._resumed else max(1, self._num_room_for_calls())

    def _may_go_on(self, call: Call) -> bool:
        """Whether a call with parts from the journal may: no part is older than its stamp."""
        version = self._version()
        if call.born > version or (self._step is not None and call.version > self._step.value):
            return False
        return self._num_calls < self._concurrency

    def _waits_for_resumed(self) -> bool:
        """Whether the learner waits, and nothing but calls with parts of later versions is left."""
        if not self._resumed or self._num_calls or self._held or self._is_over:
            return False
        return self._num_asking > len(self._ready)

    def _begin_call(self, call: Call) -> None:
        if call.is_held:  # else it was dropped meanwhile
            self._num_calls += 1
            call.worker = self._begin_task(partial(self._call, call))

    def _num_room_for_calls(self) -> int:
        """How many calls may begin now."""
        ages = self._ages
        num_free = self._concurrency - self._num_calls - ages.num_ready
        return min(num_free, ages.num_room(self._version()))

    def _accept(self, pairs: Sequence[Pair]) -> None:
        for item, mark in pairs:
            is_wanted = self._counting.add(mark) is not None
            place = self._counting.end - 1
            call = self._held.pop(place, None) or Call(None, place)
            call.item = item
            if self._journal is not None:
                is_wanted = self._needs_call(call, is_wanted)
            if is_wanted and call.is_held:
                insort(self._resumed, call, key=attrgetter("born"))
            elif is_wanted:
                self._pending.append(call)
        self._look()

    def _end_source(self, error: Exception | None) -> None:
        self._source_error = error
        for call in self._held.values():  # the source is shorter than it was
            self._let_go(call)
        self._held.clear()
        self._found.clear()
        self._look()

    # The journal

    async def _read_source(self, limit: int) -> Sequence[Pair]:
        if not self._has_recovered:
            await self._recover()
        return await super()._read_source(limit)

    async def _recover(self) -> None:
        """Hold the results that the journal has of items that are not finished."""
        journal, engine = self._journal, self._engine
        assert journal is not None
        open_journal = partial(journal.open, self._training)
        records = await run_blocking(engine, open_journal, _CLEAN_UP_SECS, "asynchooks-journal")
        self._has_recovered = True
        found, counting = self._found, self._counting
        for each in records:  # of two of a name, the last one counts
            if counting.is_finished(each.place) or each.place in counting.in_hand:
                continue
            # a part behind a result: it was too old, and so are parts of an older version
            its = found.get(each.place, []) if each.name else []
            its = [was for was in its if was.name and was.born >= each.born]
            found[each.place] = [*its, each]
        for each in sorted((min(its, key=_born) for its in found.values()), key=_born):
            self._hold(each)
        if found:
            text = "%r goes on with what %s has of %d items; %d were too old"
            logger.info(text, self, journal, len(self._held), self._num_outdated)

    def _hold(self, record: Record) -> None:
        """Hold a result, or a call that has made parts, from before its item is read."""
        call, born = Call(None, record.place), record.born - self._clock
        call.version = record.version
        if self._ages.has_room(born):
            if record.value:  # else accept refused it
                self._ages.begin(call, born)
            self._held[record.place] = call
            return
        del self._found[record.place]
        if self._when_stale is WhenStale.DROP and not record.name:
            self._give_up(call, "dropped")
        else:
            self._num_outdated += 1

    def _needs_call(self, call: Call, is_wanted: bool) -> bool:
        """Whether the function is called for an item that was read just now.

        Else the journal has the result. Parts that it has go to the call, which is held then.
        """
        call.checksum = checksum(call.item)  # before it can be changed
        what, found = "", {each.name: each for each in self._found.pop(call.place, ())}
        result, call.parts = found.pop("", None), found
        if any(each.item != call.checksum for each in (result, *found.values()) if each):
            what, call.parts = f"is of another item than {shown(call.item)}", {}
        elif result is None and is_wanted:
            return True
        elif result is not None and is_wanted:
            try:
                call.result = pickle.loads(result.value) if result.value else None
            except Exception as error:
                what = f"cannot be read: {error!r}"
            else:
                self._num_recovered += 1
                if not result.value:
                    self._give_up(call, "refused")
                elif call.is_held:
                    self._ages.set_ready(call)
                return False
        self._let_go(call)
        if what and is_wanted:
            logger.warning("What the journal of %r has of item %d %s", self, call.place, what)
        return is_wanted

    def _let_go(self, call: Call) -> None:
        if call.is_held:
            self._ages.withdraw(call)

    def _is_current(self) -> bool:
        """Whether the model has not gone back: what calls make now is of no known version."""
        return self._counting is self._used()

    def _keep(self, call: Call, name: str, made: object, *, is_of_use: bool = True) -> None:
        """Have the journal keep what was made of an item; what it cannot keep ends training."""
        assert self._journal is not None
        try:
            what = f"the part {name!r}" if name else "the result"
            value = pickled(made, what) if is_of_use else b""
        except TypeError as error:
            self._name(call, error)
            self._fail(error)
            raise
        born = self._clock + call.born
        record = Record(call.checksum, call.place, born, call.version, name, value)
        if name:
            call.parts[name] = record
        if call.is_held:
            self._journal.add(record)

    def _when_saved(self) -> Callable[[], None] | None:
        journal = self._journal
        if journal is None:
            return None
        frontier, _, beyond = self._used().after(self._places_run())
        finished = frozenset(beyond)
        return lambda: journal.cut(lambda place: place < frontier or place in finished)

    def _num_used(self) -> int:
        """Batches that were trained on."""
        num = self._used().num_batches
        if self._consumers is None:
            return num + self._ages.num_batches - len(self._ready)
        return num + sum(bool(each.places_run) for each in self._consumers.members)

    # The version of the weights

    def _version(self) -> int:
        """The version of the weights in use, on the learner's clock."""
        if self._published is None:
            return self._num_trained
        return self._published.on_clock(self._ages.num_batches)

    def _note_used(self, taken: Taken) -> None:
        self._used().num_batches += 1
        if taken.mark[1] is self._ages:  # else it was made before the input went back
            self._num_trained = min(self._num_trained + 1, self._ages.num_batches)
            self._look()

    async def _wait_for_room(self, task: Task) -> None:
        engine, published = self._engine, self._published
        self._room = slot = Slot(engine, "room in rollouts, or a newer version of the weights")
        forget = None
        if published is not None:
            step = published.step
            forget = step.gate.watch(slot, step.value + 1)
        self._wait_for_others()
        self._is_timed = self._starves()
        self._look()  # another thread may have published it since
        task.is_at_rest = True
        try:
            until = engine.now() + _PATIENCE_SECS if self._is_timed else math.inf
            if await engine.park(slot, until) is TIMED_OUT:
                self._warn_of_old_version()
        finally:
            task.is_at_rest = False
            if forget is not None:
                forget()
        self._look()

    def _starves(self) -> bool:
        """Whether the learner waits, only a newer version can help, and the log has not said so."""
        if self._published is None or self._num_calls or self._is_over:
            return False
        if self._num_asking <= len(self._ready):
            return False
        version = self._version()
        return self._warned_at != version and self._ages.num_room(version) <= 0

    def _warn_of_old_version(self) -> None:
        version = self._warned_at = self._version()
        logger.warning(
            "The learner waits for results, and no call may begin: the last version of the weights "
            "that was published is %d, the learner is %d steps ahead, and max_staleness is %d. "
            "Publish the step when its weights have arrived: version.publish(step), at least once "
            "in max_staleness + 1 steps",
            self._steps_of(version),
            self._ages.num_batches - version,
            self._max_staleness,
        )

    def _stamp(self, call: Call) -> None:
        """Write down the version of the weights that the call begins with."""
        born = self._version()
        call.version = self._steps_of(born)
        if call.parts:
            oldest = min(call.parts.values(), key=_born)
            its = min(born, oldest.born - self._clock)
            if its == born or self._ages.has_room(its):
                born, call.version = its, min(call.version, oldest.version)
            else:
                self._num_outdated += len(call.parts)
                call.parts = {}
        self._ages.begin(call, born)

    def _steps_of(self, version: int) -> int:
        return version if self._step is None else self._step.value

    async def _call(self, call: Call, task: Task) -> None:
        """A task: the calls for one item."""
        try:
            if call.is_held and not self._is_over:
                await self._make(call, task)
        finally:
            call.worker = None
            self._num_calls -= 1
            self._look()

    async def _make(self, call: Call, task: Task) -> None:
        """Call the function, again after a failure that allows it, and settle the item."""
        while True:
            error: Exception | None = None
            try:
                is_of_use = await self._attempt(call, task)
            except BaseException as raised:
                error = self._failure_of(call, raised)
            if self._is_over or not call.is_held:  # it is not wanted any more
                if error is not None and task.is_unwanted and self._is_of_clean_up(error):
                    logger.warning(
                        "The call for item %d of %r was cancelled, and ended by an error: %r",
                        call.place,
                        self,
                        error,
                    )
                return
            if error is None:
                break
            if not await self._may_try_again(call, error):
                return
            self._ages.withdraw(call)  # what comes now is younger
            self._stamp(call)
        self._num_failures = 0  # they count in a row
        if self._journal is not None and self._is_current():
            self._keep(call, "", call.result, is_of_use=is_of_use)
        if is_of_use:
            self._ages.set_ready(call)
            self._num_refused_in_a_row = 0
        else:
            self._ages.withdraw(call)
            self._give_up(call, "refused")
            self._count_refused()

    async def _attempt(self, call: Call, task: Task) -> bool:
        """Call the function; returns whether the result is of use."""
        engine, recorder, span = self._engine, self._recorder, None
        if recorder is not None:
            name, ident = getattr(self._fn, "__name__", self.kind), self._first_ident + call.place
            span = recorder.task_span(engine, Kind.CALL, name, ident)
        parts = None
        if self._journal is not None:
            parts = Parts(call.parts, partial(self._keep, call), self._is_current)
            parts.enter()
        begun = engine.stopwatch()
        try:  # a context manager would cost a plan of many calls a twentieth of its time
            pending = self._fn(call.item)
            if not isinstance(pending, Awaitable):
                text = (
                    f"fn returned {shown(pending)}, which cannot be awaited; give an async function"
                )
                return self._misuse(call, text)
            call.result = await CancelledOnce(pending, engine, partial(self._shield, call, task))
            accept = self._accept_result
            answer: Any = accept is None or accept(call.result)
        except BaseException as error:
            if span is not None:
                span.end(error)
            raise
        finally:
            self._clocks.add_call(engine.stopwatch() - begun)
            if parts is not None:
                parts.is_over = True
        if span is not None:
            span.end()
        if isinstance(answer, Awaitable):
            close_unrun(answer)
            return self._misuse(call, "accept is async; give a function that returns a bool")
        return bool(answer)

    def _misuse(self, call: Call, text: str) -> bool:
        """An error that every item would meet: it ends training at once."""
        error = TypeError(text)
        self._name(call, error)
        self._fail(error)
        return False

    def _failure_of(self, call: Call, raised: BaseException) -> Exception:
        """What a call has failed with; raises what is no failure of one call."""
        if isinstance(raised, Exception):
            return _alone(raised)
        if self._engine.failure_in(raised) is None:
            raise raised
        self._name(call, raised)
        if not is_a(raised, "asyncio", "CancelledError"):  # an exit, say
            raise raised
        # of something that it awaited, which was cancelled
        error = RuntimeError(f"rollouts called what raised {raised!r}")
        error.__cause__ = raised
        return error

    def _shield(self, call: Call, task: Task) -> None:
        """Its cancellation is delivered: what it awaits from now on is not cancelled."""
        if task.is_unwanted and not task.is_at_rest:
            task.protect()
            self._engine.start(self._end_clean_up, call, task)

    async def _end_clean_up(self, call: Call, task: Task) -> None:
        assert task.task is not None
        if not await task.task.wait(self._engine.now() + _CLEAN_UP_SECS):
            logger.error(
                "The call for item %d of %r did not end within %g s of its cancellation",
                call.place,
                self,
                _CLEAN_UP_SECS,
            )
            task.scope.shield = task.is_at_rest = False
            task.cancel()

    async def _may_try_again(self, call: Call, error: Exception) -> bool:
        """Whether a failed call is made again, after a pause; else the item is settled."""
        if is_stop(error) and self._training_end is not None and self._training_end.is_set:
            self._ages.withdraw(call)  # a wait of its own ended by the stop
            return False
        restart = self._restart
        call.num_failures += 1
        if restart is not None and call.num_failures <= restart.max_attempts:
            self._counting.counts["retried"] += 1
            logger.info("The call for item %d of %r is made again: %r", call.place, self, error)
            slot = Slot(self._engine, "another call of rollouts")
            pause = restart.pause_before(call.num_failures)
            await self._engine.park(slot, self._engine.now() + pause)
            return call.is_held and not self._is_over
        if self._leaves_out(call.place, error):
            self._ages.withdraw(call)
            self._give_up(call, "failed")
        else:
            self._name(call, error)
            self._fail(error)
        return False

    def _name(self, call: Call, error: BaseException) -> None:
        note_once(error, f"in rollouts, at item {call.place}: {shown(call.item)}")

    def _give_up(self, call: Call, why: str) -> None:
        """The item is finished, and is not trained on."""
        self._counting.counts[why] += 1  # those of the model that has gone back are forgotten
        self._counting.finish((call.place,))
        logger.debug("Item %d of %r is %s", call.place, self, why)

    def _count_refused(self) -> None:
        self._num_refused_in_a_row += 1
        if self._num_refused_in_a_row == self._many_refused:
            logger.warning(
                "The last %d results of %r were all refused by accept; the learner waits",
                self._many_refused,
                self,
            )

    # Batches

    async def take(self, stop: Stop | None) -> Any:
        if self._phase is not Phase.OPEN:
            self._open_by_itself()
        self._training_end = stop
        if self._published is not None:
            self._version()  # the first look comes before the first batch
        elif isinstance(stop, TrainingEnd):
            self._step = stop.step  # the function uses the weights that the session trains
        else:  # read by hand: what was given out has been trained on
            self._step, self._num_trained = None, self._ages.num_batches - len(self._ready)
        if not self._has_begun:
            self._has_begun = True
            super()._begin_reader()
        return await super().take(stop)

    async def wait(self, stop: Stop | None) -> bool:
        self._num_asking += 1
        try:
            self._look()
            return await super().wait(stop)
        finally:
            self._num_asking -= 1

    def _places_of(self, taken: Taken) -> Sequence[int]:
        if self._recorder is not None:
            for each in taken.item:
                ident = self._first_ident + each.place
                self._recorder.use(self._engine, ident, float(each.staleness))
        return [each.place for each in taken.item]

    def _look(self) -> None:
        """Something has changed: perhaps there is a batch now, or room for a call."""
        has_all = self._has_all and not self._pending
        while self._num_asking > len(self._ready) and not self._is_over:
            if batch := self._ages.take_batch(has_all):
                self._give_out(batch)
                continue
            if has_all and self._ages.num_held == 0:
                self._finish(self._source_error)
            break
        while self._resumed and not self._is_over and self._may_go_on(self._resumed[0]):
            self._begin_call(self._resumed.pop(0))
        while self._pending and not self._is_over and self._num_room_for_calls() > 0:
            call = self._pending.popleft()
            self._stamp(call)
            self._begin_call(call)
        if self._waits_for_resumed():  # the journal lacks results, or sizes of batches differ
            for call in self._resumed:
                self._let_go(call)
            self._pending.extendleft(reversed(self._resumed))
            self._resumed.clear()
            self._look()
        if self._is_over or self._num_room() > 0 or (self._starves() and not self._is_timed):
            super()._make_room()

    _make_room = _look

    def _give_out(self, calls: Sequence[Call]) -> None:
        now = self._ages.num_batches - 1
        batch = [
            Rollout(call.item, call.result, call.version, max(0, now - call.born), call.place)
            for call in calls
        ]
        for each in batch:
            self._staleness[each.staleness] += 1
        self._put((Taken(batch, (self, self._ages, None)),))
        for call in self._ages.take_stale():
            self._give_up(call, "dropped")
            if call.worker is not None:
                call.worker.cancel()

    def _why_empty(self) -> str:
        known = self._used().counts
        counts = {why: known[why] for why in ("refused", "failed", "dropped")}
        found = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
        if not found:
            return super()._why_empty()
        num = self._used().end
        return f"{self!r} gave no batch, as none of its {num} items was of use: {found}"

    # Position: what is not finished begins again

    def _origin(self) -> Mark:
        return self._source._origin()

    def _saved(self, mark: Mark) -> dict[str, Any]:
        state = {"stage": self.kind, "source": state_of(mark), "counts": dict(self._used().counts)}
        if self._journal is None:
            return state
        return {**state, "journal": self._training, "batches": self._num_used()}

    def _position_in(
        self, state: Mapping[str, Any], left_out: Iterable[int] = ()
    ) -> tuple[Position, dict[str, Any]]:
        position, own = super()._position_in(state, left_out)
        position.counts = _counts_in(state)
        position.num_batches = saved_count(state.get("batches", 0))
        return position, own

    def _mark_in(self, state: dict[str, Any]) -> Mark:
        return state["source"]

    def _epoch_of(self, data: Any, below: Mark) -> int:
        raise no_epoch(self)

    # The end

    async def _release(self) -> None:
        if self._journal is not None:
            await wait_to_end(self._engine, partial(self._journal.close, self._engine))

    async def _wait_for_tasks(self) -> None:
        last = self._engine.now() + _CLEAN_UP_SECS + _LEFT_ALONE_SECS
        for task in list(self._tasks):
            until = math.inf if task is self._reader else last
            if task.task is not None and not await task.task.wait(until):
                logger.error("A cancelled call of %r did not end: it is left alone", self)

    def statistics(self) -> RolloutStatistics:
        known, counts = Stage.statistics(self), self._used().counts
        return RolloutStatistics(
            **{each.name: getattr(known, each.name) for each in fields(known)}
            | {"num_failures": counts["failed"]},
            num_under_way=self._num_calls,
            num_ready=self._ages.num_ready,
            staleness=dict(sorted(self._staleness.items())),
            num_refused=counts["refused"],
            num_dropped=counts["dropped"],
            num_retried=counts["retried"],
            num_recovered=self._num_recovered,
            num_outdated=self._num_outdated,
        )

    def _fill(self) -> tuple[int, int]:
        return self._num_calls + self._ages.num_ready, self._concurrency


def _born(record: Record) -> int:
    return record.born


def _counts_in(state: State) -> Counter[str]:
    return Counter({why: saved_count(num) for why, num in state["counts"].items()})


def _alone(error: Exception) -> Exception:
    """The error, out of the groups in which it is alone.

    A RuntimeError if it would pass for the end of the input.
    """
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if is_input_end(error):
        bug = RuntimeError(f"rollouts called what raised {error!r}")
        bug.__cause__ = error
        return bug
    return error
