"""Hooks at a session's input: FeedHook, which reads it, and InputPositionHook, which keeps it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import InputStateError, InputStructureError, StopTraining
from .._hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from .._session_stop import SessionStop
from .._stop import Stop
from ..data._drawer import Drawer
from ..data._draws import Draws, draws_of
from ..data._stage import Stage
from ..data._training_end import TrainingEnd

logger = logging.getLogger("asynchooks")


class FeedHook(SessionRunHook):
    """Feeds each run the next item of a source; where that ends, training ends cleanly.

    Reading goes on beside the run: one item ahead, or as many as the source's own `prefetch`. An
    item counts as used when `after_run` comes. One that was fed to a run that failed, or was
    refused at the limit, is fed again, or goes to another worker at the end; a checkpoint holds
    the position behind the last that was used, and a resumed session goes on there. Several
    workers, each with a FeedHook of its own around the same stage, draw from it in turn.

    The first session opens the source (unless that was done) and the last one closes it.

    Args:
        source: see `asynchooks.data`.
        names: where the parts of an item are fed. None: an item is a mapping, fed as it is. One
            name or tensor: the whole item. A list or tuple: the parts of an item that is one. A
            mapping from the item's keys to names or tensors: those parts of a mapping.

    Raises:
        TypeError: `source` cannot be read, or `names` are none.
        ValueError: `names` has one twice.
        InputStructureError: out of `run`: an item is not what `names` asks for (says which).
        InputError: out of `run`: the source is empty, or cannot be read.

    Example:
        hooks = [FeedHook(prefetch(batch(records, 32), 2), ["images", "labels"])]
    """

    _looks_at_default_graph = False

    def __init__(self, source: Any, names: Any = None) -> None:
        self._draws = draws_of(source)
        is_empty = isinstance(names, (list, tuple, Mapping)) and not names
        if is_empty or isinstance(names, (set, frozenset, int, float)):
            raise TypeError(
                f"names is {names!r}; give a name or tensor, a list of them, a mapping from keys "
                "of an item to them, or None"
            )
        fed = list(names.values()) if isinstance(names, Mapping) else names
        if isinstance(fed, (list, tuple)) and len(set(fed)) < len(fed):
            raise ValueError(
                f"names is {names!r}, which feeds one of them twice, so that a part of each item "
                "would be lost; give each part a name of its own"
            )
        self._names = names
        self._drawer: Drawer | None = None
        self._end: TrainingEnd | None = None  # what ends its waits
        self._stops: SessionStop | None = None
        self._met: SessionStop | None = None  # of the session that is opening
        self._run = _CurrentRun()
        self._num_refused = 0  # sessions that are about to close without having had it

    def _meet(self, hooks: Sequence[Any], stops: SessionStop) -> None:
        self._met = stops

    async def begin(self) -> None:
        if self._drawer is not None:
            self._num_refused += 1
            raise RuntimeError(
                "this FeedHook is in use already; give each session one of its own, around the "
                "same source, and list it once"
            )
        self._stops, self._end = self._met, None
        self._drawer = Drawer(self._draws, self._stops)
        self._drawer.has_run = self._run.has_ended
        self._drawer.join()

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        drawer = self._drawer
        assert drawer is not None
        self._run.begin(run_context, self._stops)
        try:
            item = await drawer.take(self._end_of(run_context))
        except StopAsyncIteration:
            raise StopTraining(f"the input {self._draws.stage!r} has ended") from None
        return SessionRunArgs(None, self._feeds(item, drawer.num_before))

    def _end_of(self, run_context: SessionRunContext) -> TrainingEnd:
        if self._end is None:
            stop = Stop() if self._stops is None else self._stops.run_stop
            self._end = TrainingEnd(stop, run_context.global_step)
        return self._end

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._run.end()
        if self._drawer is not None:
            self._drawer.use()

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
        got = repr(item)
        if isinstance(item, Mapping):
            got = f"a mapping with the keys {list(item)}"
        elif isinstance(item, (list, tuple)):
            got = f"a {type(item).__name__} of {len(item)}"
        got = got if len(got) <= 200 else got[:197] + "..."
        return InputStructureError(
            f"item {place} of {self._draws.stage!r} is {got}; FeedHook expected {expected}"
        )

    def state_dict(self) -> dict[str, Any]:
        return saved_position(self._draws)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._draws.load_state_dict(state)

    async def end(self, session: Any) -> None:
        await self._let_go()  # what was not used may be of use to others

    async def _leave(self, error: BaseException | None) -> BaseException | None:
        if self._num_refused:
            self._num_refused -= 1
            return error
        try:
            await self._let_go()
        except BaseException as closing:
            if error is None:
                return closing
            error.add_note(f"then, closing the input: {closing!r}")
        return error

    async def _let_go(self) -> None:
        drawer, self._drawer = self._drawer, None
        if drawer is not None:
            await drawer.leave()


class InputPositionHook(SessionRunHook):
    """Keeps the position of a pipeline that the training loop itself reads.

    Items of `session.batches(source)` count as used when the run behind them has ended, and a
    checkpoint holds the position behind them. (`FeedHook` does so for what it feeds.)

    Args:
        source: the stage that `session.batches` is given.

    Raises:
        TypeError: it is no stage.
        ValueError: another stage reads it: the position would be ahead of what was used.

    Example:
        source = prefetch(batch(records, 32), 2)
        saving = CheckpointSaverHook("model", save_steps=1000, saver=saver)
        async with MonitoredSession([InputPositionHook(source), saving], creator) as session:
            async for images in session.batches(source):
                await session.run("loss", {"images": images})
    """

    _looks_at_default_graph = False

    def __init__(self, source: Stage[Any]) -> None:
        self._draws = draws_of(checked_stage(source, "InputPositionHook"))
        self._run = _CurrentRun()
        self._stops: SessionStop | None = None

    def _meet(self, hooks: Sequence[Any], stops: SessionStop) -> None:
        self._stops = stops

    async def before_run(self, run_context: SessionRunContext) -> None:
        self._run.begin(run_context, self._stops)
        for drawer in self._draws.drawers:
            if drawer.owner is self._stops:
                drawer.has_run = self._run.has_ended

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self._run.end()
        for drawer in self._draws.drawers:
            if drawer.owner is self._stops:
                drawer.use()

    def state_dict(self) -> dict[str, Any]:
        return saved_position(self._draws)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._draws.load_state_dict(state)


class _CurrentRun:
    """A run between its step and `after_run` of the hook: another worker may save meanwhile."""

    def __init__(self) -> None:
        self._context: SessionRunContext | None = None
        self._stops: SessionStop | None = None

    def begin(self, context: SessionRunContext | None, stops: SessionStop | None) -> None:
        self._context, self._stops = context, stops
        if stops is not None and stops.owner is not None:
            stops.owner.has_run = False

    def end(self) -> None:
        if self._stops is not None:
            self.begin(None, self._stops)

    def has_ended(self) -> bool:
        owner = None if self._stops is None else self._stops.owner
        if owner is not None and owner.has_run:  # in a thread, and its task has not come back
            return True
        hooks = None if self._context is None else self._context._hooks
        call = None if hooks is None else hooks.current
        return call is not None and call.moment == "after_run"


def saved_position(draws: Draws) -> dict[str, Any]:
    """The position; nothing, and a word about it, where the pipeline has none."""
    try:
        return draws.state_dict()
    except InputStateError as error:
        if not draws.has_complained:
            draws.has_complained = True
            logger.warning("The position in the input is not saved: %s", error)
        return {}


def checked_stage(source: Any, who: str) -> Stage[Any]:
    if not isinstance(source, Stage):
        raise TypeError(
            f"{who} got {source!r}; give the stage that the session draws from, such as "
            "prefetch(source, 8)"
        )
    if source._num_parents:
        raise ValueError(
            f"{who} got {source!r}, which another stage reads, ahead of the session perhaps; give "
            "the last stage, from which the session draws"
        )
    return source
