"""A checkpoint of a parameter server in another process: its state is fetched, then saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import StateDictSaver
from asynchooks.distributed import host_parameter_server
from asynchooks.protocols import Asynchronous

from .clusters import native

pytestmark = pytest.mark.anyio


async def test_a_saver_says_that_the_state_of_a_remote_server_has_to_be_awaited(
    client: Any,
) -> None:
    async with native(client) as own:
        async with host_parameter_server(own, np.ones(2), Asynchronous(), num_workers=1) as server:
            with pytest.raises(
                TypeError, match=r"server is <RemoteParameterServer .* has to be awaited.*=state\)"
            ):
                StateDictSaver(server=server)


async def test_training_continues_from_a_state_that_was_fetched_and_saved(
    client: Any, tmp_path: Path
) -> None:
    async with native(client) as own:
        async with host_parameter_server(own, np.ones(2), Asynchronous(), num_workers=1) as server:
            await server.push(0, np.ones(2), 0)
            StateDictSaver(server=await server.state_dict()).save(str(tmp_path / "model"))
            await server.push(0, np.ones(2), 1)
            state = await server.state_dict()
            StateDictSaver(server=state).restore(str(tmp_path / "model"))
            await server.load_state_dict(state)
            parameters, version = await server.pull(0)
            assert (parameters.tolist(), version) == ([0.9, 0.9], 1)
