"""Properties: nothing is lost and nothing comes twice, under any cancellation or failure."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import anyio
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from asynchooks import (
    FeedHook,
    InputError,
    InputPositionHook,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.data import prefetch, repeat, shuffle

from ..hooks.training import Calls
from ..support.afterwards import nothing_left
from ..support.faults import Halt
from ..support.helpers import turns
from .recipes import Faults, Recipe, build_stage, recipes
from .sources import BadRecordError, position, read_all, read_in_lives

prop = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=40,
    deadline=None,
)


WHEN = st.one_of(st.none(), st.integers(0, 12))
FAULT = st.one_of(st.just(-1), st.just(-1), st.integers(0, 12))
# how one life goes
LIVES = st.builds(
    SimpleNamespace,
    how=st.sampled_from(["plain", "feed", "batches"]),
    num_readers=st.integers(1, 3),
    variation=st.integers(0, 3),
    leave_after=WHEN,
    cancel_after=st.one_of(st.none(), st.integers(0, 60)),  # turns of the event loop
    is_one_cancelled=st.booleans(),  # of several readers, not all
    faults=st.builds(
        Faults,
        read=FAULT,
        call=FAULT,
        step=FAULT,
        error=st.sampled_from([BadRecordError, Halt]),
    ),
    num_waits=st.integers(0, 2),  # of a reader, or of a step, with each item
    # how many items were used when the position was saved with which the next life begins
    goes_on_from=WHEN,
)


async def live(recipe: Recipe, life: Any, state: Any, is_empty: bool) -> tuple[list[Any], Any]:
    """What was used in it, and the position at its end."""
    faults = life.faults
    stage = build_stage(recipe, life.variation, faults)
    if state is not None:
        stage.load_state_dict(state)
        assert position(stage) == state
    used: list[Any] = []
    saved: list[tuple[list[Any], Any]] = []

    def save(*_: Any) -> None:
        if life.goes_on_from is not None and len(used) >= life.goes_on_from and not saved:
            saved.append((list(used), position(stage)))

    def is_to_leave() -> bool:
        return life.leave_after is not None and len(used) >= life.leave_after

    async def wait(num: int | None) -> None:
        await turns(num or 0)

    async def cancel() -> None:
        """Of one reader, or of all."""
        await wait(life.cancel_after)
        if life.cancel_after is not None:
            scope.cancel()

    async def step(x: Any) -> dict[str, Any]:
        await wait(life.num_waits)
        faults.meet("step")
        used.append(x)
        return {}

    async def read() -> None:
        while not is_to_leave():
            try:
                used.append(await anext(stage))
            except StopAsyncIteration:
                return
            save()
            faults.meet("step")
            await wait(life.num_waits)

    creator = SharedSessionCreator(step)

    async def train() -> None:
        by_loop = life.how == "batches"
        hooks: list[Any] = [InputPositionHook(stage) if by_loop else FeedHook(stage, "x")]
        if life.leave_after is not None and not by_loop:
            hooks.append(StopAtStepHook(last_step=life.leave_after + 1))
        async with MonitoredSession([*hooks, Calls(after_run=save)], creator) as session:
            while not (by_loop or session.should_stop()):
                await session.run([])
            if by_loop:
                async for item in session.batches(stage):
                    if is_to_leave():
                        break
                    await session.run([], {"x": item})

    async def work(is_scoped: bool) -> None:
        with scope if is_scoped else nullcontext():
            await (read() if life.how == "plain" else train())

    async def work_together() -> None:
        async with anyio.create_task_group() as group:
            for place in range(life.num_readers):
                group.start_soon(work, place == 0 and life.is_one_cancelled)

    async with nothing_left():
        scope = anyio.CancelScope()
        try:
            with nullcontext() if life.is_one_cancelled else scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(cancel)
                    async with stage if life.how == "plain" else nullcontext():
                        await work_together()
        except BaseExceptionGroup as error:
            may_say = ["has no items"] if is_empty else []
            if life.cancel_after is not None:
                may_say.append("was cancelled while it was")
            if error.subgroup(faults.error) is not None and life.num_readers > 1:
                # another reader met the error, which ended the generator
                may_say += "ended after", "none in pass"
            if error.split(
                lambda each: (
                    isinstance(each, faults.error) or any(text in str(each) for text in may_say)
                )
            )[1]:
                raise
    assert faults.num_open == 0, "a generator is left open"
    return saved[0] if saved else (used, position(stage))


@prop
@given(recipe=recipes, lives=st.lists(LIVES, min_size=1, max_size=4))
async def test_each_item_comes_once_however_lives_end(recipe: Recipe, lives: list[Any]) -> None:
    try:
        expected = await read_all(build_stage(recipe))
    except InputError:  # the source of an endless repeat is empty
        assume(False)
    got: list[Any] = []
    state: Any = None
    in_order = True
    for life in lives:
        used, state = await live(recipe, life, state, is_empty=not expected)
        got += used
        in_order = in_order and life.num_readers == 1
        if in_order:
            assert got == expected[: len(got)]
        else:
            assert not Counter(got) - Counter(expected)
    rest = build_stage(recipe)
    rest.load_state_dict(state)
    assert Counter(got + await read_all(rest)) == Counter(expected)


@prop
@given(
    num_items=st.integers(0, 30),
    first=st.integers(0, 40),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(),
    num_epochs=st.integers(1, 3),
)
async def test_with_another_shuffle_size_nothing_is_lost_and_nothing_comes_twice(
    num_items: int, first: int, sizes: tuple[int, int, int], seed: int, num_epochs: int
) -> None:
    lives = [
        (prefetch(repeat(shuffle(list(range(num_items)), size, seed), num_epochs), size), count)
        for size, count in zip(sizes, (first, 5, 1000), strict=True)
    ]
    got = await read_in_lives(*lives, reads_ahead=False)
    assert Counter(got) == dict.fromkeys(range(num_items), num_epochs)
