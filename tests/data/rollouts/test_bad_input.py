"""What rollouts refuses, and what it says."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from inspect import CORO_CLOSED, CORO_SUSPENDED, getcoroutinestate
from itertools import chain
from typing import Any

import pytest

from asynchooks import GlobalStep, InputStateError, Restart
from asynchooks.data import (
    Stage,
    WhenStale,
    batch,
    interleave,
    map_concurrent,
    prefetch,
    repeat,
    rollouts,
    shard,
    shuffle,
    take,
)

from .learning import Learner, known, log_of, on_engines, saved


async def same(item: Any) -> Any:
    return item


def made(**changes: Any) -> Stage[Any]:
    arguments: dict[str, Any] = {
        "fn": same, "source": range(9), "batch_size": 2, "concurrency": 4, "max_staleness": 1,
        **changes,
    }  # fmt: skip
    return rollouts(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"fn": None}, TypeError, "fn is None; give an async function that takes an item"),
        ({"fn": 7}, TypeError, "fn is 7"),
        ({"source": 7}, TypeError, "7"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size is 2.0"),
        ({"batch_size": True}, TypeError, "batch_size is True"),
        ({"batch_size": "2"}, TypeError, "batch_size is '2'"),
        ({"concurrency": 1}, ValueError, "concurrency is 1.*batch_size, which is 2"),
        ({"concurrency": 0}, ValueError, "concurrency is 0"),
        ({"concurrency": None}, TypeError, "concurrency is None"),
        ({"concurrency": 4.5}, TypeError, "concurrency is 4.5"),
        ({"max_staleness": -1}, ValueError, "max_staleness is -1"),
        ({"max_staleness": 0.5}, TypeError, "max_staleness is 0.5"),
        ({"max_staleness": None}, TypeError, "max_staleness is None"),
        ({"when_stale": "wait"}, TypeError, "when_stale is 'wait'.*WhenStale.WAIT"),
        ({"when_stale": None}, TypeError, "when_stale is None.*WhenStale.DROP"),
        ({"version": 3}, TypeError, "version is 3.*GlobalStep"),
        ({"accept": True}, TypeError, "accept is True"),
        ({"restart": 3}, TypeError, "restart is 3.*Restart"),
        ({"restart": Restart}, TypeError, "restart is .*Restart"),
        ({"max_failures": -1}, ValueError, "max_failures is -1"),
        ({"max_failures": None}, TypeError, "max_failures is None"),
    ],
)
def test_an_argument_of_another_type_or_range_is_refused(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        made(**changes)


async def several(item: Any, *more: Any) -> AsyncIterator[Any]:
    yield item


class Several:
    async def __call__(self, item: Any) -> AsyncIterator[Any]:
        yield item


@pytest.mark.parametrize("fn", [several, partial(several, 1), Several(), Several().__call__])
def test_an_async_generator_function_is_refused(fn: Any) -> None:
    expected = r"fn is .*[Ss]everal.*, an async generator; give an async function that returns one"
    with pytest.raises(TypeError, match=expected):
        made(fn=fn)


@pytest.mark.filterwarnings("error")  # also: never awaited
def test_a_coroutine_in_place_of_the_function_is_refused_and_closed() -> None:
    coroutine = same(1)
    expected = (
        r"fn is the coroutine same\(\.\.\.\), which has been called already; give the function: "
        r"same in place of same\(\.\.\.\)$"
    )
    with pytest.raises(TypeError, match=expected):
        made(fn=coroutine)
    assert getcoroutinestate(coroutine) == CORO_CLOSED


def test_a_coroutine_that_has_begun_is_refused_and_left_as_it_is() -> None:
    async def begun() -> None:
        await Once()

    class Once:
        def __await__(self) -> Generator[None, None, None]:
            yield

    coroutine = begun()
    coroutine.send(None)
    with pytest.raises(TypeError, match="fn is the coroutine"):
        made(fn=coroutine)
    assert getcoroutinestate(coroutine) == CORO_SUSPENDED
    coroutine.close()


def test_all_that_is_allowed_is_accepted() -> None:
    made(batch_size=4, max_staleness=0, version=GlobalStep(), accept=bool, restart=Restart(0))
    made(when_stale=WhenStale.DROP, max_failures=3, source=iter(range(3)))


@pytest.mark.parametrize(
    "around",
    [
        lambda stage: take(stage, 2),
        lambda stage: prefetch(stage, 1),
        lambda stage: batch(stage, 2),
        lambda stage: repeat(stage, 2),
        lambda stage: shuffle(stage, 4, seed=1),
        lambda stage: shard(stage, 2, 0),
        lambda stage: map_concurrent(same, stage, 2),
        lambda stage: interleave([stage, range(3)]),
        lambda stage: made(source=stage),
        lambda stage: repeat(made, 2),
    ],
    ids=[
        "take",
        "prefetch",
        "batch",
        "repeat",
        "shuffle",
        "shard",
        "map",
        "interleave",
        "itself",
        "made",
    ],
)
def test_another_stage_behind_it_is_refused(around: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"older than promised\. Put rollouts\(\.\.\.\) last"):
        around(made())


@on_engines
@pytest.mark.parametrize("gives", [7, None, [1]])
def test_a_function_that_returns_nothing_to_await_is_refused_at_its_first_call(
    backend: Any, gives: Any
) -> None:
    learner, num_calls = Learner(backend), 0

    def answer(item: int) -> Any:
        nonlocal num_calls
        num_calls += 1
        return gives

    async def main() -> None:
        stage = made(fn=answer, max_failures=5, restart=Restart(3))
        with pytest.raises(TypeError, match="which cannot be awaited; give an async function") as e:
            await learner.train(stage)
        assert "in rollouts, at item 0: 0" in e.value.__notes__

    learner.run(main)
    assert num_calls == 1
    assert learner.now == 0.0


@on_engines
def test_an_async_accept_is_refused_at_its_first_call(backend: Any) -> None:
    learner = Learner(backend)

    async def accept(result: int) -> bool:
        return True

    async def main() -> None:
        with pytest.raises(TypeError, match="accept is async; give a function that returns a bool"):
            await learner.train(made(accept=accept, max_failures=5, restart=Restart(3)))

    learner.run(main)
    assert learner.batches == []


@on_engines
def test_a_function_may_return_any_awaitable(backend: Any) -> None:
    learner = Learner(backend)

    class Later:
        def __init__(self, item: int) -> None:
            self.item = item

        def __await__(self) -> Any:
            return self._wait().__await__()

        async def _wait(self) -> int:
            await learner.sleep(1.0)
            return self.item

    learner.run(lambda: learner.train(made(fn=Later)))
    assert learner.items == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


@on_engines
def test_it_is_opened_with_async_with(backend: Any) -> None:
    learner = Learner(backend)

    async def main() -> None:
        with pytest.raises(RuntimeError, match="runs tasks and must be opened"):
            await anext(made())
        with pytest.raises(TypeError, match="async with"):
            with made():
                pass
        stage = made()
        async with stage:
            await anext(stage)
        with pytest.raises(RuntimeError, match="is closed; make a new one"):
            await anext(stage)

    learner.run(main)


# Positions


@on_engines
def test_a_state_of_other_stages_is_refused(backend: Any) -> None:
    learner = Learner(backend)

    async def main() -> None:
        states: list[Any] = []
        for stage in (prefetch(range(9), 1), batch(range(9), 2), made(source=take(range(9), 8))):
            async with stage:
                await anext(stage)
                states.append(saved(stage))
        states += [{}, {"stage": "rollouts"}, None, {"stage": "rollouts", "source": {}}]
        for state in states:
            with pytest.raises(InputStateError):
                made().load_state_dict(state)

    learner.run(main)


@pytest.mark.parametrize(
    "change",
    [{"place": -1}, {"place": "0"}, {"beyond": [-3]}, {"beyond": None}, {"counts": {"failed": -1}}],
)
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    state = {**saved(made()), **change}
    with pytest.raises(InputStateError, match="Give what state_dict"):
        made().load_state_dict(state)


@on_engines
def test_a_state_is_loaded_before_it_begins(backend: Any) -> None:
    learner = Learner(backend)

    async def main() -> None:
        stage = made()
        state = saved(stage)
        async with stage:
            await anext(stage)
            with pytest.raises(RuntimeError, match="has begun; load its state before"):
                stage.load_state_dict(state)

    learner.run(main)


@on_engines
@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 1, "concurrency": 1},
        {"batch_size": 5, "concurrency": 9},
        {"max_staleness": 0},
        {"max_staleness": 7},
        {"when_stale": WhenStale.ACCEPT},
        {"concurrency": 2},
        {"max_failures": 3, "restart": Restart(1)},
    ],
)
def test_it_is_resumed_with_other_sizes_bounds_and_policies(
    backend: Any, change: dict[str, Any]
) -> None:
    learner = Learner(backend)
    before = made(source=range(40))
    position = learner.run(lambda: learner.train(before, last_step=3))
    again = Learner(backend, begin=3)
    stage = made(source=range(40), **change)
    stage.load_state_dict(position)
    again.run(lambda: again.train(stage))
    size = change.get("batch_size", 2)
    assert {len(items) for items in again.items[:-1]} == {size}
    assert [*chain(*learner.items, *again.items)] == [*range(40)]
    if "max_staleness" in change:
        assert max(max(ages) for ages in again.ages) <= change["max_staleness"]


@on_engines
def test_it_goes_on_behind_another_source_of_the_same_length(backend: Any) -> None:
    """A place is one of the source: the stages must be the same, their items may not be."""
    learner = Learner(backend)
    position = learner.run(lambda: learner.train(made(source=range(20)), last_step=2))
    again = Learner(backend, begin=2)
    stage = made(source=range(100, 120))
    stage.load_state_dict(position)
    again.run(lambda: again.train(stage, last_step=3))
    assert again.items == [[104, 105]]


# A version that is not published


@on_engines
def test_the_log_says_what_to_do_where_no_version_is_published_and_nothing_is_lost(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    learner, version = Learner(backend, train_secs=0.5), GlobalStep()
    logged: list[float] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(learner.now)  # type: ignore[method-assign]
    logging.getLogger("asynchooks").addHandler(handler)

    async def publish_at_last() -> None:
        await learner.sleep(60.0)
        version.publish(2)
        await learner.sleep(60.0)
        version.publish(100)

    async def main() -> None:
        learner.simulation.start(publish_at_last)
        await learner.train(made(source=range(12), version=version))

    try:
        learner.run(main)
    finally:
        logging.getLogger("asynchooks").removeHandler(handler)
    assert [*chain(*learner.items)] == [*range(12)]
    texts = [text for text in log_of(caplog) if "Publish the step" in text]
    assert len(texts) == len(logged) == 2  # once for each version
    # two batches of version 0 are trained with within 1 s, and two of version 2
    assert logged == [1.0 + 5.0, 61.0 + 5.0]
    assert "that was published is 0, the learner is 2 steps ahead" in texts[0]
    assert "and max_staleness is 1. Publish the step" in texts[0]
    assert "version.publish(step), at least once in max_staleness + 1 steps" in texts[0]


@on_engines
def test_a_version_that_is_published_late_is_no_reason_to_log(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    learner, version = Learner(backend), GlobalStep()

    async def follow() -> None:
        for step in range(1, 10):
            await learner.step.wait_for(step)
            await learner.sleep(4.0)
            version.publish(step)

    async def slow(item: int) -> int:
        await learner.sleep(20.0)
        return item

    async def main() -> None:
        learner.simulation.start(follow)
        stage = made(source=range(12), fn=slow, version=version)
        await learner.train(stage)
        assert max(known(stage).staleness) <= 1

    learner.run(main)
    assert log_of(caplog) == []
