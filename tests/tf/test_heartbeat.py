"""Heartbeats, against plain sockets; and what sessions of this process know of one server."""

from __future__ import annotations

import contextlib
import gc
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from asynchooks._engine.base import Slot
from asynchooks._engine.current import current_engine

from .models import ChiefSessionCreator, let_others_run

tf = pytest.importorskip("tensorflow")
servers = pytest.importorskip("asynchooks.tf.cluster._server")
Heartbeat, Server = servers.Heartbeat, servers.Server
pytestmark = pytest.mark.tensorflow

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SECS = 0.2


@contextmanager
def listening(answer: Callable[[socket.socket], object] | None) -> Iterator[str]:
    """The address of a socket that answers each connection; with None none is ever accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # the end
                    return
                with connection, contextlib.suppress(OSError):
                    assert answer is not None
                    answer(connection)

        thread = threading.Thread(target=serve)
        if answer is not None:
            thread.start()
        try:
            yield f"grpc://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # `close` alone would not wake `accept`
            if answer is not None:
                thread.join()


def settings(connection: socket.socket) -> None:
    """Answer as a server does."""
    connection.recv(100)
    connection.sendall(bytes(9))


def hang_up(connection: socket.socket) -> None:
    connection.recv(100)


def silence(connection: socket.socket) -> None:
    """Take what is said until the other side gives up."""
    while connection.recv(100):
        pass


@pytest.mark.faults
def test_a_server_that_answers_is_alive_and_is_asked_in_http_2() -> None:
    heard: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        heard.append(connection.recv(100))
        connection.sendall(b"\0")

    with listening(answer) as master:
        heartbeat = Heartbeat(master, SECS)
        heartbeat.check()
    assert heard == [HELLO]
    assert not heartbeat.loss.is_set


@pytest.mark.faults
@pytest.mark.parametrize("answer", [None, silence], ids=["never accepts", "never answers"])
def test_silence_is_noticed_within_half_the_time(
    answer: Callable[[socket.socket], object] | None,
) -> None:
    with listening(answer) as master:
        begun = time.monotonic()
        with pytest.raises(tf.errors.UnavailableError) as caught:
            Heartbeat(master, SECS).check()
        assert SECS / 2 <= time.monotonic() - begun < 10
    assert caught.value.message == f"the server at {master} has not answered for 0.1 s"


@pytest.mark.faults
def test_a_server_that_hangs_up_is_none() -> None:
    with listening(hang_up) as master:
        with pytest.raises(tf.errors.UnavailableError, match=f"{master} hangs up"):
            Heartbeat(master, SECS).check()


@pytest.mark.faults
def test_an_address_without_a_listener_is_unavailable() -> None:
    with listening(None) as master:
        pass
    with pytest.raises(tf.errors.UnavailableError, match=f"no server answers at {master}: .*refus"):
        Heartbeat(master, SECS).check()


def test_a_name_that_leads_nowhere_is_unavailable() -> None:
    with pytest.raises(tf.errors.UnavailableError, match="no server answers at grpc://host.inval"):
        Heartbeat("grpc://host.invalid:2222", SECS).check()


def test_a_name_that_no_host_can_have_is_unavailable() -> None:
    with pytest.raises(tf.errors.UnavailableError, match="no server answers at grpc://aaa"):
        Heartbeat(f"grpc://{'a' * 64}:2222", SECS).check()


@pytest.mark.parametrize(
    "master",
    [
        "grpc://one:2222,two:2222",
        "grpc://ipv4:127.0.0.1:2222",
        "grpc://host",
        "grpc://host:port",
        "grpc://host:99999",
        "grpc:///service",
        "grpc://[::1",
    ],
)
def test_an_address_that_cannot_be_parsed_is_not_watched(master: str) -> None:
    heartbeat = Heartbeat(master, 0.02)
    heartbeat.check()
    heartbeat.start()
    time.sleep(0.05)  # a few beats
    heartbeat.stop()
    assert not heartbeat.loss.is_set


@pytest.mark.faults
def test_a_heartbeat_reports_a_lost_server_once_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([settings, settings, silence])
    before = set(threading.enumerate())
    with listening(lambda connection: next(answers)(connection)) as master:
        heartbeat = Heartbeat(master, SECS)
        heartbeat.start()
        (thread,) = (each for each in threading.enumerate() if each.name == "asynchooks-heartbeat"
                     and each not in before)  # fmt: skip
        assert thread.daemon
        thread.join(5)
        assert heartbeat.loss.is_set
        assert not thread.is_alive()
    assert next(answers, None) is None
    one, two = heartbeat.loss.error(), heartbeat.loss.error()
    assert isinstance(one, tf.errors.UnavailableError)
    assert one is not two, "several tasks may raise it"
    logged = [each for each in caplog.messages if master in each]
    assert logged == [f"the server at {master} has not answered for 0.1 s"] == [str(one)]


@pytest.mark.faults
@pytest.mark.parametrize("answer", [settings, silence], ids=["answers", "is silent"])
def test_stop_ends_the_thread_and_nothing_is_reported(
    answer: Callable[[socket.socket], object], caplog: pytest.LogCaptureFixture
) -> None:
    asked = threading.Event()

    def tell(connection: socket.socket) -> None:
        asked.set()
        answer(connection)

    before = set(threading.enumerate())
    with listening(tell) as master:
        heartbeat = Heartbeat(master, 2 * SECS)
        heartbeat.start()
        started = set(threading.enumerate()) - before
        (thread,) = (each for each in started if each.name == "asynchooks-heartbeat")
        assert asked.wait(5)
        heartbeat.stop()
        thread.join(5)
        assert not thread.is_alive()
    assert not heartbeat.loss.is_set
    assert not [each for each in caplog.messages if master in each]


@pytest.mark.parametrize("secs", [0, -1, math.inf, math.nan, None, "1"])
def test_the_seconds_of_a_heartbeat_are_checked(secs: Any) -> None:
    error = ValueError if isinstance(secs, (int, float)) else TypeError
    with pytest.raises(error, match="heartbeat_secs is .*; give finite seconds > 0"):
        ChiefSessionCreator(heartbeat_secs=secs)


def test_one_address_and_step_are_one_server_as_long_as_it_is_used() -> None:
    master = "grpc://127.0.0.1:1"
    assert Server.at("", "global_step") is None
    assert Server.at("local", "global_step") is None
    server = Server.at(master, "global_step")
    assert Server.at(master, "global_step") is server
    assert Server.at(master, "other_step") is not server
    assert Server.at("grpc://127.0.0.1:2", "global_step") is not server
    server.global_step.publish(3)
    del server
    gc.collect()
    assert Server.at(master, "global_step").global_step.value == 0, "forgotten with its last user"


@pytest.mark.anyio
async def test_a_waiter_for_a_chief_is_woken_by_one_that_was_not_seen() -> None:
    server, engine, chief = Server("grpc://127.0.0.1:1", "step"), current_engine(), Slot
    server.expect_chief(chief)
    assert server.has_chief_to_come
    log: list[str] = []

    async def wait() -> None:
        await server.wait_for_chief(engine, 0, math.inf)
        log.append("woken")

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        group.start_soon(wait)
        await let_others_run()
        log.append("comes")
        server.note_chief(chief, has_come=True)
    assert log == ["comes", "woken", "woken"]
    assert not server.has_chief_to_come
    await server.wait_for_chief(engine, 0, math.inf)  # it has come already
    begun = engine.now()
    await server.wait_for_chief(engine, 1, begun + 0.01)  # no other comes
    assert engine.now() - begun >= 0.01


@pytest.mark.anyio
async def test_a_cancelled_wait_for_a_chief_leaves_nothing_behind() -> None:
    server, engine = Server("grpc://127.0.0.1:1", "step"), current_engine()
    async with anyio.create_task_group() as group:
        group.start_soon(server.wait_for_chief, engine, 0, math.inf)
        await let_others_run()
        group.cancel_scope.cancel()
    assert not server._slots
