"""Which of several ready tasks goes on next: in their order, at random, or by a schedule.

A schedule is a list of deviations from the usual order, in which the first of them goes on.
"""

from __future__ import annotations

import builtins
import math
import random
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any, NamedTuple

from ... import _errors
from ..._engine.stacks import frames_of
from ..._errors import SimulationError
from ._kernel import Chooser
from ._waits import is_users, only_waits, wait_of

_MOST_CHANGES = 3
"""Changes of priorities in one run."""
_DEVIATION = re.compile(r"(\d+):(?:(\d+)|cancel (.+)|raise (\w+) in (.+))")


class Shuffled(Chooser):
    """Draws one of them."""

    def __init__(self, integers: Any) -> None:
        self._integers = integers

    def choose(self, ready: Sequence[object]) -> int:
        return int(self._integers(len(ready))) if len(ready) > 1 else 0


class Interjection(NamedTuple):
    """What happens to a task in place of the next choice: an error, or a cancellation ("")."""

    error: str
    task: str

    def __str__(self) -> str:
        return f"raise {self.error} in {self.task}" if self.error else f"cancel {self.task}"


Deviation = tuple[int, int | Interjection]
"""The number of a choice; which place is chosen instead of 0, or what happens instead."""
Order = tuple[Deviation, ...]
"""A schedule: its deviations, by their choices."""


def text_of(order: Order) -> str:
    """The order as `Simulation(schedule=)` takes it."""
    return "; ".join(f"{choice}:{what}" for choice, what in order) or "0:0"


def parse_order(text: str) -> Order:
    """The inverse of `text_of`; a ValueError of what is none."""
    order = []
    for each in text.split(";"):
        found = _DEVIATION.fullmatch(each.strip())
        if found is None:
            raise ValueError(
                f"schedule has {each.strip()!r}; give what a ScheduleError shows, such as "
                '"12:1; 30:cancel worker 1; 44:raise PreemptionError in worker 0"'
            )
        choice, place, cancelled, error, task = found.groups()
        what = Interjection(error or "", cancelled or task) if place is None else int(place)
        if isinstance(what, Interjection) and what.error:
            error_type(what.error)
        order.append((int(choice), what))
    return tuple(sorted(order, key=lambda each: each[0]))


def has_interjection(order: Order) -> bool:
    return any(isinstance(what, Interjection) for _, what in order)


def num_delays(order: Order) -> int:
    return len(order) - has_interjection(order)


def error_type(name: str) -> type[Exception]:
    """One of Python's or of asynchooks's errors; a ValueError if there is none of that name."""
    found = getattr(_errors, name, None) or getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    raise ValueError(f"{name!r} is no error of Python's or asynchooks's; give one of these")


class Scheduled(Chooser):
    """Follows an order, and counts what other orders there are behind its last deviation.

    Args:
        order: whose deviations are made.
        cancel: a pattern of the names of tasks that other orders may cancel.
        errors: the names of errors that other orders may raise in waits of steps and hooks.
        is_told: whether what happens is told.
    """

    def __init__(
        self, order: Order, cancel: str = "", errors: Sequence[str] = (), is_told: bool = False
    ) -> None:
        self._deviations: dict[int, int | Interjection] = dict(order)
        self._last: float = order[-1][0] if order else -1
        self._cancel, self._errors, self._is_told = cancel, errors, is_told
        self._interjected = -1
        self.num_choices = 0
        self.is_refused = False
        self.others: list[Deviation] = []
        """Each deviation that could come next."""
        self.raised: BaseException | None = None
        """The error of the interjection."""
        self.story: list[tuple[str, str]] = []
        """Of each deviation a sentence, and lines on what the tasks had waited for."""
        self.steps: list[tuple[float, str, str]] = []
        """What each choice ran: virtual time, task, what it had waited for."""

    @property
    def order(self) -> Order:
        """The deviations that were made."""
        return tuple(sorted(self._deviations.items(), key=itemgetter(0)))

    def interject(self) -> None:
        number, kernel = self.num_choices, self.kernel
        if self._interjected == number:
            return
        self._interjected = number
        what = self._deviations.get(number)
        if isinstance(what, Interjection):
            self._happen(what)
        elif self._cancel and number > self._last and not kernel.is_ending:
            begun = {each.name for each in kernel.live if type(each.body) is not tuple}
            cancelled = sorted(filter(self._is_cancelled, begun))
            self.others += [(number, Interjection("", each)) for each in cancelled]

    def _is_cancelled(self, name: str) -> bool:
        return fnmatchcase(name, self._cancel)

    def _happen(self, what: Interjection) -> None:
        kernel = self.kernel
        task = next((each for each in kernel.live if each.name == what.task), None)
        if task is None:
            self._refuse(f"is to {what}, but there is no such task")
            return
        if self._is_told:
            self._say(f"{what}", [task])
        if not what.error:
            task.cancel()
            return
        self.raised = error_type(what.error)(f"raised by the schedule in {task.name}")
        task.throw(self.raised)

    def _refuse(self, why: str) -> None:
        self.is_refused = True
        self.kernel.end(
            SimulationError(
                f"at choice {self.num_choices} the schedule {why}; it is one of another program, "
                "or of another version of it"
            )
        )

    def choose(self, ready: Sequence[object]) -> int:
        number = self.num_choices
        what = self._deviations.get(number, 0)
        place = what if isinstance(what, int) else len(ready) - 1
        if place >= len(ready):
            self._refuse(f"chooses place {place}, but {len(ready)} are ready")
            place = 0
        self.num_choices += 1
        if number > self._last and not self.kernel.is_ending:
            self._note_others(number, ready)
        if self._is_told:
            self._tell(ready, place, isinstance(what, int) and place > 0)
        return place

    def _note_others(self, number: int, ready: Sequence[object]) -> None:
        self.others += [(number, each) for each in range(1, len(ready))]
        if self._errors:
            name, coroutine = _name_and_coroutine(ready[0])
            if coroutine is not None and _is_in_users_wait(coroutine):
                self.others += [(number, Interjection(each, name)) for each in self._errors]

    def _tell(self, ready: Sequence[object], place: int, is_deviation: bool) -> None:
        name, coroutine = _name_and_coroutine(ready[place])
        self.steps.append((self.kernel.time, name, _wait(coroutine)))
        if is_deviation:
            others = " and ".join(_name_and_coroutine(each)[0] for each in ready[:place])
            self._say(f"{name} went on before {others}", [ready[place], *ready[:place]])

    def _say(self, what: str, tasks: Sequence[object]) -> None:
        named = dict(map(_name_and_coroutine, tasks))
        waits = {name: _wait(coroutine) for name, coroutine in named.items()}
        lines = "".join(f"\n    {name}: {wait}" for name, wait in waits.items() if wait)
        self.story.append((f"at {self.kernel.time:.6g} s, {what}", lines))


class Prioritized(Scheduled):
    """Lets the ready task with the highest priority go on; some choices lower that of one.

    Args:
        seed: of the priorities, and of all else.
        depth: choices among which priorities change, and a task is cancelled or gets an error.
    """

    def __init__(self, seed: str, depth: int, cancel: str = "", errors: Sequence[str] = ()) -> None:
        super().__init__((), cancel, errors)
        self._last = math.inf  # no other orders follow
        self._random = random.Random(seed)
        self._priorities: dict[str, float] = {}
        changes = self._random.randint(0, _MOST_CHANGES)
        self._changes = {self._random.randrange(depth + 1) for _ in range(changes)}
        self._interjects_at = self._random.randrange(depth + 1) if cancel or errors else -1

    def interject(self) -> None:
        if self.num_choices == self._interjects_at and not self.kernel.is_ending:
            begun = [each for each in self.kernel.live if type(each.body) is not tuple]
            found = [Interjection("", each.name) for each in begun if self._is_cancelled(each.name)]
            waiting = [each.name for each in begun if _is_in_users_wait(each.body)]
            found += [Interjection(error, name) for name in waiting for error in self._errors]
            if found:
                self._deviations[self.num_choices] = self._random.choice(found)
        super().interject()

    def choose(self, ready: Sequence[object]) -> int:
        number, random = self.num_choices, self._random.random
        if number not in self._deviations and len(ready) > 1:
            names = [_name_and_coroutine(each)[0] for each in ready]
            ranks = [self._priorities.setdefault(each, random()) for each in names]
            place = max(range(len(ready)), key=ranks.__getitem__)
            if number in self._changes:
                self._priorities[names[place]] = -random()
            if place:
                self._deviations[number] = place
        return super().choose(ready)


def _name_and_coroutine(target: Any) -> tuple[str, object]:
    """Of a task, of a wait of one, or of a task of an event loop; else its text, and None."""
    target = getattr(target, "task", target)
    if hasattr(target, "body"):
        return target.name, target.body
    if hasattr(target, "get_coro"):  # asyncio's
        return target.get_name(), target.get_coro()
    return getattr(target, "name", repr(target)), getattr(target, "coro", None)


def _wait(coroutine: object) -> str:
    if type(coroutine) is tuple:
        return "not begun"
    what, place = wait_of(coroutine)
    return " at ".join(filter(None, (what, place)))


def _is_in_users_wait(coroutine: object) -> bool:
    """Whether the code that waits, by what only sleeps and parks, is the user's."""
    frames = [frame for frame, _ in frames_of(coroutine) if not only_waits(frame)]
    return bool(frames) and is_users(frames[-1])
