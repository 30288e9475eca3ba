"""Link: one process's part of a training that a Dask server hosts: its calls, and the news for it.

It neither waits for the network nor sends: the stream does, on another event loop perhaps.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .._engine.base import STOPPED, Slot
from .._engine.current import current_engine, now
from .._engine.stop import EndsAtStop, Stop
from .._engine.threads import Outcome
from .._errors import StopTraining
from .._step.global_step import GlobalStep
from .._step.remote import SourceState, StepSource
from ._credits import CreditPolicy, Move
from ._messages import Message

_LOOK_SECS = 0.1
"""How often to check for failed runs, of which there is no event."""


class Call(NamedTuple):
    """Something to do at the host, once and in order, and the slot that waits until it is done."""

    number: int
    function: str
    args: Any
    slot: Slot


class Link(StepSource):
    """One process of a training.

    A call is sent once; after a broken connection it is sent again, and the host does it once all
    the same. It waits for its answer while the host is lost, and fails once that will not come.

    Args:
        global_step: follows the host's.
        counts: whether runs here count at the host, below its credits. Then calls go together:
            those that are made while others are under way wait for their answers.
        lost: makes the error of what waits when no news will come, of the reason.
        packed: makes what is sent of the arguments of a call; TypeError if that cannot be.
        when_told: called after each piece of news, on the stream's event loop.
    """

    def __init__(
        self,
        global_step: GlobalStep,
        *,
        counts: bool,
        lost: Callable[[str], Exception],
        packed: Callable[[Any], Any] = lambda args: args,
        when_told: Callable[[], object] = lambda: None,
    ) -> None:
        self.step = global_step
        self.grants_credits = counts
        self.uid = uuid.uuid4().hex
        self.epoch = ""  # the host's name of it; empty before the first news
        self.limit: int | None = None
        self.is_closed = False  # the host makes no further update
        self.state: SourceState | None = None
        self.num_messages = 0  # ever
        self.look_at = math.inf  # when to look again, in seconds of `now`
        self.kick: Callable[[], None]  # has the stream look for a message, in any thread
        self._lost, self._packed, self._when_told = lost, packed, when_told
        self.wants_each_step = False
        """Whether each step concerns this process, also where no task waits for it."""
        self._policy = CreditPolicy()
        self._lock = threading.Lock()  # guards the following fields that several threads use
        self._num_calls = 0
        self._calls: dict[int, Call] = {}  # by number, until they are answered
        self._unsent: list[Call] = []  # of these, in order
        self._unsettled = Counter[str]()  # runs that were counted and have their tickets, by epoch
        self._closed_for = ""
        # of the stream only
        self.is_heartbeat_due = False
        self._received: list[int] = []  # calls whose answers the host still keeps
        self._granted = 0  # credits received since connecting, in this epoch
        self._last = Message()  # sent, with the credits received since

    @property
    def incarnation(self) -> str:
        """Identifies the host: one of a restarted scheduler is another one."""
        return self.epoch.partition(".")[0]

    @property
    def is_over(self) -> bool:
        """Whether no update will come, as far as this process knows."""
        is_at_limit = self.limit is not None and self.step.last_known >= self.limit
        return self.is_closed or bool(self._closed_for) or is_at_limit

    def look_again(self) -> None:
        if self.limit is not None and self.step.limit is None:
            # the last session here has closed; the next one must not run beyond it
            self.step.raise_limit(self.limit)
        self.kick()

    # Calls, from any thread

    async def call(self, function: str, *args: Any) -> Any:
        """Have something done at the host, also if cancelled; returns its value."""
        return await self.answer_to(self.begin(function, *args))

    def begin(self, function: str, *args: Any, what: str = "") -> Call:
        """A call whose answer is awaited by `answer_to`, or released.

        Args:
            what: it waits for, at the host; "": for nothing.
        """
        what = what or f"the answer to {function!r}, about {self.step.name}"
        slot, sent = Slot(current_engine(), what), self._packed(args)
        with self._lock:
            self._num_calls += 1
            call = Call(self._num_calls, function, sent, slot)
            if not self._closed_for:
                self._calls[call.number] = call
                self._unsent.append(call)
        if self._closed_for:
            self._fail(call)
        self.kick()
        return call

    async def answer_to(self, call: Call, stop: Stop | None = None) -> Any:
        """The value of a call, or its error. When cancelled, a wait at the host is released.

        Raises:
            StopTraining: the stop came first.
        """
        slot = call.slot
        try:
            with EndsAtStop(slot, stop):
                value = await slot.engine.park(slot)
            if value is STOPPED:
                raise StopTraining(f"a stop was requested while waiting for {slot.what}")
        except BaseException:
            self.release(call)
            raise
        outcome: Outcome = value
        return outcome.unwrap()

    def release(self, call: Call) -> None:
        """Wait for its answer no more."""
        if call.number in self._calls and not self.grants_credits:
            self.begin("release", call.number)

    async def step_after(self, run: Call) -> int:
        """The step after a run that was counted; meanwhile its ticket is no credit held here."""
        epoch = run.args[0]
        with self._lock:
            self._unsettled[epoch] += 1
        try:
            value: int = await self.answer_to(run)
            return value
        finally:
            with self._lock:
                self._unsettled[epoch] -= 1

    # The stream, on its event loop

    def hello(self) -> Message:
        """The first message of a connection; credits granted before it are void."""
        self._granted = 0
        while spare := self.step.demand().num_spare:  # a run may just have taken one of them
            self.step.grant(-spare, epoch=self.step.epoch)
        with self._lock:  # the host knows which of them it has taken
            self._unsent = list(self._calls.values())
        return self._sent(self._message(0))

    def next_message(self) -> Message | None:
        """The message to send now, if any: calls, a heartbeat, or changes that concern the host."""
        if self.grants_credits and len(self._calls) > len(self._unsent):
            self.look_at = math.inf
            return None  # the answer comes soon: changes until then go together
        move = Move()
        if self.grants_credits:
            demand = self.step.demand()
            move = self._policy.next_move(demand, now())
            if move.give_back:
                self.step.grant(-move.give_back, epoch=demand.epoch)
        message = self._message(move.ask)
        self.look_at = min(move.look_at, now() + _LOOK_SECS if message.num_held else math.inf)
        is_new = message._replace(received=()) != self._last
        return self._sent(message) if is_new else None

    def receive(self, news: Mapping[str, Any]) -> None:
        """Apply news of the host; they come in order."""
        step, limit = self.step, news["limit"]
        if news["epoch"] != self.epoch:
            if self.epoch:
                step.restart(news["step"])
            self.epoch, self._granted, self._last = news["epoch"], 0, Message()
        step.publish(news["step"])
        if limit not in (None, self.limit):
            self.limit = limit
            step.raise_limit(limit)
        num, last = news["num_granted"] - self._granted, self._last
        if num > 0:
            self._granted += num
            step.grant(num, epoch=step.epoch)
            self._policy.take_note(num, step.demand(), now())
            held = last.num_held + num
            last = last._replace(num_wanted=0, num_held=held, num_granted=self._granted)
        self._last = last._replace(next_step=math.inf) if news["step"] >= last.next_step else last
        if news["is_closed"] and not self.is_closed:
            self.is_closed = True
            step.set_source_state(SourceState.CLOSED, "its host was closed")
        for number, value, error in news["answers"]:
            self._received.append(number)
            with self._lock:
                call = self._calls.pop(number, None)
            if call is not None:
                call.slot.wake(Outcome(value, error))
        self.set_state(SourceState.LIVE)
        self._when_told()

    def set_state(self, state: SourceState, reason: str = "") -> None:
        """Say whether news come; once they will not come any more, that stays."""
        if self.state in (state, SourceState.CLOSED):
            return
        self.state = state
        if state is SourceState.CLOSED:
            with self._lock:
                self._closed_for = reason
                pending, self._calls, self._unsent = self._calls, {}, []
            for each in pending.values():
                self._fail(each)
        if not (self.is_closed and state is SourceState.LIVE):
            self.step.set_source_state(state, reason)
        self._when_told()

    def _fail(self, call: Call) -> None:
        call.slot.wake(Outcome(error=self._lost(self._closed_for)))

    def _sent(self, message: Message) -> Message:
        self._last, self._received = message._replace(calls=(), received=(), asks=False), []
        self.num_messages += 1
        self.is_heartbeat_due = False
        return message

    def _message(self, num_wanted: int) -> Message:
        """The state here, with all calls that were not sent: it is sent if there are any."""
        demand = self.step.demand()
        # A run is held until it is among the calls of a message, whether its ticket was returned or
        # not. One that ends after `demand` was read is held, too.
        with self._lock:
            calls, self._unsent = self._unsent, []
            num_held = demand.num_spare + demand.num_out - self._unsettled[self.epoch]
        num_held -= demand.num_lost  # they may never end, and would not count
        limit = max((each for each in (demand.limit, self.limit) if each is not None), default=None)
        each_step = self.step.last_known + 1 if self.wants_each_step else math.inf
        return Message(
            calls=tuple((each.number, each.function, each.args) for each in calls),
            received=tuple(self._received),
            asks=self.is_heartbeat_due,
            next_step=min(demand.next_step, each_step),
            limit=limit,
            epoch=self.epoch,
            # without a limit they are not asked for
            num_held=0 if limit is None or not self.grants_credits else max(0, num_held),
            num_granted=self._granted,
            num_wanted=num_wanted,
        )
