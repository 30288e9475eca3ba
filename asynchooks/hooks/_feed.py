"""FeedHook: feeds each run the next item of a source."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .. import _check as check
from .._engine.stop import Stop
from .._errors import (
    InputStructureError,
    StopTraining,
    add_note,
    passes_for_input_end,
    shown,
)
from .._hook import (
    SessionHooks,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    begin_graph,
)
from ..backends._creator import close_raw
from ..backends._raw_session import raw_session_of
from ..data._consumers import Consumer, CurrentRun, TrainingEnd, consumers_of
from ..data._division import EPOCHS_ENDED
from ._input_position import saved_position
from ._metrics import text_of


@check.names_options
class FeedHook(SessionRunHook):
    """Feeds each run the next item of a source; where that ends, training ends cleanly.

    Reading goes on during the run: one item ahead, or as many as the source's own `prefetch`. An
    item counts as used when the step is made, also where the run is cancelled, or fails in another
    hook, behind it. An item of a run whose step failed, or was refused at the limit, is fed again,
    or goes to another worker at the end. A checkpoint holds the position behind the last item that
    was used, and a resumed session goes on there; another number of ranks does so behind `shard`.
    Several workers, each with a FeedHook of its own around the same stage, take its items in turn.

    The first session opens the source, unless it is open. It is closed when no session reads it
    any more and it has ended, or no other session of the same `SharedSessionCreator` is open that
    could still begin to read.

    Args:
        source: see `asynchooks.data`.
        names: where an item is fed. None: an item is a mapping, fed as it is. One name, tensor or
            variable: the whole item. A list or tuple of them: the parts of a list or tuple. A
            mapping from keys to them: those parts of a mapping.
        after_epoch: `after_epoch(session, epoch)`, a plain or a coroutine function, called when
            the runs with all items of a pass of `repeat` have ended, before the next item is fed,
            and at the end of the data; `epoch` is 0 for the first pass. No worker that shares
            the model runs a step meanwhile, as in `global_step.exclusive()`; an item of the pass
            that another worker still has in hand is trained later. A plain function runs in a
            thread. A checkpoint holds which passes it was called for: with the model that is
            restored it is called once for each. Cancelling the run cancels a coroutine function,
            and waits for a plain one; the next run calls it again. An error leaves the run. A batch
            with items of two passes is of the second one.

    Raises:
        TypeError: `source` cannot be read, `names` is of another type, or `after_epoch` is no
            function.
        ValueError: `names` has one twice.
        InputStructureError: out of `run`: an item does not fit `names` (says which).
        InputError: out of `run`: the source is empty, or cannot be read.
        InputStateError: out of `run`: there is `after_epoch`, and a stage, such as `interleave`,
            mixes items of several passes.

    Example:
        hooks = [FeedHook(prefetch(batch(records, 32), 2), ["images", "labels"])]
    """

    uses_default_graph = False
    _shown = (("source", "_consumers.stage"), ("names", "_names"))

    def __init__(
        self,
        source: Any,
        names: Any = None,
        *,
        after_epoch: Callable[[Any, int], Any] | None = None,
    ) -> None:
        self._consumers = consumers_of(source)
        if after_epoch is not None:
            expected = "a function of the session and the epoch"
            check.function("after_epoch", after_epoch, expected, num_args=2)
        self._after_epoch = after_epoch
        is_empty = isinstance(names, (list, tuple, Mapping)) and not names
        if is_empty or isinstance(names, (set, frozenset, int, float)):
            raise TypeError(
                f"names is {names!r}; give a name or tensor, a list of them, a mapping from keys "
                "of an item to them, or None"
            )
        fed = list(names.values()) if isinstance(names, Mapping) else names
        if isinstance(fed, (list, tuple)) and _has_repeats(fed):
            raise ValueError(
                f"names is {names!r}, which feeds one of them twice, so that a part of each item "
                "would be lost; give each part a name of its own"
            )
        self._given = self._names = names
        self._consumer: Consumer | None = None
        self._end: TrainingEnd | None = None  # ends the waits for items
        self._no_stop = Stop()  # where no session calls the hook
        self._run = CurrentRun(None)
        self.counts_epochs = False
        """Whether a hook is to ask for `epochs_ended`."""
        self._epoch = 0  # of the item of the last run, if so

    async def begin(self) -> None:
        if self._consumer is not None:
            raise RuntimeError(
                "this FeedHook is in use already; give each session one of its own, around the "
                "same source, and list it once"
            )
        shared = SessionHooks.of(self)
        shared.epochs, self.counts_epochs = shared.epochs or self, False
        self._run.stop, self._end = shared.stop, None
        graph = begin_graph.get()
        self._names = self._given if graph is None else _as_fed(graph, self._given)
        self._consumer = self._consumers.join(self._run)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        consumer = self._consumer
        assert consumer is not None
        consumer.settle()
        self._run.begin(run_context)
        of_session = self._run.stop
        stop = self._no_stop if of_session is None else of_session.run_stop
        if self._end is None or self._end.stop is not stop:  # that of a new raw session
            self._end = TrainingEnd(stop, run_context.global_step)
        try:
            item = await consumer.take(self._end)
        except StopAsyncIteration:
            if self._after_epoch is not None:
                await self._end_epochs(self._after_epoch, run_context, self._consumers.num_epochs)
            raise StopTraining(f"the input {self._consumers.stage!r} has ended") from None
        if self._after_epoch is not None:
            await self._end_epochs(self._after_epoch, run_context, consumer.epoch)
        if self.counts_epochs:
            self._epoch = consumer.epoch
        return SessionRunArgs(None, self._feeds(item, consumer.num_before))

    async def _end_epochs(
        self, after_epoch: Callable[[Any, int], Any], run_context: SessionRunContext, num_ended: int
    ) -> None:
        """Call the function for each pass that has ended, and that it was not called for."""
        consumers = self._consumers
        if consumers.num_epochs_ended is None:  # a training begins, or a state from before
            consumers.num_epochs_ended = num_ended
        while consumers.num_epochs_ended < num_ended:
            epoch = consumers.num_epochs_ended
            consumers.num_epochs_ended += 1  # first: no other worker calls it, too
            try:
                async with run_context.global_step.exclusive():
                    await self._call_alone(after_epoch, run_context, epoch)
            except BaseException:
                consumers.num_epochs_ended = epoch
                raise

    @staticmethod
    async def _call_alone(
        after_epoch: Callable[[Any, int], Any], run_context: SessionRunContext, epoch: int
    ) -> None:
        raw = raw_session_of(run_context.session)
        raw.enter_run()  # another worker that shares it does not close it meanwhile
        try:
            await raw.call(after_epoch, raw.exposed, epoch, is_alone=True)
        except Exception as error:
            if passes_for_input_end(error):
                # left as it is, it would pass for the end of training
                raise RuntimeError(
                    f"after_epoch of FeedHook let {error!r} out: its input has ended; catch that "
                    "where it reads"
                ) from error
            raise
        finally:
            if raw.leave():
                await close_raw(raw)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._consumer is not None:
            self._run.end()
            self._consumer.use()

    async def epochs_ended(self) -> tuple[int, int]:
        """How many passes end before the item of the last run, and before the next item.

        That is waited for, and the next run is fed it.
        """
        consumer, before = self._consumer, self._epoch
        assert consumer is not None
        try:
            await consumer.take(self._end)
        except StopAsyncIteration:
            return before, self._consumers.num_epochs
        except StopTraining:
            return before, before
        return before, consumer.epoch

    @property
    def shown_epoch(self) -> str:
        """The pass of the item that was used last, for people; "" without `repeat`."""
        return self._consumers.shown_epoch()

    def leave_out(self) -> bool:
        """Feed what the last run was fed no more, when model and input go back behind it.

        Returns whether that is so: where the input has no position, it goes on as ever.
        """
        return self._consumer is not None and self._consumer.leave_out()

    def vouch(self) -> None:
        """What the last run was fed is not to blame for what comes."""
        if self._consumer is not None:
            self._consumer.vouch()

    def _feeds(self, item: Any, place: int) -> Mapping[Any, Any]:
        names = self._names
        if names is None:
            if isinstance(item, Mapping):
                return item
            raise self._misfit(item, place, "a mapping from names to values, as names is None")
        if isinstance(names, Mapping):
            if isinstance(item, Mapping) and all(key in item for key in names):
                return {name: item[key] for key, name in names.items()}
            raise self._misfit(item, place, f"a mapping with the keys {list(names)}")
        if isinstance(names, (list, tuple)):
            if isinstance(item, (list, tuple)) and len(item) == len(names):
                return dict(zip(names, item, strict=True))
            raise self._misfit(item, place, f"a tuple of {len(names)}, one for each of names")
        return {names: item}

    def _misfit(self, item: Any, place: int, expected: str) -> InputStructureError:
        got = shown(item)
        if isinstance(item, Mapping):
            got = f"a mapping with the keys {shown(list(item))}"
        elif isinstance(item, (list, tuple)):
            got = f"a {type(item).__name__} of {len(item)}"
        return InputStructureError(
            f"item {place} of {self._consumers.stage!r} is {got}; FeedHook expected {expected}"
        )

    def state_dict(self) -> dict[str, Any]:
        place, num_ended = text_of(self._given), self._consumers.num_epochs_ended
        position = saved_position(self._consumers, place)
        if not position or self._after_epoch is None or num_ended is None:
            return position
        position[EPOCHS_ENDED] = num_ended
        return position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._after_epoch is not None:
            self._consumers.num_epochs_ended = state.get(EPOCHS_ENDED)
        self._consumers.load_state_dict({key: state[key] for key in state if key != EPOCHS_ENDED})

    @property
    def _is_by_hand(self) -> bool:
        return self._run.stop is None

    async def end(self, session: Any) -> None:
        if self._is_by_hand:
            await self._leave()
        elif self._consumer is not None:  # it leaves when the session is closed
            self._consumer.settle()
            self._consumer.give_back()  # other workers may use an item that was not used

    async def on_error(self, session: Any, exception: BaseException) -> None:
        if self._is_by_hand:  # else when the session is closed, and no run goes on
            await self._leave()

    async def after_close(self, exception: BaseException | None) -> None:
        try:
            await self._leave()
        except BaseException as closing:
            if exception is None:
                raise
            add_note(exception, f"then, closing the input: {closing!r}")

    async def _leave(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.leave()


def _has_repeats(fed: Collection[Any]) -> bool:
    """A tensor is compared by its id, as a variable may have no hash here."""
    return len({each if isinstance(each, str) else id(each) for each in fed}) < len(fed)


def _as_fed(graph: Any, names: Any) -> Any:
    """The names, each variable replaced by its tensor; ValueError if it is not of this graph.

    A variable has no hash where its graph is not the default one; its tensor always has one.
    """
    if isinstance(names, Mapping):
        return {key: _as_fed(graph, each) for key, each in names.items()}
    if isinstance(names, (list, tuple)):
        fed = [_as_fed(graph, each) for each in names]
        return fed if isinstance(names, list) else tuple(fed)
    is_variable = isinstance(names, sys.modules["tensorflow"].Variable)
    return graph.as_graph_element(names) if is_variable else names
