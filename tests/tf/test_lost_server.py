"""A TensorFlow server that dies under a session: a real lost run, and a real recovery."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import pytest

from .models import ChiefSessionCreator, checkpoint_of, counting_model, monitored

tf = pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

SERVER = """
import sys
import tensorflow as tf

address = f"localhost:{sys.argv[1]}"
server = tf.distribute.Server({"local": [address]}, job_name="local", task_index=0)
print("up", flush=True)
sys.stdin.read()  # until the test closes it, or ends
"""


class Server:
    """One address, and the process that serves it now."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            self.port: int = probe.getsockname()[1]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def restart(self) -> None:
        self.kill()
        self.start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()


async def test_a_restarted_server_is_found_again_and_restored(
    server: Server, tmp_path: Path
) -> None:
    model = counting_model()
    checkpoint_of(model, tmp_path, 10)
    with model.graph.as_default():
        creator = ChiefSessionCreator(
            master=f"grpc://localhost:{server.port}", checkpoint_dir=str(tmp_path)
        )
    async with monitored(model.graph, None, creator) as session:
        assert [await session.run(model.train_op) for _ in range(2)] == [11, 12]
        lost = session.raw_session()
        await anyio.to_thread.run_sync(server.restart)
        assert await session.run(model.train_op) == 11
        assert session.raw_session() is not lost
        assert (session.global_step.value, session.global_step.epoch) == (11, 1)
