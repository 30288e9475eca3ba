"""Every exception of asynchooks; each docstring says whose fault it is.

TensorFlow's error types count where they mean the same, but only once TensorFlow is loaded:
nothing here imports it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Awaitable, Generator, Iterator, Sequence
from enum import Enum
from types import TracebackType
from typing import Any

logger = logging.getLogger("asynchooks")

_OURS = os.path.join(os.path.dirname(__file__), "")
_MAX_NOTES = 3
_NOTED = "_asynchooks_noted"
"""The attribute of an error with all notes that it was to be given, also those only logged."""


class StopTraining(Exception):  # noqa: N818 - like StopIteration, it is no error
    """No fault: training ends here. `async with MonitoredSession` swallows it, `end` runs.

    `session.run` raises it when the input ended, when the last step was reached, and when a stop
    was asked for, before it or while it waited; `step_context.request_stop()` raises it, too.
    """


class StepUnreachableError(RuntimeError):
    """The program's fault: a task waits for a global step that can no longer come."""


class StepSourceLostError(ConnectionError):
    """The network's or another machine's fault: no news of other processes' steps arrives.

    Raised by waits for the global step that asked for it; the others wait on.
    """


class PreemptionError(RuntimeError):
    """The machine's fault: the raw session is lost and a new one may work.

    For step functions: raise it, or a subclass, and `MonitoredSession` recreates its raw session
    and runs again, as it does for TensorFlow's `AbortedError` and `UnavailableError`, and for an
    exception group of nothing but such errors.
    """


class StepFunctionError(TypeError):
    """The step function's fault: it returned no mapping, or a bad "global_step"."""


class OverlappingCallError(RuntimeError):
    """The program's fault: a call of a step function would overlap another one that goes on.

    Raised in place of the call, where the other one was cancelled or given up and has not
    returned, or where there is no waiting for it.
    """


class FetchError(ValueError):
    """The caller's fault: a fetch that the step function's outputs do not hold.

    `fetch` is the one that is missing.
    """

    def __init__(self, message: str, fetch: Any = None) -> None:
        super().__init__(message)
        self.fetch = fetch
        self.made: tuple[Any, ...] = ()  # of a step that was made all the same, for the gate


class FeedError(ValueError):
    """The caller's fault: a feed that the step function has no parameter for, or one missing."""


class NanLossDuringTrainingError(RuntimeError):
    """The model's fault: its loss is NaN. Raised by `NanTensorHook`.

    `checkpoint` is the path of the last good checkpoint, None if none is known.
    """

    def __init__(
        self, message: str = "NaN loss during training.", checkpoint: str | None = None
    ) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint


class RankError(RuntimeError):
    """Another rank's fault: it has failed, is gone or hangs, so that this one ends as well.

    Raised by `RankStopHook`; what failed here for it, such as a collective, is its context.
    """


class StallError(RuntimeError):
    """An unknown fault: no run ended within a time. Raised by `StallHook`.

    The stacks of all tasks and threads at that moment are in the log.
    """


class CheckpointError(RuntimeError):
    """The machine's fault, mostly: a checkpoint could not be written, or not be read."""


class DamagedCheckpointError(CheckpointError):
    """The disk's fault: what a checkpoint holds is not what was written there."""


class CheckpointVersionError(CheckpointError):
    """The operator's fault: a checkpoint was written by a newer version of asynchooks."""


class CheckpointInUseError(CheckpointError):
    """The operator's fault: another run uses the directory of checkpoints.

    `pid` is its process, None where that cannot be read.
    """

    def __init__(self, message: str, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class MetricError(ValueError):
    """The model's fault: a metric by which something is decided is missing, or is no number."""


class InputError(RuntimeError):
    """The input of training is not what it should be, or cannot be read."""


class InputStructureError(InputError, ValueError):
    """Items do not fit together, or not to what they are fed to."""


class InputStateError(InputError, ValueError):
    """A position in the input cannot be saved, or is none of this pipeline."""


class ClusterError(ValueError):
    """The operator's fault: a process does not fit into its cluster, or cannot reach it."""


class TraceError(ValueError):
    """A file is no trace that can be read, or holds too little, or files do not belong together."""


class SimulationError(RuntimeError):
    """A simulation cannot go on, or was asked for what it cannot do."""


class DeadlockError(SimulationError):
    """Tasks wait in virtual time, and nothing is left that could wake them.

    Crashes that repeat for ever count as nothing where they are seen to change nothing.
    """


class LivelockError(SimulationError):
    """A task goes on for ever at one virtual time, or a training without an update."""


class ForeignAwaitError(SimulationError):
    """The turbo backend met an await of another library."""


class OutsideWorkError(SimulationError):
    """A simulated program does real I/O, or really sleeps, without having declared it."""


class ScheduleError(SimulationError):
    """A program fails in some order of its tasks; the error in that order is the cause.

    `schedule` replays it: `Simulation(schedule=error.schedule)`. `deviations` are sentences, one
    for each choice of another task than the first, and `steps` are all choices in order: virtual
    time, task, and what it had waited for.
    """

    def __init__(
        self,
        message: str,
        schedule: str,
        deviations: Sequence[str],
        steps: Sequence[tuple[float, str, str]],
    ) -> None:
        super().__init__(message)
        self.schedule = schedule
        self.deviations = deviations
        self.steps = steps


class DeterminismError(SimulationError):
    """Runs of one simulation with one seed differ."""


class PlanError(RuntimeError):
    """A program cannot be planned, or its plan does not hold for what was recorded."""


def tensorflow_errors() -> Any:
    """`tensorflow.errors` when TensorFlow is loaded, else None."""
    return getattr(sys.modules.get("tensorflow"), "errors", None)


def _tensorflow_types(*names: str) -> tuple[type[BaseException], ...]:
    errors = tensorflow_errors()
    return () if errors is None else tuple(getattr(errors, name) for name in names)


def tensorflow_train() -> Any:
    """`tensorflow.compat.v1.train` when TensorFlow is loaded, else None."""
    # still missing while another thread is importing it
    v1 = getattr(getattr(sys.modules.get("tensorflow"), "compat", None), "v1", None)
    return getattr(v1, "train", None)


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """What a task group has wrapped, however deep: the error itself where it is no group.

    A group counts as what each of its errors counts as, so a step or a hook may fan out.
    """
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves_of(each)
    else:
        yield error


def is_preemption(error: BaseException | None) -> bool:
    """Whether recreating the raw session may cure the error.

    In a group, other waits may have ended by StopTraining, which is no error.
    """
    if error is None or is_stop(error):
        return False
    curable: tuple[type[BaseException], ...]
    curable = (PreemptionError, *_tensorflow_types("AbortedError", "UnavailableError"))
    return all(is_stop(each) or isinstance(each, curable) for each in leaves_of(error))


def is_stop(error: BaseException) -> bool:
    """Whether it is StopTraining, exactly, or a group of nothing else."""
    return all(type(each) is StopTraining for each in leaves_of(error))


def as_stop(error: BaseException) -> BaseException:
    """The error; but one StopTraining for a group of nothing else."""
    if not isinstance(error, BaseExceptionGroup) or not is_stop(error):
        return error
    stop = StopTraining(*next(leaves_of(error)).args)
    stop.__cause__ = error
    return stop


def out_of_range_types() -> tuple[type[BaseException], ...]:
    """The types by which an input queue says that it has ended: TensorFlow's, once loaded."""
    return _tensorflow_types("OutOfRangeError")


def is_clean_end(error: BaseException | None) -> bool:
    """Whether the end of a block with this error counts as clean; exact types only."""
    if error is None:
        return True
    clean = (StopTraining, StopIteration, StopAsyncIteration, *out_of_range_types())
    return all(type(each) in clean for each in leaves_of(error))


def no_input_end(error: BaseException, where: str) -> BaseException:
    """The error, or what it becomes where no input is read: it must not pass for a clean end."""
    if not passes_for_input_end(error):
        return error
    bug = RuntimeError(f"{where} raised {error!r}, but no input is read there; catch it there")
    bug.__cause__ = error
    return bug


def is_input_end(error: BaseException) -> bool:
    """Whether an iterator ended in a coroutine or a function, or in each task of a group.

    Source: PEP 479 turns StopIteration into a RuntimeError at the edge of a coroutine.
    """
    return all(_is_end_of_iterator(each) for each in leaves_of(error))


def input_ended(error: BaseException, where: str) -> StopTraining:
    """What the end of an iterator becomes where input is read."""
    ended = StopTraining(f"the input ended in {where}")
    ended.__cause__ = error
    return ended


def passes_for_input_end(error: BaseException) -> bool:
    """Whether it would end training where it is let out: also TensorFlow's end of an input."""
    ends = out_of_range_types()
    return all(is_input_end(each) or isinstance(each, ends) for each in leaves_of(error))


def _is_end_of_iterator(error: BaseException) -> bool:
    if type(error) is RuntimeError and str(error) == "coroutine raised StopIteration":
        return type(error.__cause__) is StopIteration
    return type(error) in (StopIteration, StopAsyncIteration)


def add_note(error: BaseException, note: str) -> None:
    """Add a note, one of three at most: where many hooks and tasks fail, the rest are in the log.

    What others have noted stays, and does not count.
    """
    noted: list[str] = error.__dict__.setdefault(_NOTED, [])
    noted.append(note)
    if len(noted) <= _MAX_NOTES:
        error.add_note(note)
        return
    logger.error("A further note on %r: %s", error, note)
    if len(noted) == _MAX_NOTES + 1:
        error.add_note("further notes are in the log")


def note_once(error: BaseException, note: str) -> None:
    """Add a note, unless it was added before: several may meet the same error."""
    if note not in (*error.__dict__.get(_NOTED, ()), *getattr(error, "__notes__", ())):
        add_note(error, note)


def call_text(made: object, **arguments: object) -> str:
    """An object as the call that makes it; arguments that are None are left out."""
    given = [f"{name}={shown(value)}" for name, value in arguments.items() if value is not None]
    return f"{type(made).__name__}({', '.join(given)})"


def shown(value: object) -> str:
    """A value in a repr or a message, in one line: a function by its name, what is long is cut."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    # what a generator function returned is not that function
    name = None if isinstance(value, Generator) else getattr(value, "__qualname__", None)
    lines = str(name or repr(value)).splitlines()
    text = " ".join(line.strip() for line in lines)
    return text if len(text) <= 200 else text[:197] + "..."


def public_dir(instance: object) -> list[str]:
    """As `__dir__`: of a class of ours no private names, which Python would suggest to users."""
    names = object.__dir__(instance)
    if not type(instance).__module__.startswith("asynchooks."):
        return [*names]
    return [name for name in names if name.endswith("__") or not name.startswith("_")]


def shorten_traceback(error: BaseException) -> None:
    """Leave out of its traceback what lies in asynchooks between two frames of others.

    Of our frames in a row the first and the last stay: users see which line of ours they called,
    and which one called theirs, or raised. Causes keep their tracebacks.
    """
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    is_ours = [each.tb_frame.f_code.co_filename.startswith(_OURS) for each in entries]
    kept = [
        each
        for place, each in enumerate(entries)
        if is_ours[place - 1 : place + 2] != [True, True, True]
    ]
    shortened = None
    if len(kept) < len(entries):
        for each in reversed(kept):
            shortened = TracebackType(shortened, each.tb_frame, each.tb_lasti, each.tb_lineno)
        error.__traceback__ = shortened


def is_thrown_away(error: BaseException) -> bool:
    """Whether it is that of a coroutine being closed; asked where the `await` caught it.

    Closing begins at the innermost coroutine, and what each one gets is not handed up (PEP 380):
    a GeneratorExit that comes from below was raised there by mistake.
    """
    traceback = error.__traceback__
    return isinstance(error, GeneratorExit) and (traceback is None or traceback.tb_next is None)


async def raised_by(awaitable: Awaitable[object]) -> BaseException | None:
    """Await it; returns what it raised, unless nothing can be awaited any more."""
    try:
        await awaitable
    except BaseException as error:
        if is_thrown_away(error):
            raise
        return error
    return None
