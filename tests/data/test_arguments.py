"""Arguments that are wrong are named, with what was expected."""

from collections.abc import Callable
from typing import Any

import pytest

from asynchooks import FeedHook, data

# all of it is what a type checker refuses, too
untyped: Any = data
hook: Any = FeedHook
NAMES = "names is .*; give a name or tensor"


async def collate(items: list[int]) -> list[int]:
    return items


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: untyped.map([1], 3), "^fn is 3; give a function that takes an item"),
        (lambda: untyped.map([1], str, max_failures=-1), "^max_failures is -1; give"),
        (lambda: untyped.filter([1], None), "^predicate is None; give a function"),
        (lambda: untyped.map_concurrent(str, [1], 0), "concurrency is 0; give an integer >= 1"),
        (lambda: untyped.map_concurrent(len, [], 2, "no"), "ordered is 'no'; give True or False"),
        (lambda: untyped.batch([1], True), "^batch_size is True; give an integer >= 1"),
        (lambda: untyped.batch([1], 1, 3), "drop_remainder is 3; give True or False"),
        (lambda: untyped.batch([1], 1, collate=3), "collate is 3; give a function that takes a"),
        (lambda: untyped.batch([1], 1, collate=collate), "is async; call it through map_concurre"),
        (lambda: untyped.shard([1], 2, 2), "index is 2 of 2 shards; give 0 to 1"),
        (lambda: untyped.shard([1], 2, -1), "index is -1; give an integer >= 0"),
        (lambda: untyped.take([1], -1), "count is -1; give an integer >= 0"),
        (lambda: untyped.shuffle([1], 1, True), "seed is True; give an integer"),
        (untyped.zip, "^zip got no sources; give at least one"),
        (lambda: untyped.zip([1], strict=1), "^strict is 1; give True or False"),
        (lambda: untyped.mix(3, seed=1), r"^mix got 3; give several sources: mix\(\[a, b\]"),
        (lambda: untyped.mix([[1]], seed=1, weights=[1, 2]), "there are 1 sources; give one"),
        (lambda: untyped.mix([[1]], seed=1, weights=[0]), r"^weights\[0\] is 0; give a finite"),
        (lambda: hook([1], []), NAMES),
        (lambda: hook([1], {"x"}), NAMES),
        (lambda: hook([1], ("x", "x")), "feeds one of them twice"),
        (lambda: hook([1], {1: "x", 2: "x"}), "feeds one of them twice"),
    ],
)
def test_wrong_arguments_are_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()
