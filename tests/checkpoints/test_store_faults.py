"""Runs that save into real servers of objects through a bad line, and are killed anywhere."""

from __future__ import annotations

import http.server
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from asynchooks import CheckpointError
from asynchooks.checkpoints import CheckpointStore

from ..support.object_stores import SERVERS, Proxy, StoreServer, moto, s3rver
from .stores import REPOSITORY, mount_namespace, run_python, writer

obstore = pytest.importorskip("obstore")
pytestmark = pytest.mark.faults

# Each step adds one to the weight of its item, so items that are lost or come twice show
TRAINING = """
import logging, sys
import anyio
import numpy as np
from asynchooks import (
    CheckpointSaverHook, CheckpointSaverListener, FeedHook, FunctionSessionCreator,
    MonitoredSession, Retention, StateDictSaver, StopAtStepHook,
)
from asynchooks.data import shuffle

address, backend, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
logging.basicConfig(level=logging.WARNING, format="LOG %(message)s", stream=sys.stdout)

class Tell(CheckpointSaverListener):
    def after_save(self, session, step):
        print("saved", step, flush=True)

async def main():
    weights = {"seen": np.zeros(steps), "noise": np.zeros(20_000)}

    def step(item):
        weights["seen"][item] += 1
        weights["noise"][:] = np.sin(weights["noise"] + item)
        return {"item": item}

    saver = CheckpointSaverHook(
        address, save_steps=8, saver=StateDictSaver(weights=weights), background=True,
        listeners=[Tell()], retention=Retention(max_to_keep=2),
    )
    source = shuffle(range(steps), 64, seed=0)
    hooks = [FeedHook(source, "item"), saver, StopAtStepHook(last_step=steps)]
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        print("from", session.global_step.value, flush=True)
        while not session.should_stop():
            await session.run("item")
            await anyio.sleep(0.002)
    print("seen", weights["seen"].min(), weights["seen"].max(), float(weights["noise"].sum()).hex())

anyio.run(main, backend=backend)
"""
NUM_STEPS = 300


def url_of(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a prefix, which this process can reach directly."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return f"{server.url}/run"


def live(url: object, backend: str, environment: Any, kill_after: float | None) -> list[str]:
    """What a process prints that trains; it is killed so many seconds after its first line."""
    command = [sys.executable, "-c", textwrap.dedent(TRAINING), str(url), backend, str(NUM_STEPS)]
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=REPOSITORY,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        if kill_after is not None:
            time.sleep(kill_after)
            process.kill()
        output, errors = process.communicate(timeout=100)
        assert process.returncode in (0, -signal.SIGKILL), errors
    return [each.strip() for each in [*lines, *output.splitlines()] if each.strip()]


def model_in(lines: list[str]) -> str:
    (said,) = [each for each in lines if each.startswith("seen")]
    return said


@pytest.mark.parametrize(
    ("kind", "backend", "num_kills"),
    [
        *(("moto", "asyncio", 4), ("moto", "trio", 4), ("azurite", "asyncio", 4)),
        *(pytest.param(kind, "asyncio", 200, marks=pytest.mark.slow) for kind in SERVERS),
    ],
)
def test_kills_through_a_bad_line_lose_nothing_and_give_the_same_bits(
    kind: str, backend: str, num_kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model_in(live(tmp_path / "whole", backend, {}, None))
    assert whole.startswith("seen 1.0 1.0")
    rng, reached = random.Random(num_kills), 0
    with SERVERS[kind](tmp_path) as server, Proxy(server.port, spoils=0.1, seed=1) as proxy:
        url, environment = url_of(server, monkeypatch), server.environment(proxy.port)
        for _ in range(num_kills):
            lines = live(url, backend, environment, 1.2 * rng.random() ** 2)
            assert not [each for each in lines if "passed over" in each]
            assert lines[0].startswith("from"), lines
            assert int(lines[0].split()[1]) >= reached
            said = [int(each.split()[1]) for each in lines if each.startswith("saved")]
            reached = max([reached, *said])
            newest = CheckpointStore(url).newest_intact()
            assert (newest.step if newest is not None else 0) >= reached
            if reached >= NUM_STEPS - 20:  # another training
                url, reached = f"{url}x", 0
        assert model_in(live(url, backend, environment, None)) == whole
        assert proxy.counts["lost"] + proxy.counts["error"] > 0


def test_a_second_live_run_with_the_prefix_is_refused_and_a_line_that_goes_down_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moto(tmp_path) as server, Proxy(server.port) as proxy:
        url = url_of(server, monkeypatch)
        client = obstore.store.S3Store.from_url(
            url, endpoint=f"http://127.0.0.1:{proxy.port}", client_options={"allow_http": True},
            retry_config={"max_retries": 2},
        )  # fmt: skip
        store = CheckpointStore(client)
        store.open()
        store.save(1, writer())
        code = """
        import sys
        from asynchooks import CheckpointInUseError
        from asynchooks.checkpoints import CheckpointStore
        try:
            CheckpointStore(sys.argv[1]).open()
        except CheckpointInUseError as error:
            print(error)
        """
        # it watches until the lease is renewed
        assert "in use by process" in run_python(code, url)
        proxy.is_down = True
        with pytest.raises(CheckpointError, match="can be reached.*are untouched"):
            store.save(2, writer())
        proxy.is_down = False
        assert store.save(2, writer()).step == 2
        assert [each.step for each in store.checkpoints()] == [1, 2]
        store.close()


def test_a_store_that_ignores_conditions_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3rver(tmp_path) as server:
        with pytest.raises(CheckpointError, match="ignores conditions"):
            CheckpointStore(url_of(server, monkeypatch)).open()


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("ExpiredToken", "the credentials have expired"),
        ("AccessDenied", "the right to read, write, list and delete"),
        ("NoSuchBucket", "make the bucket"),
    ],
)
def test_refusals_of_the_store_say_what_to_do(code: str, hint: str) -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def refuse(self) -> None:
            body = f"<Error><Code>{code}</Code><Message>no</Message><Token>secret</Token></Error>"
            self.send_response(403 if code != "NoSuchBucket" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_PUT = do_DELETE = do_POST = refuse  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        client = obstore.store.S3Store(
            "bucket", endpoint=f"http://127.0.0.1:{running.server_port}", access_key_id="a",
            secret_access_key="b", client_options={"allow_http": True},
        )  # fmt: skip
        with pytest.raises(CheckpointError, match=hint) as caught:
            CheckpointStore(client).open()
        assert "secret" not in str(caught.value)
        running.shutdown()


def test_a_full_staging_disk_is_a_clear_error_and_the_next_save_goes_on(tmp_path: Path) -> None:
    code = """
    import subprocess, sys
    from pathlib import Path
    import obstore.store
    from asynchooks import CheckpointError
    from asynchooks.checkpoints import CheckpointStore, ObjectStore
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", sys.argv[1]], check=True)
    store = CheckpointStore(ObjectStore(obstore.store.MemoryStore(), staging_dir=sys.argv[1]))
    store.open()
    for num_bytes in (300_000, 3_000_000, 400_000):
        try:
            store.save(num_bytes, lambda path: Path(path).write_bytes(bytes(num_bytes)))
        except CheckpointError as error:
            print(error)
    print([each.step for each in store.checkpoints()], store.newest_intact().step)
    store.close()
    """
    lines = run_python(code, tmp_path, namespace=mount_namespace()).splitlines()
    assert "is not saved: [Errno 28]" in lines[0]
    assert "older checkpoints are untouched; free space there" in lines[0]
    assert lines[1:] == ["[300000, 400000] 400000"]
