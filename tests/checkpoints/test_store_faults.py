"""Runs that save into real servers of objects through a bad line, and are killed anywhere."""

import http.server
import random
import threading
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from asynchooks import CheckpointError
from asynchooks.checkpoints import CheckpointStore, _lease

from ..crash.programs import kill_at_random, running, server, train, uninterrupted
from ..support.object_stores import SERVERS, Proxy, StoreServer, moto
from .stores import mount_namespace, run_python, writer

obstore = pytest.importorskip("obstore")
pytestmark = pytest.mark.faults


def url_of(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a prefix, which this process can reach directly."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return f"{server.url}/run"


@pytest.mark.parametrize(
    ("kind", "backend", "num_kills"),
    [
        *(("moto", "asyncio", 4), ("azurite", "trio", 4)),
        *(pytest.param(kind, "asyncio", 200, marks=pytest.mark.slow) for kind in SERVERS),
    ],
)
def test_kills_through_a_bad_line_lose_no_checkpoint_and_give_the_same_bits(
    kind: str, backend: str, num_kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, rng = server("asynchooks.checkpoints", "obstore.store"), random.Random(num_kills)
    with SERVERS[kind](tmp_path) as objects, Proxy(objects.port, spoils=0.1, seed=1) as proxy:
        url = url_of(objects, monkeypatch)
        program = partial(train, environment=objects.environment(proxy.port))
        args = backend, url, Connection
        saved = kill_at_random(context, rng, num_kills, 0.3, program, lambda _: args)
        newest = CheckpointStore(url).newest_intact()
        assert newest is not None
        assert newest.step >= saved
        with running(context, program, *args, newest.step + 8) as run:
            run.join()
        assert proxy.counts["lost"] + proxy.counts["error"] > 0
    last = newest.step + 8
    assert run.of("ends") == [(last, last, uninterrupted(last))]


def test_a_second_live_run_with_the_prefix_is_refused_and_a_line_that_goes_down_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lease, "RENEWED_EVERY_SECS", 0.5)
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
        from asynchooks.checkpoints import CheckpointStore, _lease
        try:
            CheckpointStore(sys.argv[1]).open()
        except CheckpointInUseError as error:
            print(error)
        """
        # it watches until the lease is renewed: private, as ten seconds are long
        assert "in use by process" in run_python(code, url)
        proxy.is_down = True
        with pytest.raises(CheckpointError, match="can be reached.*are untouched"):
            store.save(2, writer())
        proxy.is_down = False
        assert store.save(2, writer()).step == 2
        assert [each.step for each in store.checkpoints()] == [1, 2]
        store.close()


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
