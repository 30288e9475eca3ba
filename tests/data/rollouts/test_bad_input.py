"""What rollouts refuses, and what it says."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from asynchooks import InputStateError, Restart
from asynchooks.data import batch, interleave, prefetch, repeat, take

from .learning import Learner, made, saved


async def accept(result: int) -> bool:
    return True


async def several(item: Any, *more: Any) -> AsyncIterator[Any]:
    yield item


class Several:
    async def __call__(self, item: Any) -> AsyncIterator[Any]:
        yield item


GENERATOR = r"fn is .*[Ss]everal.*, an async generator; give an async function that returns one"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"fn": 7}, "fn is 7; give an async function that takes an item"),
        *[({"fn": each}, GENERATOR) for each in (several, partial(several, 1), Several())],
        ({"source": 7}, "7"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"concurrency": 1}, "concurrency is 1.*batch_size, which is 2"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"max_staleness": 0.5}, "max_staleness is 0.5"),
        ({"when_stale": "wait"}, "when_stale is 'wait'.*WhenStale.WAIT"),
        ({"version": 3}, "version is 3.*GlobalStep"),
        ({"accept": True}, "accept is True"),
        ({"restart": 3}, "restart is 3.*Restart"),
        ({"max_failures": None}, "max_failures is None"),
    ],
)
def test_an_argument_of_another_type_or_range_is_refused(
    changes: dict[str, Any], match: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        made(**changes)


@pytest.mark.filterwarnings("error")  # also: never awaited
def test_a_coroutine_in_place_of_the_function_is_refused_and_closed() -> None:
    expected = r"fn is the coroutine .*accept\(\.\.\.\), which has been called already; give the fu"
    with pytest.raises(TypeError, match=expected):
        made(accept(3))


@pytest.mark.parametrize(
    "around",
    [
        lambda stage: prefetch(stage, 1),
        lambda stage: repeat(stage, 2),
        lambda stage: interleave([stage, range(3)]),
        lambda stage: made(source=stage),
        lambda stage: repeat(made, 2),
    ],
)
def test_another_stage_behind_it_is_refused(around: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"older than promised\. Put rollouts\(\.\.\.\) last"):
        around(made())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fn": lambda item: [item]}, "which cannot be awaited; give an async function"),
        ({"accept": accept}, "accept is async; give a function that returns a bool"),
    ],
)
def test_what_every_item_would_meet_ends_training_at_the_first_call(
    learner: Learner, options: dict[str, Any], says: str
) -> None:
    error = learner.failure_with(made(**options, max_failures=5, restart=Restart(3)))
    assert isinstance(error, TypeError)
    assert says in str(error)
    assert "in rollouts, at item 0: 0" in error.__notes__
    assert (learner.now, learner.batches) == (0.0, [])


def test_a_function_may_return_any_awaitable(learner: Learner) -> None:
    class Later:
        def __init__(self, item: int) -> None:
            self.item = item

        def __await__(self) -> Any:
            return learner.answer(self.item).__await__()

    learner.train_with(made(Later))
    assert learner.items == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


@pytest.mark.parametrize(
    "change",
    [
        {"place": -1},
        {"place": "0"},
        {"beyond": [-3]},
        {"beyond": None},
        {"counts": {"failed": -1}},
        saved(prefetch(range(9), 1)),
        saved(batch([1], 2)),
        saved(made(source=take([1], 8))),
    ],
)
def test_a_state_that_is_damaged_or_of_other_stages_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputStateError, match="Give what state_dict|is that of"):
        made().load_state_dict({**saved(made()), **change})
