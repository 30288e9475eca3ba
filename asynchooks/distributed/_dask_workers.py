"""Which Dask workers have left their cluster, by the word of its scheduler. It decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


def own_worker() -> Any:
    """The Dask worker that this runs on.

    Raises:
        ImportError, ValueError: Dask is not installed; or this is no task of it.
    """
    try:
        from distributed import get_worker

        return get_worker()
    except ImportError as error:
        raise ImportError("Dask is missing; run: pip install 'asynchooks[dask]'") from error
    except ValueError:
        raise ValueError(
            "no client is given, and this is no task on a Dask worker; give a distributed.Client"
        ) from None


async def gone_workers(asker: Any, places: Collection[str], secs: float) -> set[str]:
    """Those of the addresses that the scheduler does not know; none, if it does not answer.

    Args:
        asker: a Dask worker or client, of this event loop.
        secs: how long the scheduler may take, > 0.
    """
    if not places:
        return set()
    try:
        async with asyncio.timeout(secs):
            return set(places).difference(await asker.scheduler.ncores(workers=list(places)))
    except (OSError, TimeoutError):
        return set()
