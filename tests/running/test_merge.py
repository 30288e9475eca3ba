"""Merging: each hook gets what it asked for, and no hook's arguments are changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import SessionRunArgs, SessionRunHook
from asynchooks._running.merge import MergedRun
from asynchooks.backends._function import pick
from asynchooks.testing import ScriptedSession

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


@given(
    caller=FETCHES,
    caller_feeds=st.none() | FEEDS,
    requests=st.lists(st.none() | st.tuples(st.none() | FETCHES, st.none() | FEEDS), max_size=5),
)
def test_each_request_gets_its_own_part_or_feeds_clash(
    caller: Any, caller_feeds: Any, requests: list[Any]
) -> None:
    before = copy.deepcopy((caller, caller_feeds, requests))
    merged = MergedRun(ScriptedSession(), SessionRunArgs(caller, caller_feeds), None)
    fed: list[str] = list(caller_feeds or ())
    for _, feeds in filter(None, requests):
        fed += feeds or ()
    clash = len(fed) != len(set(fed))
    try:
        for place, request in enumerate(requests):
            if request is not None:
                merged.add(place, SessionRunHook(), SessionRunArgs(*request))
    except RuntimeError as error:
        assert clash
        assert "Same tensor is fed" in str(error)
    else:
        assert not clash
        assert set(merged.feed_dict or {}) == set(fed)
        mine, results = merged.split(pick(OUTPUTS, merged.fetches))
        assert mine == pick(OUTPUTS, caller)
        for place, request in enumerate(requests):
            if request is None or request[0] is None:
                assert place not in results
            else:
                assert results[place] == pick(OUTPUTS, request[0])
    assert (caller, caller_feeds, requests) == before


def test_without_hooks_everything_goes_through_untouched() -> None:
    fetches, feeds, options, metadata = object(), {"x": 1}, object(), object()
    merged = MergedRun(ScriptedSession(), SessionRunArgs(fetches, feeds, options), metadata)
    assert merged.fetches is fetches
    assert merged.feed_dict is feeds
    assert merged.finish_options() is options
    assert merged.run_metadata is metadata


class Equal(SessionRunHook):
    """All of them are equal, and none can be hashed."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = None  # type: ignore[assignment]


def test_hooks_that_compare_equal_are_kept_apart() -> None:
    merged = MergedRun(ScriptedSession(), SessionRunArgs("a"), None)
    merged.add(0, Equal(), SessionRunArgs("b"))
    merged.add(1, Equal(), SessionRunArgs("c"))
    assert merged.split(pick(OUTPUTS, merged.fetches)) == (1, {0: 2, 1: 3})


@pytest.mark.parametrize("request_", ["a", ("a", None, None), 3])
def test_a_request_of_another_type_is_a_typed_error(request_: Any) -> None:
    merged = MergedRun(ScriptedSession(), SessionRunArgs("a"), None)
    with pytest.raises(TypeError, match=r"SessionRunHook.before_run returned .* expected"):
        merged.add(0, SessionRunHook(), request_)
