"""Steps of other processes, brought to those who wait: how often the server is asked."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from asynchooks.tf._graph_session import GraphSession

from .models import counting_model
from .servers import ServerProcess, launched, running_server, session_of

tf = pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

launcher = pytest.fixture(scope="module")(launched)
server = pytest.fixture(running_server)


async def test_one_session_looks_for_all_of_a_process_and_only_while_somebody_waits(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Any] = []
    read = GraphSession.read_step

    def counted(self: GraphSession) -> int | None:
        reads.append(self)
        return read(self)

    model = counting_model()
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(session_of(server, model, is_chief=True))
            for _ in range(6)
        ]
        monkeypatch.setattr(GraphSession, "read_step", counted)
        with anyio.move_on_after(0.5):
            await anyio.Event().wait()  # nobody waits for a step
        assert reads == []
        with pytest.raises(TimeoutError):
            await sessions[0].global_step.wait_for(5, timeout=1.5)
        # one follower looks after 0.05, 0.1, 0.2, 0.4, 0.5 s; six would look 30 times
        assert 1 <= len(reads) <= 12
