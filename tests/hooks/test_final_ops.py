"""FinalOpsHook on step functions: the outputs of the last run, without one more step."""

from __future__ import annotations

from typing import Any

import pytest

from asynchooks import FetchError, FinalOpsHook, FunctionSessionCreator, MonitoredSession
from asynchooks.testing import RecordingHook

from ..support.helpers import counting_creator, counting_step
from .training import run_session

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("final_ops", "values"),
    [
        ("calls", 3),
        (["calls", "calls"], [3, 3]),
        ({"a": "calls", "b": ("calls",)}, {"a": 3, "b": (3,)}),
        ([], []),
        (None, None),
    ],
)
async def test_the_last_runs_outputs_are_kept_nested_as_asked(final_ops: Any, values: Any) -> None:
    step, calls = counting_step()
    hook = FinalOpsHook(final_ops)
    async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
        for _ in range(3):
            await session.run([])
        assert hook.final_ops_values is None, "not before the end"
    assert hook.final_ops_values == values
    assert calls == [1, 2, 3], "the end runs no further step"


@pytest.mark.parametrize(("ops", "feeds"), [("calls", None), ("calls", {}), (None, None)])
async def test_the_caller_gets_only_what_it_asked_for(ops: Any, feeds: Any) -> None:
    hook = FinalOpsHook(ops, feeds)
    async with MonitoredSession([hook], counting_creator()) as session:
        assert await session.run(["calls"]) == [1]
        assert await session.run([]) == []
    assert hook.final_ops_values == (ops and 2)


async def test_after_a_failure_there_are_no_values() -> None:
    hook = FinalOpsHook("calls")
    with pytest.raises(ZeroDivisionError):
        async with MonitoredSession([hook], counting_creator()) as session:
            await session.run([])
            raise ZeroDivisionError
    assert hook.final_ops_values is None


async def test_a_run_that_failed_leaves_those_of_the_run_before() -> None:
    outputs = iter([{"a": 1}, {"b": 2}])
    hook = FinalOpsHook("a")
    async with MonitoredSession([hook], FunctionSessionCreator(lambda: next(outputs))) as session:
        await session.run([])
        with pytest.raises(FetchError, match="fetch 'a' is not among"):
            await session.run([])
    assert hook.final_ops_values == 1


async def test_a_hook_that_is_used_again_forgets_the_session_before() -> None:
    hook = FinalOpsHook("calls")
    await run_session([hook], runs=1)
    async with MonitoredSession([hook], counting_creator()):
        pass
    assert hook.final_ops_values is None, "this session has run nothing"


async def test_a_feed_is_refused_when_opening_as_nothing_can_be_computed() -> None:
    other = RecordingHook("other")
    hook = FinalOpsHook("calls", {"rate": 1})
    session = MonitoredSession([hook, other], counting_creator())
    with pytest.raises(ValueError, match=r"got the feed_dict \{'rate': 1\}") as caught:
        await session.__aenter__()
    assert "in after_create_session of FinalOpsHook" in caught.value.__notes__
    assert other.log == [("other", "begin"), ("other", "on_error")]
