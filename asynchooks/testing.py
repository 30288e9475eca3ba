"""Tests of hooks and of programs that train: a driver of one hook, and fakes.

The fakes are a hook that records and a session that plays a script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ._hook import AnyHook, SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from ._later import listing
from ._session import MonitoredSession
from ._stopping.coordinator import Coordinator
from .backends._creator import SessionCreator
from .backends._function import pick
from .backends._raw_session import RawSession

__all__ = ["HookDriver", "RecordingHook", "ScriptedSession", "ScriptedSessionCreator"]

__dir__ = listing(__name__)


class HookDriver(MonitoredSession):
    """A session with one hook, which calls its moments; each run returns what the hook saw.

    Opening calls `begin` and `after_create_session`, `make_step` calls `before_run` and
    `after_run`, and leaving the block calls `end`. All is as in training: the raw session is real,
    on a step function or on a TensorFlow graph, and what the hook asks for is done.

    Args:
        hook: the hook, of asynchooks or TensorFlow, or a wrapper around one.
        session_creator: as for `MonitoredSession`: a step function, or what makes the raw session.

    Raises:
        TypeError: `hook` is no hook, or `session_creator` no session creator.
        ImportError: no creator was given and TensorFlow is not installed.

    Example:
        hook = EarlyStoppingHook("loss", patience=1)
        async with HookDriver(hook, lambda: {"loss": 0.5}) as driver:
            run_context = await driver.make_step()
            assert not run_context.stop_requested
            run_context = await driver.make_step()
            assert run_context.stop_requested
    """

    def __init__(
        self, hook: AnyHook, session_creator: SessionCreator | Callable[..., Any] | None = None
    ) -> None:
        self._seen = _Seen()
        super().__init__([hook, self._seen], session_creator)

    async def make_step(self, fetches: Any = (), feed_dict: Any = None) -> SessionRunContext:
        """Run one step around which the hook is called; returns the context that it was given.

        Args:
            fetches: what the caller of `run` asks for beside the hook: on a graph the train op.
            feed_dict: what the caller feeds.

        Raises:
            StopTraining: the hook has asked to stop in an earlier step, or ends training now.
            BaseException: what the hook or the step raised.
        """
        await self.run(fetches, feed_dict)
        return self._seen.run_context


class _Seen(SessionRunHook):
    """Keeps the context of the last run."""

    uses_default_graph = False
    run_context: SessionRunContext

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.run_context = run_context


class RecordingHook(SessionRunHook):
    """Writes every moment into one log, as (name, moment), in the order of calls.

    Args:
        name: how this hook is called in the log.
        log: a list to share between hooks, so that their order is seen.
        fetches: what to ask for in each run, if anything; the results go to `results`.

    Example:
        log = []
        async with MonitoredSession([RecordingHook("a", log)], creator):
            pass
        assert log == [("a", "begin"), ("a", "after_create_session"), ("a", "end")]
    """

    _shown = (("name", "name"),)

    def __init__(
        self, name: str, log: list[tuple[str, str]] | None = None, fetches: Any = None
    ) -> None:
        self.name = name
        self.log: list[tuple[str, str]] = [] if log is None else log
        self.fetches = fetches
        self.results: list[Any] = []
        self.errors: list[BaseException] = []

    async def begin(self) -> None:
        self.log.append((self.name, "begin"))

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.log.append((self.name, "after_create_session"))

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self.log.append((self.name, "before_run"))
        return None if self.fetches is None else SessionRunArgs(self.fetches)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.log.append((self.name, "after_run"))
        self.results.append(run_values.results)

    async def end(self, session: Any) -> None:
        self.log.append((self.name, "end"))

    async def on_error(self, session: Any, exception: BaseException) -> None:
        self.log.append((self.name, "on_error"))
        self.errors.append(exception)


class ScriptedSession(RawSession):
    """A raw session that plays a script: each run takes the next entry.

    Args:
        script: outputs by name, or exceptions to raise; after the last one every run gives {}.

    Each run that gives outputs moves the global step by 1.

    Example:
        raw = ScriptedSession([{"loss": 0.5}, ValueError("diverged")])
        async with MonitoredSession([], ScriptedSessionCreator([raw])) as session:
            assert await session.run("loss") == 0.5
        assert raw.is_closed
    """

    def __init__(self, script: Iterable[Mapping[str, Any] | BaseException] = ()) -> None:
        super().__init__()
        self._script = iter(script)
        self.num_runs = 0
        self.is_closed = False
        self._step = 0

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        if self.is_closed:
            raise RuntimeError("Attempted to use a closed session.")
        entry = next(self._script, {})
        self.num_runs += 1
        if isinstance(entry, BaseException):
            raise entry
        self._step += 1
        return pick(entry, fetches)

    def read_step(self) -> int:
        return self._step

    def close(self) -> None:
        self.is_closed = True


class ScriptedSessionCreator(SessionCreator):
    """Gives out the sessions, or raises the exceptions, of a list, one for each creation.

    Args:
        sessions: raw sessions and exceptions, in order.

    Raises:
        AssertionError: when opening: more sessions were asked for than there are.

    Example:
        lost = ScriptedSession([PreemptionError("lost")])
        creator = ScriptedSessionCreator([lost, ScriptedSession()])
        async with MonitoredSession([], creator) as session:
            await session.run([])  # runs on the second one
    """

    def __init__(self, sessions: Iterable[RawSession | BaseException]) -> None:
        self._sessions = iter(sessions)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def create_session(self) -> RawSession:
        entry = next(self._sessions, None)
        if entry is None:
            raise AssertionError("the script has no further session to give")
        if isinstance(entry, BaseException):
            raise entry
        return entry
