"""A TensorFlow server that dies under a session: a real lost run, and a real recovery."""

from __future__ import annotations

from pathlib import Path

import anyio.to_thread
import pytest

from .models import ChiefSessionCreator, checkpoint_of, counting_model, monitored
from .servers import ServerProcess, launched, running_server

tf = pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

launcher = pytest.fixture(scope="module")(launched)
server = pytest.fixture(running_server)


async def test_a_restarted_server_is_found_again_and_restored(
    server: ServerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = counting_model()
    checkpoint_of(model, tmp_path, 10)
    with model.graph.as_default():
        creator = ChiefSessionCreator(master=server.target, checkpoint_dir=str(tmp_path))
    async with monitored(model.graph, None, creator) as session:
        assert [await session.run(model.train_op) for _ in range(2)] == [11, 12]
        lost = session.raw_session()
        await anyio.to_thread.run_sync(server.restart)
        assert await session.run(model.train_op) == 11
        assert session.raw_session() is not lost
        assert (session.global_step.value, session.global_step.epoch) == (11, 1)
    assert any("global_step has gone back from 12 to 10" in each for each in caplog.messages)
