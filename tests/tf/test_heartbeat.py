"""Heartbeats, against plain sockets that stand for servers."""

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import pytest

from .models import ChiefSessionCreator, tf

# private, as a session also needs what these sockets do not serve
Heartbeat = pytest.importorskip("asynchooks.tf.cluster._heartbeat").Heartbeat

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
    """Answer as a server does, if it is asked in HTTP/2."""
    if connection.recv(100) == HELLO:
        connection.sendall(bytes(9))


def hang_up(connection: socket.socket) -> None:
    connection.recv(100)


def silence(connection: socket.socket) -> None:
    """Take what is said until the other side gives up."""
    while connection.recv(100):
        pass


@pytest.mark.faults
@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (settings, None),
        (None, "the server at {} has not answered for 0.1 s"),
        (silence, "the server at {} has not answered for 0.1 s"),
        (hang_up, "the server at {} hangs up"),
    ],
    ids=["answers", "never accepts", "never answers", "hangs up"],
)
def test_silence_is_noticed(answer: Answer | None, problem: str | None) -> None:
    with listening(answer) as master:
        assert Heartbeat(master, SECS).problem() == (problem or "").format(master)


@pytest.mark.parametrize("host", ["127.0.0.1", "host.invalid", "a" * 64])
def test_an_address_without_a_listener_or_of_no_host_is_unavailable(host: str) -> None:
    master = f"grpc://{host}:1"
    with pytest.raises(tf.errors.UnavailableError, match=f"no server answers at {master}: "):
        Heartbeat(master, SECS).check()


@pytest.mark.parametrize(
    "master", ["grpc://one:2222,two:2222", "grpc://host", "grpc://host:99999", "grpc://[::1"]
)
def test_an_address_that_cannot_be_parsed_is_not_watched(master: str) -> None:
    Heartbeat(master, SECS).check()


@pytest.mark.faults
@pytest.mark.parametrize("last", [silence, settings])
def test_a_heartbeat_reports_a_lost_server_once_and_ends_or_is_stopped(
    last: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    answers, asked = chain([settings, settings], repeat(last)), threading.Event()

    def answer(connection: socket.socket) -> None:
        answer_now = next(answers)
        if answer_now is last:
            asked.set()
        answer_now(connection)

    before = set(threading.enumerate())
    with listening(answer) as master:
        heartbeat = Heartbeat(master, SECS)
        heartbeat.start()
        new = set(threading.enumerate()) - before
        (thread,) = (each for each in new if each.name == "asynchooks-heartbeat")
        assert asked.wait(5)
        if last is settings:
            heartbeat.stop()
        thread.join(5)
        assert not thread.is_alive()
    reports = [f"the server at {master} has not answered for 0.1 s"] * (last is silence)
    assert [each for each in caplog.messages if master in each] == reports
    assert heartbeat.lost_peer.is_set == bool(reports)
    if reports:
        one, two = heartbeat.lost_peer.error_now(), heartbeat.lost_peer.error_now()
        assert str(one) == reports[0]
        assert one is not two, "several tasks may raise it"


@pytest.mark.parametrize("secs", [0, math.inf, math.nan, "1"])
def test_the_seconds_of_a_heartbeat_are_checked(secs: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="heartbeat_secs is .*; give finite seconds"):
        ChiefSessionCreator(heartbeat_secs=secs)
