"""Whether the ps of a cluster are there, and were told of the same cluster as this process."""

from __future__ import annotations

import json
import logging
from typing import Any

from .._engine import Slot, current_engine
from .._errors import ClusterError
from .._version import version
from .._work_thread import run_blocking
from ._cluster_board import read_notice
from ._cluster_spec import differences

logger = logging.getLogger("asynchooks")

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.05, 1.0
"""Between looks at a ps that is not there yet: a port that nobody listens at tells nobody."""
_LOOK_SECS = 4.0
_PATIENCE_SECS = 5.0
"""After so long a ps is waited for in a warning: it may have been forgotten."""


async def check_ps(
    me: str, ps: str, addresses: dict[str, str], max_wait_secs: float, until: float
) -> None:
    """Wait until a ps is there, and see that it was told of the same cluster. Cancellation safe.

    Args:
        me: the name of this task.
        ps: the name of the other.
        addresses: name -> "host:port" of the cluster's tasks.
        max_wait_secs: seconds that are waited for all ps together, for people.
        until: when they are over, on the engine's clock; one look is had in any case.

    Raises:
        ClusterError: it is not there in time, is another task, is of another cluster, or runs
            another version of asynchooks.
    """
    engine = current_engine()
    target = f"grpc://{addresses[ps]}"
    pause = _FIRST_PAUSE_SECS
    begun = engine.now()
    tell_at = begun + _PATIENCE_SECS
    while True:
        cause: ClusterError | None = None
        latest = max(until, engine.now() + _LOOK_SECS)
        try:
            notice = await run_blocking(
                engine, lambda: read_notice(target), 0, "asynchooks-check", until=latest
            )
        except ClusterError as error:
            notice, cause = None, error
        if notice is not None:
            _compare(me, ps, addresses, json.loads(notice))
            return
        problem = cause or f"the server at {target} does not answer"
        if engine.now() >= until:
            raise ClusterError(
                f"{me} waited for {ps} for max_wait_secs={max_wait_secs:g} s: {problem}; is it "
                "running?"
            ) from cause
        is_late = engine.now() >= tell_at
        logger.log(
            logging.WARNING if is_late else logging.INFO,
            "%s waits for %s, for %.0f s more at most: %s",
            me, ps, until - engine.now(), problem,
        )  # fmt: skip
        if is_late:
            tell_at = engine.now() + 2 * (tell_at - begun)
        await engine.park(Slot(engine, ps), min(until, engine.now() + pause))
        pause = min(2 * pause, _LONGEST_PAUSE_SECS)


def _compare(me: str, ps: str, addresses: dict[str, str], notice: dict[str, Any]) -> None:
    there = notice["task"]
    if notice["cluster"] != addresses:
        raise ClusterError(
            f"{me} and the process at {addresses[ps]}, which is {there}, were told of different "
            f"clusters: {differences(addresses, notice['cluster'])}; give all the same"
        )
    if there != ps:
        raise ClusterError(f"{me} found {there} at {addresses[ps]}; start {ps} there")
    if notice.get("version") != version():
        raise ClusterError(
            f"{ps} at {addresses[ps]} runs asynchooks {notice.get('version')}, {me} "
            f"{version()}; install the same version for both"
        )
