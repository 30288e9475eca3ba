"""One raw run out of what the caller and the hooks ask for. It runs nothing."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from .._errors import add_note, shown, tensorflow_train
from .._hook import SessionRunArgs, SessionRunValues
from ..backends._raw_session import RawSession


class MergedRun:
    """The arguments of a raw run, and the way back from its outputs to hooks and caller.

    What the caller passed is never changed, and goes through untouched if no hook adds to it.
    """

    __slots__ = (
        "_caller", "_fed", "_feeders", "_hook_fetches", "_hooks", "_option_requests", "_options",
        "_raw",
        "feed_dict", "run_metadata",
    )  # fmt: skip

    def __init__(
        self,
        raw: RawSession,
        caller: SessionRunArgs,
        run_metadata: Any,
        hooks: Sequence[Any] = (),
    ) -> None:
        self._raw = raw
        self._caller = caller
        self._hook_fetches: dict[int, Any] = {}  # by the hook's place: hooks may compare equal
        self._hooks = hooks  # by their places
        self._feeders: dict[Hashable, str] | None = None
        self._fed: list[tuple[str, Mapping[Any, Any]]] = []  # by which hook, and what
        self._option_requests: list[Any] = []
        self._options: Any = None
        self.feed_dict = caller.feed_dict
        self.run_metadata = run_metadata

    def add(self, place: int, hook: Any, request: Any) -> None:
        """Add what the hook at this place in the list asks for."""
        if not isinstance(request, SessionRunArgs):
            request = _converted(request, type(hook).__name__)
        if request.fetches is not None:
            self._hook_fetches[place] = request.fetches
        if request.options is not None:
            self._option_requests.append(request.options)
        if request.feed_dict:
            if not isinstance(request.feed_dict, Mapping):
                raise wrong_feeds(
                    f"{type(hook).__name__}.before_run returned the feed_dict", request.feed_dict
                )
            self._add_feeds(request.feed_dict, type(hook).__name__)

    def _add_feeds(self, feeds: Mapping[Any, Any], feeder: str) -> None:
        if self._feeders is None:
            own = self._caller.feed_dict or {}
            self._feeders = {name: "" for key in own for name in self._raw.feed_names(key)}
            self.feed_dict = dict(own)
        names = [name for key in feeds for name in self._raw.feed_names(key)]
        clashes = sorted({str(name) for name in names if name in self._feeders})
        if clashes:
            by_caller = any(self._feeders[name] == "" for name in names if name in self._feeders)
            pair = "a SessionRunHook and user" if by_caller else "two hooks"
            raise RuntimeError(
                f"Same tensor is fed by {pair}. Conflict(s): {', '.join(clashes)}; "
                f"{feeder} feeds them, too: leave them to one of the two"
            )
        self._feeders.update(dict.fromkeys(names, feeder))
        self._fed.append((feeder, feeds))
        self.feed_dict.update(feeds)

    @property
    def fetches(self) -> Any:
        """The caller's own, or a tuple of the caller's and each hook's."""
        if not self._hook_fetches:
            return self._caller.fetches
        return (self._caller.fetches, *self._hook_fetches.values())

    def finish_options(self) -> Any:
        """The merged run options, if any; makes room for metadata that hooks see."""
        options, requests = self._caller.options, self._option_requests
        if requests:
            options = self._raw.merge_options([*([] if options is None else [options]), *requests])
        if options is not None and self._hooks and self.run_metadata is None:
            self.run_metadata = self._raw.new_run_metadata()
        self._options = options
        return options

    def finish(self, last_fetches: Any) -> tuple[Any, Any, Any, Any]:
        """What to run: (fetches, feed_dict, options, run_metadata).

        The last run's fetches if they are the same: a raw session may have compiled that object.
        """
        options = self.finish_options()
        fetches, last = self.fetches, last_fetches
        if type(last) is type(fetches) is tuple and len(last) == len(fetches):
            fetches = last if all(map(operator.is_, last, fetches)) else fetches
        return fetches, self.feed_dict, options, self.run_metadata

    def split(self, outputs: Any) -> tuple[Any, dict[int, Any]]:
        """(what the caller gets, what each hook that asked gets by its place)."""
        if not self._hook_fetches:
            return outputs, {}
        others = iter(outputs)
        caller = next(others)
        return caller, dict(zip(self._hook_fetches, others, strict=True))

    def blame(self, error: Exception) -> None:
        """Name the hooks whose fetches or feeds made the run fail, if that is the cause."""
        for place, fetches in self._hook_fetches.items():
            if self._raw.rejects(fetches, error):
                hook = self._hooks[place]
                what = getattr(hook, "_fetches_are", "")
                where = f"fetched in before_run of {type(hook).__name__}"
                add_note(error, f"{where}, as {what}" if what else where)
        for feeder, feeds in self._fed if isinstance(error, TypeError) else ():
            if any(self._raw.rejects(key, error) for key in feeds):
                add_note(error, f"fed in before_run of {feeder}")

    def unasked(self) -> SessionRunValues:
        """What a hook that fetched nothing is given after the run."""
        no_options, no_metadata = self._raw.no_options
        return SessionRunValues(
            None,
            no_options if self._options is None else self._options,
            no_metadata if self.run_metadata is None else self.run_metadata,
        )


def wrong_feeds(what: str, feeds: object) -> TypeError:
    """The error for feeds that are no mapping, such as a batch as a loader gives it."""
    return TypeError(
        f"{what} {shown(feeds)}; give a mapping from names to values, such as "
        '{"batch": batch} for a step function with the parameter batch'
    )


def _converted(request: Any, hook: str) -> SessionRunArgs:
    """What one of TensorFlow's hooks asks for."""
    train = tensorflow_train()
    if train is not None and isinstance(request, train.SessionRunArgs):
        return SessionRunArgs(*request)
    raise TypeError(
        f"{hook}.before_run returned {shown(request)}; "
        "expected SessionRunArgs(fetches, feed_dict, options) or None"
    )
