"""GuardThread: called at the moments that it names, and over when it is closed."""

from __future__ import annotations

import threading

from asynchooks.hooks.guards._thread import GuardThread


def thread_named(name: str) -> threading.Thread | None:
    return next((each for each in threading.enumerate() if each.name == name), None)


def test_it_is_called_until_it_names_no_moment() -> None:
    pauses: list[float | None] = [0.0, 0.001, 1e300, None]
    is_called = threading.Event()

    def look() -> float | None:
        if pauses[0] == 1e300:
            is_called.set()
        return pauses.pop(0)

    guard = GuardThread(look, 0.0, "looks")
    assert is_called.wait(10)
    assert thread_named("looks") is not None
    guard.close()
    assert thread_named("looks") is None
    assert pauses == [None]


def test_closing_ends_the_thread_at_once_and_again_does_nothing() -> None:
    guard = GuardThread(lambda: None, 3600.0, "never looks")
    assert thread_named("never looks") is not None
    guard.close()
    guard.close()
    assert thread_named("never looks") is None


def test_it_may_close_itself() -> None:
    is_made = threading.Event()

    def look() -> float:
        is_made.wait(10)
        guard.close()
        return 0.0

    guard = GuardThread(look, 0.0, "closes itself")
    thread = thread_named("closes itself")
    is_made.set()
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
