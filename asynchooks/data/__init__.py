"""Input that arrives while the step runs: small stages around any source.

    async with prefetch(batch(shuffle(records, 10_000, seed=1), 32), 2) as batches:
        async for images in batches:
            await session.run("loss", {"images": images})

A source is an async iterable; an iterable (one that is not in memory is read in a thread), such as
a `tf.data.Dataset`, a torch `DataLoader` or one of Grain's; an `asyncio.Queue`; an anyio stream; a
stage; or a function that returns one of these, for `repeat`. `prefetch` and `map_concurrent` run
tasks: a pipeline with one of them is opened with `async with`, at its last stage.
"""

from .._later import listing
from ._batch import batch
from ._batches import Batches
from ._map import map_concurrent
from ._prefetch import prefetch
from ._repeat import repeat
from ._rollout import Rollout, RolloutStatistics, WhenStale
from ._rollouts import rollouts
from ._select import interleave, shard, take
from ._shielded import shielded
from ._shuffle import shuffle
from ._sources import Source
from ._stage import Stage
from ._statistics import StageStatistics

__all__ = [
    "Batches",
    "Rollout",
    "RolloutStatistics",
    "Source",
    "Stage",
    "StageStatistics",
    "WhenStale",
    "batch",
    "interleave",
    "map_concurrent",
    "prefetch",
    "repeat",
    "rollouts",
    "shard",
    "shielded",
    "shuffle",
    "take",
]

__dir__ = listing(__name__)
