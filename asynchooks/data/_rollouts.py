"""rollouts: a function of each item, of several at a time, in batches whose age is bounded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from .. import _check as check
from .._step.global_step import GlobalStep
from .._stopping.backoff import Restart
from ._rollout import RolloutStage, WhenStale
from ._rollout_stage import Rollouts
from ._sources import Source, stage_of
from ._stage import T


def rollouts(
    fn: Callable[[T], Awaitable[Any]],
    source: Source[T],
    batch_size: int,
    *,
    concurrency: int,
    max_staleness: int,
    when_stale: WhenStale = WhenStale.WAIT,
    version: GlobalStep | None = None,
    accept: Callable[[Any], bool] | None = None,
    restart: Restart | None = None,
    max_failures: int = 0,
) -> RolloutStage:
    """Batches of what an async function makes of each item, none of them too old.

    For a learner that trains on what its own weights generate. When a call begins, the stage
    writes down the version of the weights; when its result leaves in a batch, the staleness of
    that: how many steps of the learner lie between those weights and the ones that the batch is
    to train. A batch is put together when the learner asks for one, of the oldest results that
    are ready, in the order of their items. A call is not begun if it could come too late even if
    all that is under way came in order.

    It is the last stage: behind another one its batches would be older than promised. Calls begin
    when the learner asks for the first batch. Under `FeedHook` or `session.batches` it has a
    position: items that were trained on, refused, dropped or given up as failed are finished, and
    after a restore all others begin again, in their order, under the restored weights. Batch size,
    concurrency and bound may differ then.

    Args:
        fn: async; takes an item and returns a result, as a rule a group of samples. It is
            cancelled once: what it awaits to clean up goes on, for 30 s at most. See `shielded`
            for a resource of each call.
        source: see `asynchooks.data`.
        batch_size: results in a batch, >= 1; the last batch may be smaller.
        concurrency: items held, under way and ready ones together, >= `batch_size`. About
            concurrency / batch_size is the mean staleness of a learner that is kept busy.
        max_staleness: steps, >= 0. 0 is the synchronous loop, batch for batch. Where several
            batches make one step, or the version is published every so many steps, it is at least
            their number less one: with less the learner would wait for ever.
        when_stale: what is done about results that would be older: see `WhenStale`.
        version: the step that the weights in use have reached, published by the program when they
            have arrived where `fn` uses them, not before. None: `fn` uses the weights that the
            session trains, whose global step this is; without a session, one task reads the stage,
            and each batch is trained on before it asks for the next.
        accept: says of a result whether it is of use. One that is not is counted, and the next
            item takes its place.
        restart: how often, and after which pauses, a failed call is made again, with the weights
            of then. None: not at all.
        max_failures: how many items in a row may fail for good, >= 0, each logged and counted.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        Exception: out of the iteration: what `fn` or `accept` raised for the first of the items in
            a row that failed, with a note that names the item. What a task group in `fn` raised
            leaves without its group if it is alone in it.
        TypeError: out of the iteration: `fn` returned nothing to await.

    Example:
        async def answer(prompt):
            return prompt * 2  # ask the model, judge its answer

        async with rollouts(answer, range(8), 4, concurrency=8, max_staleness=1) as groups:
            async for group in groups:
                assert [each.result for each in group] == [each.item * 2 for each in group]
    """
    check.function("fn", fn, "an async function that takes an item")
    batch_size = check.integer("batch_size", batch_size, least=1)
    concurrency = check.integer(
        "concurrency", concurrency, least=batch_size,
        expected=f"an integer >= batch_size, which is {batch_size}: a batch must fit into it",
    )  # fmt: skip
    max_staleness = check.integer("max_staleness", max_staleness, least=0)
    check.instance(
        "when_stale", when_stale, WhenStale, "WhenStale.WAIT, WhenStale.ACCEPT or WhenStale.DROP"
    )
    if version is not None:
        check.instance("version", version, GlobalStep, "a GlobalStep that the learner publishes")
    if accept is not None:
        check.function("accept", accept, "a function that takes a result and returns a bool")
    if restart is not None:
        check.instance("restart", restart, Restart, "Restart(max_attempts=...)")
    max_failures = check.integer("max_failures", max_failures, least=0)
    return Rollouts(
        stage_of(source), fn, batch_size, concurrency, max_staleness, when_stale, version, accept,
        restart, max_failures,
    )  # fmt: skip
