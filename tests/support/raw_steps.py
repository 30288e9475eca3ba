"""Steps that are functions, run on a counter as a session does, and askers without tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asynchooks import GlobalStep
from asynchooks._engine.base import Engine, Slot
from asynchooks._step.admission import wake_all
from asynchooks._step.gate import ADVANCED, Asker, Ticket

from .virtual_kernel import Trampoline


class Raw:
    """A step that is a function; `after_error` is the step after it where it fails."""

    def __init__(self, run: Callable[[], Any], after_error: int | None = None) -> None:
        self.run = run
        self.args: list[Any] = []
        self.after_error = after_error
        self.errors: list[BaseException] = []

    def run_and_read_step(self, args: Any) -> Any:
        self.args.append(args)
        return self.run()

    def read_step_after(self, error: BaseException) -> int | None:
        self.errors.append(error)
        return self.after_error


ARGS = ("loss", None, None, None)
ADVANCES = Raw(lambda: ("output", ADVANCED))


def moves_to(value: int) -> Raw:
    return Raw(lambda: ("output", value))


def opened(engine: Engine | None = None) -> GlobalStep:
    """A step with one worker, whose steps run on one engine."""
    step = GlobalStep()
    step.open_worker(engine or Trampoline())
    return step


def run_here(step: GlobalStep, raw: Any, args: Any = ARGS) -> Any:
    """What a session does with a step on its event loop.

    Returns:
        (outputs, step after the run), or (a coroutine, its ticket); None if it has to wait.
    """
    epoch = step.admission.begin_here()
    if epoch is None:
        return None
    try:
        result = raw.run_and_read_step(args)
    except BaseException as error:
        after = None
        try:
            after = raw.read_step_after(error)
        finally:
            step.admission.end_here(epoch, after)
        raise
    if type(result) is not tuple:
        return result, step.admission.suspend_here(epoch)
    step.admission.end_here(epoch, result[1])
    return result


def in_line(step: GlobalStep, *, is_exclusive: bool = False) -> Asker:
    """What `take_ticket` and `take_exclusive` do until they wait."""
    asker = Asker(Slot(Trampoline(), "a test"), is_exclusive)
    with step.admission.lock:
        step.admission.gate.askers.append(asker)
        news = step.admission.news()
    wake_all(news)
    return asker


def take_ticket(step: GlobalStep) -> Ticket:
    """A ticket that is granted at once."""
    ticket = step.admission.take_ticket_nowait()
    assert ticket is not None
    return ticket
