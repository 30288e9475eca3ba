"""Whether the ps of a cluster answer, and were given the same cluster as this process."""

from __future__ import annotations

import json
import logging
from typing import Any

from ..._engine.base import Slot
from ..._engine.current import current_engine
from ..._engine.threads import run_blocking
from ..._errors import ClusterError
from ..._version import version
from ._messages import read_task
from ._spec import differences

logger = logging.getLogger("asynchooks")

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.05, 1.0
"""Between two checks of a ps that does not answer yet: nothing reports that it has started."""
_CHECK_SECS = 4.0
_PATIENCE_SECS = 5.0
"""After so long a warning is logged: the ps may not have been started."""


async def check_ps(
    name: str, ps: str, addresses: dict[str, str], max_wait_secs: float, until: float
) -> None:
    """Wait until a ps answers, and check that it was given the same cluster. Cancellation safe.

    Args:
        name: of this task.
        ps: the name of that one.
        addresses: name -> "host:port" of the cluster's tasks.
        max_wait_secs: seconds to wait for all ps together, for messages.
        until: when they are over, on the engine's clock; one check is made in any case.

    Raises:
        ClusterError: it does not answer in time, is another task, is of another cluster, or runs
            another version of asynchooks.
    """
    engine = current_engine()
    target = f"grpc://{addresses[ps]}"
    pause = _FIRST_PAUSE_SECS
    begun = engine.now()
    warn_at = begun + _PATIENCE_SECS
    while True:
        cause: ClusterError | None = None
        latest = max(until, engine.now() + _CHECK_SECS)
        try:
            found = await run_blocking(
                engine, lambda: read_task(target), 0, "asynchooks-check", until=latest
            )
        except ClusterError as error:
            found, cause = None, error
        if found is not None:
            _compare(name, ps, addresses, json.loads(found))
            return
        problem = cause or f"the server at {target} does not answer"
        if engine.now() >= until:
            raise ClusterError(
                f"{name} waited for {ps} for max_wait_secs={max_wait_secs:g} s: {problem}; is it "
                "running?"
            ) from cause
        is_late = engine.now() >= warn_at
        logger.log(
            logging.WARNING if is_late else logging.INFO,
            "%s waits for %s, for %.0f s more at most: %s",
            name, ps, until - engine.now(), problem,
        )  # fmt: skip
        if is_late:
            warn_at = engine.now() + 2 * (warn_at - begun)
        await engine.park(Slot(engine, ps), min(until, engine.now() + pause))
        pause = min(2 * pause, _LONGEST_PAUSE_SECS)


def _compare(name: str, ps: str, addresses: dict[str, str], found: dict[str, Any]) -> None:
    there = found["task"]
    if found["cluster"] != addresses:
        raise ClusterError(
            f"{name} and the process at {addresses[ps]}, which is {there}, were given different "
            f"clusters: {differences(addresses, found['cluster'])}; give all processes the same"
        )
    if there != ps:
        raise ClusterError(f"{name} found {there} at {addresses[ps]}; start {ps} there")
    if found.get("version") != version():
        raise ClusterError(
            f"{ps} at {addresses[ps]} runs asynchooks {found.get('version')}, {name} "
            f"{version()}; install the same version for both"
        )
