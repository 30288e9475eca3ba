"""The threads of asynchooks that a test has started; not those that tests before it have left."""

import threading
from weakref import WeakSet

_before: WeakSet[threading.Thread] = WeakSet()


def note_threads() -> None:
    """A test begins: what runs now is none of its own, such as the thread of a stuck sink."""
    _before.clear()
    _before.update(threading.enumerate())


def own_threads(prefix: str = "asynchooks") -> list[threading.Thread]:
    """Those that the test has started and that live, by the beginning of their names."""
    threads = [each for each in threading.enumerate() if each.name.startswith(prefix)]
    return [each for each in threads if each not in _before]


def threads_left(prefix: str = "asynchooks") -> list[str]:
    """Their names."""
    return [each.name for each in own_threads(prefix)]
