"""FinalOpsHook on step functions: the outputs of the last run, without one more step."""

from typing import Any

import pytest

from asynchooks import FetchError, FinalOpsHook, MonitoredSession

from ..support.helpers import counting_step
from .training import run_session


@pytest.mark.parametrize(
    ("final_ops", "values"),
    [(["calls", "calls"], [3, 3]), ({"a": "calls", "b": ("calls",)}, {"a": 3, "b": (3,)}),
     ([], []), (None, None)],
)  # fmt: skip
async def test_the_last_runs_outputs_are_kept_nested_as_asked(final_ops: Any, values: Any) -> None:
    step, calls = counting_step()
    hook = FinalOpsHook(final_ops, {})
    async with MonitoredSession([hook], step) as session:
        for _ in range(2):
            await session.run([])
        assert await session.run(["calls"]) == [3], "the caller gets only what it asked for"
        assert hook.final_ops_values is None, "not before the end"
    assert hook.final_ops_values == values
    assert calls == [1, 2, 3], "the end runs no further step"
    await run_session([hook], runs=0)
    assert hook.final_ops_values is None, "this session has run nothing"


async def test_a_run_that_failed_leaves_those_of_the_run_before() -> None:
    outputs, hook = iter([{"a": 1}, {"b": 2}]), FinalOpsHook("a")
    async with MonitoredSession([hook], lambda: next(outputs)) as session:
        await session.run([])
        with pytest.raises(FetchError, match="fetch 'a' is not among"):
            await session.run([])
    assert hook.final_ops_values == 1


async def test_a_feed_is_refused_when_opening_as_nothing_can_be_computed() -> None:
    with pytest.raises(ValueError, match=r"got the feed_dict \{'rate': 1\}") as caught:
        await run_session([FinalOpsHook("calls", {"rate": 1})])
    assert "in after_create_session of FinalOpsHook" in caught.value.__notes__
