"""What tests of PreemptionHook and of early ends share: a small model, its checkpoints, signals."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointSaverHook,
    MonitoredSession,
    PreemptionHook,
    StateDictSaver,
)
from asynchooks.checkpoints import CheckpointDirectory

from ..support.helpers import counting_creator
from ..support.threads import own_threads

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Counter:
    """A model that holds the number of its steps."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> dict[str, int]:
        self.count += 1
        return {"count": self.count}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


def saving(directory: Path, model: Any, save_steps: int = 100, **options: Any) -> Any:
    """A CheckpointSaverHook of such a model."""
    saver = StateDictSaver(model=model)
    return CheckpointSaverHook(directory, save_steps=save_steps, saver=saver, **options)


def saved_counts(directory: Path) -> dict[int, int]:
    """Of each checkpoint its step, and what the model in it has counted."""
    opened = CheckpointDirectory(directory)
    opened.open()
    counts = {}
    try:
        for each in opened.checkpoints():
            model = Counter()
            StateDictSaver(model=model).restore(each.prefix)
            counts[each.step] = model.count
    finally:
        opened.close()
    return counts


def sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


def signal_main() -> None:
    """SIGTERM for the main thread, whichever thread calls this."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGTERM)


async def train(session: MonitoredSession) -> None:
    """Run steps until the session is to stop, letting others run between them."""
    while not session.should_stop():
        await session.run([])
        await anyio.lowlevel.checkpoint()


@contextmanager
def handlers_are_kept() -> Iterator[None]:
    """After the block, the handlers are those of before, and the watch's threads have ended."""
    before = [signal.getsignal(each) for each in SIGNALS]
    try:
        yield
        assert [signal.getsignal(each) for each in SIGNALS] == before
        for thread in own_threads("asynchooks-deadline"):
            thread.join(10)
            assert not thread.is_alive()
    finally:  # a handler that stayed would swallow the next test's Ctrl-C
        for each, handler in zip(SIGNALS, before, strict=True):
            signal.signal(each, handler)


@contextmanager
def left_by_signal(kind: type[BaseException] = SystemExit) -> Iterator[Any]:
    """The block is left by what a signal leaves, and the handlers are those of before."""
    with handlers_are_kept(), pytest.raises(kind) as caught:
        yield caught


def session_with(*hooks: Any) -> MonitoredSession:
    """A session that counts its steps, with a PreemptionHook unless there is one."""
    has_one = any(isinstance(each, PreemptionHook) for each in hooks)
    return MonitoredSession(hooks if has_one else [PreemptionHook(), *hooks], counting_creator())
