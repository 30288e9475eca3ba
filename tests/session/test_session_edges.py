"""Sessions under pressure: several tasks at once, stops and errors at awkward moments."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asynchooks import (
    Coordinator,
    FetchError,
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    MonitoredSession,
    PreemptionError,
    RawSession,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StepContext,
    StepUnreachableError,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.data import map_concurrent
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.helpers import StartsTask, counting_creator, raises_at, settle

pytestmark = pytest.mark.anyio

LOST = PreemptionError("the machine went away")


async def test_end_runs_once_when_another_task_closes_at_the_end_of_the_block() -> None:
    may_end, ended = anyio.Event(), []

    class EndsSlowly(SessionRunHook):
        async def end(self, session: Any) -> None:
            await may_end.wait()
            ended.append(True)

    session = MonitoredSession([EndsSlowly()], counting_creator())
    async with anyio.create_task_group() as group:
        async with session:
            group.start_soon(session.close)
            await settle()
            group.start_soon(self_release, may_end)
        assert ended == [True]  # leaving the block waits for the close that is under way


async def self_release(event: anyio.Event) -> None:
    await settle()
    event.set()


class RecreatesLate(ScriptedSessionCreator):
    """Makes its second raw session only when it may."""

    def __init__(self, raws: list[ScriptedSession]) -> None:
        super().__init__(raws)
        self.raws = raws
        self.may_create = anyio.Event()

    async def create_session(self) -> Any:  # type: ignore[override]
        raw = super().create_session()
        if raw is self.raws[1]:
            with anyio.CancelScope(shield=True):
                await self.may_create.wait()
        return raw


async def test_a_run_while_the_session_opens_is_refused() -> None:
    may_begin = anyio.Event()

    class Slow(SessionRunHook):
        async def begin(self) -> None:
            await may_begin.wait()

    raw = ScriptedSession()
    session = MonitoredSession([Slow()], ScriptedSessionCreator([raw]))
    async with anyio.create_task_group() as group:
        group.start_soon(session.__aenter__)
        await settle()
        with pytest.raises(RuntimeError, match="before the session was opened"):
            await session.run([])
        may_begin.set()
    await session.close()


async def test_leaving_waits_for_another_task_s_run() -> None:
    may_run = anyio.Event()

    async def step() -> dict[str, int]:
        await may_run.wait()
        return {"x": 1}

    results = []
    async with anyio.create_task_group() as group:
        async with MonitoredSession([], FunctionSessionCreator(step)) as session:

            async def run() -> None:
                results.append(await session.run("x"))

            group.start_soon(run)
            await settle()
            group.start_soon(self_release, may_run)
        assert results == [1]


async def test_a_run_that_outlives_its_session_brings_no_raw_session_back() -> None:
    raws = [ScriptedSession([LOST]), ScriptedSession()]
    creator, errors = RecreatesLate(raws), []
    async with anyio.create_task_group() as group:
        async with MonitoredSession([], creator, 0.05) as session:

            async def run() -> None:
                with pytest.raises(RuntimeError, match="closed while a run recreated it") as caught:
                    await session.run([])
                errors.append(caught.value)

            group.start_soon(run)
            await settle()
        creator.may_create.set()
    assert len(errors) == 1
    assert [raw.is_closed for raw in raws] == [True, True]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("kind", [ValueError, PreemptionError])
async def test_an_exception_given_to_request_stop_leaves_at_the_end(
    kind: type[Exception], is_open: bool
) -> None:
    session = MonitoredSession([], counting_creator())
    error = kind("enough")
    if not is_open:
        session.request_stop(error)
    with pytest.raises(kind, match="enough") as caught:
        async with session:
            if is_open:
                session.request_stop(error)
            assert session.should_stop()
    assert caught.value is error


async def test_a_side_task_that_cannot_be_cancelled_is_left_behind_in_time() -> None:
    release = threading.Event()

    starts = StartsTask(lambda coord: anyio.to_thread.run_sync(release.wait, 30))
    with anyio.fail_after(10):
        async with MonitoredSession([starts], counting_creator(), 0.01):
            await settle_briefly()
    release.set()


async def settle_briefly() -> None:
    for _ in range(5):
        await anyio.lowlevel.checkpoint()


async def test_a_side_task_started_by_another_at_the_end_does_not_outlive_the_session() -> None:
    log = []

    async def first(coord: Coordinator) -> None:
        await coord.wait_stopped()
        coord.start_soon(second, coord)

    async def second(coord: Coordinator) -> None:
        await coord.wait_stopped()
        log.append("second ended")

    async with MonitoredSession([StartsTask(first)], counting_creator()):
        await settle()
    assert log == ["second ended"]


@pytest.mark.parametrize("place", ["a side task that is waited for", "after_create_session"])
async def test_a_run_cancelled_while_it_recovers_leaves_the_session_usable(place: str) -> None:
    may_go_on = anyio.Event()

    class Holds(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            if place == "a side task that is waited for":
                coord.start_soon(may_go_on.wait)
            elif session is not raws[0]:
                await may_go_on.wait()

    raws = [ScriptedSession([LOST]), ScriptedSession(), ScriptedSession()]
    creator = ScriptedSessionCreator(raws)
    async with MonitoredSession([Holds()], creator, step_runner="inline") as session:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(session.run, [])
                await settle()
                assert not session.should_stop()
                scope.cancel()
        assert not session.should_stop()
        may_go_on.set()
        assert await session.run([]) == []
        assert session.raw_session() in raws[1:]


async def test_a_session_whose_hooks_were_not_all_called_is_never_handed_out() -> None:
    class FailsOnce(SessionRunHook):
        def __init__(self) -> None:
            self.num_sessions = 0

        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            self.num_sessions += 1
            if self.num_sessions == 2:
                raise ValueError("in after_create_session")

    hook, last = FailsOnce(), RecordingHook("last")
    raws = [ScriptedSession([LOST]), ScriptedSession(), ScriptedSession()]
    async with MonitoredSession([hook, last], ScriptedSessionCreator(raws)) as session:
        with pytest.raises(ValueError, match="in after_create_session"):
            await session.run([])
        assert session.should_stop()
        assert await session.run([]) == []
        assert not session.should_stop()
        assert session.raw_session() is raws[2]
    assert last.log.count(("last", "after_create_session")) == 2
    assert all(raw.is_closed for raw in raws)


class Coroutines(RawSession):
    """Its runs are coroutines that a plain function makes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        return self.make()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("grace_secs", [0.01, 30])
@pytest.mark.parametrize("is_function", [True, False])
async def test_a_coroutine_that_a_thread_made_too_late_is_closed_and_gives_its_ticket_back(
    is_function: bool, grace_secs: float
) -> None:
    begun, release = threading.Event(), threading.Event()
    made: list[Any] = []

    async def late() -> dict[str, int]:
        return {"x": 1}

    def step() -> Any:
        begun.set()
        release.wait(30)
        made.append(late())
        return made[0]

    creator: Any = FunctionSessionCreator(step)
    if not is_function:
        creator = ScriptedSessionCreator([Coroutines(step)])
    session = MonitoredSession([], creator, grace_secs, step_runner="thread")
    async with session:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(session.run, "x")
                await anyio.to_thread.run_sync(begun.wait)
                scope.cancel()
                if grace_secs > 1:
                    release.set()
        release.set()
        while session.global_step.statistics().tickets:
            await anyio.lowlevel.checkpoint()
        async with session.global_step.exclusive():
            pass
        while inspect.getcoroutinestate(made[0]) != inspect.CORO_CLOSED:
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("place", ["a hook", "a step_fn", "a listener", "a map"])
async def test_a_coroutine_that_a_plain_function_made_in_a_thread_too_late_is_closed(
    place: str,
) -> None:
    begun, release = threading.Event(), threading.Event()
    made: list[Any] = []

    async def late() -> int:
        return 1

    def make(*_: Any) -> Any:
        begun.set()
        release.wait(30)
        made.append(late())
        return made[-1]

    class Plain(SessionRunHook):
        def before_run(self, run_context: SessionRunContext) -> Any:
            return make()

    def step_fn(step_context: StepContext) -> Any:
        return make()

    async def act() -> None:
        hooks = [Plain()] if place == "a hook" else []
        session = MonitoredSession(hooks, counting_creator(), 30, step_runner="thread")
        async with session:
            if place == "a hook":
                await session.run([])
            elif place == "a step_fn":
                await session.run_step_fn(step_fn)
            elif place == "a listener":
                await session.raw_session().call(make)
            else:
                async for _ in session.batches(map_concurrent(make, range(3), 1)):
                    pass

    async with anyio.create_task_group() as group:
        group.start_soon(act)
        await anyio.to_thread.run_sync(begun.wait)
        group.cancel_scope.cancel()
        release.set()
    assert len(made) == 1
    assert inspect.getcoroutinestate(made[0]) == inspect.CORO_CLOSED


async def test_near_the_limit_a_step_that_never_ends_stops_the_others_short() -> None:
    begun, release = threading.Event(), threading.Event()

    def step(hangs: bool = False) -> dict[str, int]:
        if hangs:
            begun.set()
            release.wait(30)
        return {}

    creator = SharedSessionCreator(FunctionSessionCreator(step, thread_safe=True))
    hooks = [StopAtStepHook(last_step=10)]
    other = MonitoredSession([], creator, 0.01, step_runner="thread")
    async with MonitoredSession(hooks, creator, 0.01) as session, other:
        await session.run([])
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(other.run, [], {"hangs": True})
                await anyio.to_thread.run_sync(begun.wait)
                scope.cancel()
        with pytest.raises(StopTraining):
            while True:
                await session.run([])
        assert session.global_step.value == 9
        release.set()


async def test_a_woken_waiter_counts_as_moving_before_it_runs() -> None:
    creator = SharedSessionCreator(counting_creator(), num_workers=3)
    ended = []

    async def worker(name: str, wait_until: int, steps: int) -> None:
        hooks = [GlobalStepWaiterHook(wait_until), StopAtStepHook(num_steps=steps + wait_until)]
        async with MonitoredSession(hooks, creator, step_runner="inline") as session:
            for _ in range(steps):
                await session.run([])
        ended.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(worker, "a", 5, 10)
        group.start_soon(worker, "c", 10, 5)
        await settle()
        group.start_soon(worker, "b", 0, 5)
    assert sorted(ended) == ["a", "b", "c"]


async def test_two_waiters_left_alone_are_both_woken() -> None:
    creator = SharedSessionCreator(counting_creator())
    refused = []

    async def waits(step: int) -> None:
        with pytest.raises(StepUnreachableError):
            async with MonitoredSession([GlobalStepWaiterHook(step)], creator) as session:
                await session.run([])
        refused.append(step)

    async with anyio.create_task_group() as group:
        group.start_soon(waits, 50)
        group.start_soon(waits, 60)
        await settle()
        async with MonitoredSession([StopAtStepHook(last_step=5)], creator) as session:
            while not session.should_stop():
                await session.run([])
    assert sorted(refused) == [50, 60]


async def test_a_shared_creator_with_a_number_serves_a_second_round() -> None:
    creator = SharedSessionCreator(counting_creator(), num_workers=2)

    async def worker(wait_until: int, last_step: int) -> None:
        hooks = [GlobalStepWaiterHook(wait_until), StopAtStepHook(last_step=last_step)]
        async with MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run([])

    for first in (0, 10):
        async with anyio.create_task_group() as group:
            group.start_soon(worker, first + 5, first + 10)
            await settle()
            group.start_soon(worker, first, first + 10)
    assert creator.handle().global_step.value == 20


async def test_a_function_that_went_back_with_a_recovery_takes_the_step_back() -> None:
    value = 0

    def step() -> dict[str, int]:
        nonlocal value
        value += 1
        if value == 8:
            value = 4  # its last checkpoint
            raise LOST
        return {"global_step": value}

    seen = []
    async with MonitoredSession([], FunctionSessionCreator(step)) as session:
        for _ in range(9):
            await session.run([])
            seen.append(session.global_step.value)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 5, 6]


@dataclasses.dataclass
class UnhashableStep:
    """Compares by value, so that it cannot be hashed."""

    calls: int = 0

    def __call__(self, step_context: StepContext) -> int:
        self.calls += 1
        return self.calls


async def test_a_step_fn_need_not_be_hashable() -> None:
    async with MonitoredSession([], counting_creator()) as session:
        step_fn = UnhashableStep()
        assert [await session.run_step_fn(step_fn) for _ in range(4)] == [1, 2, 3, 4]


async def test_a_stop_does_not_excuse_a_stop_training_out_of_end() -> None:
    session = MonitoredSession([raises_at("end", StopTraining)], counting_creator())
    with pytest.raises(RuntimeError, match="end of Raises raised"):
        async with session:
            session.request_stop()


async def test_a_step_in_a_thread_may_run_an_event_loop_with_a_session_of_its_own() -> None:
    def step() -> dict[str, int]:
        async def inner() -> int:
            creator = FunctionSessionCreator(lambda: {"y": 2})
            async with MonitoredSession([], creator, step_runner="thread") as session:
                y: int = await session.run("y")
            return y

        return {"x": anyio.run(inner)}

    async with MonitoredSession([], FunctionSessionCreator(step), step_runner="thread") as session:
        assert await session.run("x") == 2


@pytest.mark.faults
def test_a_star_import_needs_no_tensorflow() -> None:
    code = "from asynchooks import *; import sys; print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


async def test_leaving_from_another_task_ends_the_training_loop_at_its_next_look() -> None:
    async def step() -> dict[str, int]:
        await anyio.lowlevel.checkpoint()
        return {}

    session = MonitoredSession([], FunctionSessionCreator(step))
    await session.__aenter__()
    ended = []

    async def train() -> None:
        while not session.should_stop():
            await session.run([])
        ended.append(session.global_step.value)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(train)
            await settle_briefly()
            await session.__aexit__(None, None, None)
    assert len(ended) == 1
    with pytest.raises(RuntimeError, match="before the session was opened"):
        await MonitoredSession([], counting_creator()).__aexit__(None, None, None)


async def test_leaving_does_not_hold_the_event_loop_for_a_step_in_a_thread() -> None:
    begun, release = threading.Event(), threading.Event()

    def step() -> dict[str, int]:
        begun.set()
        release.wait(30)
        return {}

    session = MonitoredSession([], FunctionSessionCreator(step), 0.01, step_runner="thread")
    await session.__aenter__()
    async with anyio.create_task_group() as group:
        group.start_soon(session.run, [])
        await anyio.to_thread.run_sync(begun.wait)
        await session.__aexit__(None, None, None)
        assert not release.is_set()
        release.set()


async def test_a_shared_session_is_given_back_once_though_a_run_outlives_its_worker() -> None:
    raws = [ScriptedSession([LOST]), ScriptedSession()]
    late = RecreatesLate(raws)
    creator = SharedSessionCreator(late)
    leaving = MonitoredSession([], creator, 0.01, step_runner="inline")
    async with MonitoredSession([], creator, step_runner="inline") as staying:
        async with anyio.create_task_group() as group:
            await leaving.__aenter__()

            async def run() -> None:
                with pytest.raises(RuntimeError, match="closed while a run recreated it"):
                    await leaving.run([])

            group.start_soon(run)
            await settle()
            await leaving.__aexit__(None, None, None)
            late.may_create.set()
        assert not raws[1].is_closed
        assert await staying.run([]) == []
        assert staying.raw_session() is raws[1]
    assert raws[1].is_closed


async def test_end_gets_the_successor_of_a_shared_session_that_another_replaced() -> None:
    seen = []

    class Looks(SessionRunHook):
        async def end(self, session: Any) -> None:
            seen.append((session, session.is_closed))

    raws = [ScriptedSession([{}, LOST]), ScriptedSession()]
    creator = SharedSessionCreator(ScriptedSessionCreator(raws))
    async with MonitoredSession([], creator) as other:
        async with MonitoredSession([Looks()], creator) as session:
            await session.run([])
            await other.run([])
    assert seen == [(raws[1], False)]


async def test_a_side_task_s_foreign_wait_ends_at_once_through_or_stop() -> None:
    waits = StartsTask(lambda coord: coord.or_stop(anyio.sleep_forever))
    with anyio.fail_after(20):
        async with MonitoredSession([waits], counting_creator()):
            await settle()


async def test_coordinators_of_workers_that_left_are_not_kept() -> None:
    coords: list[weakref.ref[Any]] = []

    class Sees(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Any) -> None:
            coords.append(weakref.ref(coord))

    creator = SharedSessionCreator(counting_creator())
    async with MonitoredSession([], creator):
        for _ in range(3):
            async with MonitoredSession([Sees()], creator):
                pass
        gc.collect()
        assert [each() for each in coords] == [None, None, None]


async def test_after_the_last_step_every_worker_s_next_run_ends_its_block_cleanly() -> None:
    creator = SharedSessionCreator(counting_creator())
    ended = []

    async def worker(name: int) -> None:
        async with MonitoredSession([StopAtStepHook(last_step=10)], creator) as session:
            while True:
                await session.run([])
        ended.append(name)

    async with anyio.create_task_group() as group:
        for name in range(3):
            group.start_soon(worker, name)
    assert sorted(ended) == [0, 1, 2]


async def test_a_run_within_a_step_fn_goes_on_while_another_task_closes_the_session() -> None:
    closing = anyio.Event()

    async def step_fn(step_context: StepContext) -> Any:
        closing.set()
        await settle()
        assert session.should_stop()
        return await step_context.run_with_hooks("calls")

    async def close() -> None:
        await closing.wait()
        await session.__aexit__(None, None, None)

    session = MonitoredSession([], counting_creator())
    await session.__aenter__()
    async with anyio.create_task_group() as group:
        group.start_soon(close)
        assert await session.run_step_fn(step_fn) == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_a_step_context_that_outlives_its_step_fn_leaves_the_session_usable(
    fails: bool,
) -> None:
    kept: list[StepContext] = []
    names = ["calls"]

    def step_fn(step_context: StepContext) -> None:
        kept.append(step_context)

    async with MonitoredSession([], counting_creator()) as session:
        await session.run_step_fn(step_fn)
        if fails:
            with pytest.raises(FetchError):
                await kept[0].run_with_hooks("nothing")
        assert await kept[0].run_with_hooks(names) == [1 + fails]
        assert await session.run(names) == [2 + fails]
    with pytest.raises(RuntimeError, match="after the session was closed"):
        await kept[0].run_with_hooks("calls")


async def test_runs_within_a_step_fn_leave_the_session_taken_until_it_ends() -> None:
    async def step_fn(step_context: StepContext) -> Any:
        first = await step_context.run_with_hooks("calls")
        with pytest.raises(RuntimeError, match="another run of this session"):
            await session.run("calls")
        with pytest.raises(RuntimeError, match="another run of this session"):
            await session.run_step_fn(step_fn)
        return first, await step_context.run_with_hooks("calls")

    async with MonitoredSession([], counting_creator()) as session:
        assert await session.run_step_fn(step_fn) == (1, 2)
        assert await session.run("calls") == 3


def test_the_signature_of_run_shows_what_a_caller_gives() -> None:
    parameters = list(inspect.signature(MonitoredSession.run).parameters)
    assert parameters == ["self", "fetches", "feed_dict", "options", "run_metadata"]
    if sys.version_info >= (3, 12):  # before, only `async def` itself is one
        assert inspect.iscoroutinefunction(MonitoredSession.run)
