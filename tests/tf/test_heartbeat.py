"""Heartbeats, against plain sockets."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from .models import ChiefSessionCreator

tf = pytest.importorskip("tensorflow")
Heartbeat = pytest.importorskip("asynchooks.tf.cluster._heartbeat").Heartbeat
pytestmark = pytest.mark.tensorflow

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SECS = 0.2

Answer = Callable[[socket.socket], object]


@contextmanager
def listening(answer: Answer | None) -> Iterator[str]:
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


def started(heartbeat: Any) -> threading.Thread:
    """The thread of the heartbeat, which starts."""
    before = set(threading.enumerate())
    heartbeat.start()
    new = set(threading.enumerate()) - before
    (thread,) = (each for each in new if each.name == "asynchooks-heartbeat")
    return thread


@pytest.mark.faults
def test_a_server_that_answers_is_alive_and_is_asked_in_http_2() -> None:
    received: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        received.append(connection.recv(100))
        connection.sendall(b"\0")

    with listening(answer) as master:
        heartbeat = Heartbeat(master, SECS)
        heartbeat.check()
    assert received == [HELLO]
    assert not heartbeat.lost_peer.is_set


@pytest.mark.faults
@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "has not answered for 0.1 s"),
        (silence, "has not answered for 0.1 s"),
        (hang_up, "hangs up"),
    ],
    ids=["never accepts", "never answers", "hangs up"],
)
def test_silence_is_noticed_within_half_the_time(answer: Answer | None, problem: str) -> None:
    with listening(answer) as master:
        begun = time.monotonic()
        with pytest.raises(tf.errors.UnavailableError) as caught:
            Heartbeat(master, SECS).check()
        assert time.monotonic() - begun >= (0 if answer is hang_up else SECS / 2)
    assert caught.value.message == f"the server at {master} {problem}"


@pytest.mark.faults
def test_an_address_without_a_listener_is_unavailable() -> None:
    with listening(None) as master:
        pass
    with pytest.raises(tf.errors.UnavailableError, match=f"no server answers at {master}: .*refus"):
        Heartbeat(master, SECS).check()


@pytest.mark.parametrize("host", ["host.invalid", "a" * 64], ids=["unknown", "impossible"])
def test_a_name_of_no_host_is_unavailable(host: str) -> None:
    with pytest.raises(tf.errors.UnavailableError, match=f"no server answers at grpc://{host}"):
        Heartbeat(f"grpc://{host}:2222", SECS).check()


@pytest.mark.parametrize(
    "master",
    [
        "grpc://one:2222,two:2222",
        "grpc://host",
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
    assert not heartbeat.lost_peer.is_set


@pytest.mark.faults
def test_a_heartbeat_reports_a_lost_server_once_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([settings, settings, silence])
    with listening(lambda connection: next(answers)(connection)) as master:
        heartbeat = Heartbeat(master, SECS)
        thread = started(heartbeat)
        assert thread.daemon
        thread.join(5)
        assert heartbeat.lost_peer.is_set
        assert not thread.is_alive()
    assert next(answers, None) is None
    one, two = heartbeat.lost_peer.error_now(), heartbeat.lost_peer.error_now()
    assert isinstance(one, tf.errors.UnavailableError)
    assert one is not two, "several tasks may raise it"
    logged = [each for each in caplog.messages if master in each]
    assert logged == [f"the server at {master} has not answered for 0.1 s"] == [str(one)]


@pytest.mark.faults
@pytest.mark.parametrize("answer", [settings, silence], ids=["answers", "is silent"])
def test_stop_ends_the_thread_and_nothing_is_reported(
    answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    asked = threading.Event()

    def note(connection: socket.socket) -> None:
        asked.set()
        answer(connection)

    with listening(note) as master:
        heartbeat = Heartbeat(master, 2 * SECS)
        thread = started(heartbeat)
        assert asked.wait(5)
        heartbeat.stop()
        thread.join(5)
        assert not thread.is_alive()
    assert not heartbeat.lost_peer.is_set
    assert not [each for each in caplog.messages if master in each]


@pytest.mark.parametrize("secs", [0, math.inf, math.nan, "1"])
def test_the_seconds_of_a_heartbeat_are_checked(secs: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError), match="heartbeat_secs is .*; give finite seconds > 0"
    ):
        ChiefSessionCreator(heartbeat_secs=secs)
