"""FeedHook on step functions: where items are fed, the end of the source, errors, workers."""

import contextlib
import random
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from asynchooks import (
    FeedHook,
    InputError,
    InputStructureError,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SharedSessionCreator,
)
from asynchooks.data import prefetch

from ..support.faults import FaultError
from ..support.helpers import KeepsCoord, in_task, settle
from ..support.moments import train as run_until_stopped
from .inputs import Diary, gated, until_stopped
from .training import Holds, run_session, run_to, tasks


@pytest.mark.parametrize(
    ("names", "items", "given"),
    [
        (None, [{"a": 1, "b": 2}, {"b": 3}], [(1, 2), (None, 3)]),
        ("a", [(2, 3)], [((2, 3), None)]),
        (("b", "a"), [(1, 2), [3, 4]], [(2, 1), (4, 3)]),
        ({"x": "b", "y": "a"}, [{"x": 1, "y": 2, "z": 3}], [(2, 1)]),
        (None, [{"a": 1}, 7], r"^item 1 of .* is 7; FeedHook expected a mapping from names to val"),
        (["a", "b"], [(1, 2), (1, 2, 3)], r"^item 1 .* is a tuple of 3; .* a tuple of 2, one for"),
        ({"k": "a"}, [{"k": 1}, {"c": 1}], r"^item 1 .*mapping with the keys \['c'\]; .*\['k'\]"),
    ],
)
async def test_items_are_fed_where_names_say_or_their_structure_is_named(
    names: Any, items: list[Any], given: Any
) -> None:
    seen: list[tuple[Any, Any]] = []

    def step(a: Any = None, b: Any = None) -> dict[str, Any]:
        seen.append((a, b))
        return {}

    if not isinstance(given, str):
        await run_session([FeedHook(items, names)], step)
        assert seen == given
        return
    with pytest.raises(InputStructureError, match=given):
        await run_session([FeedHook(items, names)], step)
    assert len(seen) == 1


async def test_an_empty_source_is_an_error_for_every_worker() -> None:
    source, creator = prefetch(list[int](), 2), SharedSessionCreator(Diary().creator)
    with pytest.raises(InputError, match="has no items: there is nothing to train with"):
        async with MonitoredSession([FeedHook(source, "x")], creator) as a:
            async with MonitoredSession([FeedHook(source, "x")], creator) as b:
                with pytest.raises(InputError, match="has no items"):
                    await a.run([])
                await b.run([])


async def test_a_preemption_ends_the_wait_and_the_run_is_made_again_with_nothing_lost() -> None:
    gate, diary, keeps = anyio.Event(), Diary(), KeepsCoord()
    hooks = [FeedHook(gated(range(4), {2: gate}), "x"), keeps]
    async with in_task(partial(run_session, hooks, diary.step, step_runner="inline")):
        keeps.coord.request_stop(PreemptionError("the machine goes away"))
        await settle()
        assert len(keeps.coords) == 2, "before the item came"
        gate.set()
    assert diary.items == [0, 1, 2, 3]


async def test_an_item_whose_step_outlives_its_cancelled_run_is_used() -> None:
    diary, source, scope = Diary(), prefetch(range(4), 2), anyio.CancelScope()
    token = anyio.lowlevel.current_token()

    def step(x: Any) -> dict[str, Any]:
        if x == 1:
            anyio.from_thread.run_sync(scope.cancel, token=token)
        return diary.step(x)

    async with MonitoredSession([FeedHook(source, "x")], step, step_runner="thread") as session:
        with scope:
            await until_stopped(session)
        assert diary.items == [0, 1]
        await until_stopped(session)
    assert diary.items == [0, 1, 2, 3]
    assert session.global_step.value == 4


async def test_an_item_whose_step_failed_goes_to_another_worker_before_all_hooks_have_ended() -> (
    None
):
    source, diary, may_end = prefetch(range(3), 1), Diary({1: FaultError()}), anyio.Event()
    creator, holds = SharedSessionCreator(diary.step), Holds("end", may_end)

    async def fail_and_end() -> None:
        async with MonitoredSession([FeedHook(source, "x"), holds], creator) as session:
            with pytest.raises(FaultError):
                await session.run([])

    async with MonitoredSession([FeedHook(source, "x")], creator) as other, in_task(fail_and_end):
        await holds.has_come.wait()
        await run_to(other, 3)
        may_end.set()
    assert diary.items == [0, 1, 2]


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_lost_under_random_failures_losses_and_cancellations(seed: int) -> None:
    draw, used = random.Random(seed), list[int]()
    source = prefetch(range(150), draw.randrange(1, 9))
    recovery = Recovery(first_pause_secs=0.0)
    scopes: dict[int, anyio.CancelScope] = {}

    async def step(x: int) -> dict[str, int]:
        for _ in range(draw.randrange(3)):
            await anyio.lowlevel.checkpoint()
        fate = draw.random()
        if fate < 0.1:
            raise FaultError
        if fate < 0.13:
            raise PreemptionError("lost")
        used.append(x)
        return {}

    async def train(session: MonitoredSession) -> None:
        while not session.should_stop():
            with contextlib.suppress(FaultError):
                await run_until_stopped(session)

    async def worker(place: int) -> None:
        while place == 0 or draw.random() < 0.9:  # the first one comes back till the end
            scopes[place] = anyio.CancelScope()
            with scopes[place]:
                hooks = [FeedHook(source, "x")]
                async with MonitoredSession(hooks, creator, recovery=recovery) as session:
                    await train(session)
                return
            await anyio.lowlevel.checkpoint()

    async def cancel_now_and_then() -> None:
        while len(used) < 120:
            for _ in range(draw.randrange(5, 40)):
                await anyio.lowlevel.checkpoint()
            scopes[draw.choice(sorted(scopes))].cancel()

    creator = SharedSessionCreator(step)
    # it keeps the source open, and uses what a worker had in hand that ended last
    async with MonitoredSession([FeedHook(source, "x")], creator) as session:
        async with tasks() as group:
            for place in range(8):
                group.start_soon(worker, place)
            group.start_soon(cancel_now_and_then)
        await train(session)
    assert sorted(used) == list(range(150))
