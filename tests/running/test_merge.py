"""Merging: each hook gets what it asked for, and no hook's arguments are changed."""

from __future__ import annotations

import copy
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import MonitoredSession, SessionRunArgs, SessionRunHook
from asynchooks.backends._function import pick
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

pytestmark = pytest.mark.anyio

NAMES = st.sampled_from(["a", "b", "c"])
FETCHES = st.recursive(
    NAMES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES, inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)
FEEDS = st.dictionaries(st.sampled_from("uvwxyz"), st.integers(), max_size=3)
OUTPUTS = {"a": 1, "b": 2, "c": 3}


class Asks(SessionRunHook):
    """Asks each run for the same, and keeps what it gets."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.results: list[Any] = []

    async def before_run(self, run_context: Any) -> Any:
        return self.request

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.results.append(run_values.results)


class Raw(ScriptedSession):
    """Keeps what it was asked for last."""

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        self.fetches, self.feed_dict = fetches, feed_dict
        return super().run(fetches, feed_dict)


async def run_once(hooks: list[Any], fetches: Any, feeds: Any = None) -> tuple[Any, Raw]:
    raw = Raw([OUTPUTS])
    async with MonitoredSession(hooks, ScriptedSessionCreator([raw])) as session:
        return await session.run(fetches, feeds), raw
    raise AssertionError("the block ended early")


@given(
    caller=FETCHES,
    caller_feeds=st.none() | FEEDS,
    requests=st.lists(st.none() | st.tuples(st.none() | FETCHES, st.none() | FEEDS), max_size=5),
)
def test_each_request_gets_its_own_part_or_feeds_clash(
    caller: Any, caller_feeds: Any, requests: list[Any]
) -> None:
    before = copy.deepcopy((caller, caller_feeds, requests))
    hooks = [Asks(None if each is None else SessionRunArgs(*each)) for each in requests]
    fed: list[str] = list(caller_feeds or ())
    for _, feeds in filter(None, requests):
        fed += feeds or ()
    clash = len(fed) != len(set(fed))
    try:
        mine, raw = anyio.run(run_once, hooks, caller, caller_feeds)
    except RuntimeError as error:
        assert clash
        assert "Same tensor is fed" in str(error)
    else:
        assert not clash
        assert set(raw.feed_dict or {}) == set(fed)
        assert mine == pick(OUTPUTS, caller)
        for hook, request in zip(hooks, requests, strict=True):
            asked = request is not None and request[0] is not None
            assert hook.results == [pick(OUTPUTS, request[0]) if asked else None]
    assert (caller, caller_feeds, requests) == before
