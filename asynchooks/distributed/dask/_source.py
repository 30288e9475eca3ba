"""One process's requests to its training, and its handling of news. The stream sends them."""

from __future__ import annotations

import math
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from ..._engine.base import Sentinel, Slot
from ..._engine.current import current_engine, now
from ..._errors import StepUnreachableError
from ..._step.global_step import GlobalStep
from ..._step.remote import SourceState, StepSource
from .._credits import CreditPolicy, Move
from ._training import Request, incarnation_of

_CLOSED = Sentinel("CLOSED")
_LOOK_SECS = 0.1
"""How often to check for failed runs, of which there is no event."""


class Action(NamedTuple):
    """Something to do at the scheduler, once, and the slot that waits until it is done."""

    num_runs: int = 0
    published: int = 0
    restart_at: int | None = None
    restart_of: str = ""
    is_done: bool = False
    epoch: str = ""
    ticket_of: int | None = None  # the epoch of the step here in which a run got its ticket
    slot: Slot | None = None


class Begun(NamedTuple):
    """The epoch in which a run began, in the scheduler's terms and in those of the step here."""

    epoch: str
    local_epoch: int


class DaskSource(StepSource):
    """One process of a training; `kick` has the stream check for a request, in any thread."""

    def __init__(self, global_step: GlobalStep, kick: Callable[[], None]) -> None:
        self.step = global_step
        self.grants_credits = not global_step.published_only
        self.uid = uuid.uuid4().hex
        self.epoch = ""  # the scheduler's name of it; empty before the first news
        self.limit: int | None = None
        self._kick = kick
        self._policy = CreditPolicy()
        self._lock = threading.Lock()  # guards the following fields that several threads use
        self._actions: list[Action] = []
        self._sent: list[Action] | None = None  # the actions of the request under way
        self._unsettled: Counter[int] = Counter()  # unanswered runs, by the step's epoch
        self._closed_for = ""
        # of the stream only
        self._local_epoch = 0
        self._number = 0
        self.num_requests = 0  # ever
        self._granted = 0  # credits received since connecting, in this epoch
        self._last = Request(0, "")  # sent, with the credits received since
        self.look_at = math.inf  # when to look again, in seconds of `now`

    @property
    def incarnation(self) -> str:
        """Identifies the scheduler's training: a restarted scheduler has another one."""
        return incarnation_of(self.epoch)

    def look_again(self) -> None:
        if self.limit is not None and self.step.limit is None:
            # the last session here has closed; the next one must not run without credits
            self.step.raise_limit(self.limit)
        self._kick()

    async def do(self, action: Action) -> int:
        """Have something done at the scheduler, also if cancelled; returns the step after that."""
        slot = Slot(current_engine(), f"the scheduler's answer about {self.step.name}")
        self._add(action._replace(slot=slot, epoch=self.epoch))
        return await self._answer_to(slot)

    def begin_run(self) -> Begun:
        """Call it when a run begins that `count_run` will count."""
        return Begun(self.epoch, self.step.epoch)

    def count_run(self, begun: Begun, published: int = 0) -> Coroutine[Any, Any, int]:
        """Count a run with a ticket, from any thread; returns a coroutine for the step after it."""
        slot = Slot(current_engine(), f"the scheduler's answer about {self.step.name}")
        action = Action(
            num_runs=0 if published else 1, published=published,
            epoch=begun.epoch, ticket_of=begun.local_epoch, slot=slot,
        )  # fmt: skip
        self._add(action)
        return self._settle(slot, begun.local_epoch)

    def publish_soon(self, step: int) -> None:
        """Set the step to at least `step`, without waiting for the scheduler; from any thread."""
        action = Action(published=step, epoch=self.epoch)
        with self._lock:
            # merged: else they would accumulate while the scheduler is lost
            if self._actions and self._actions[-1]._replace(published=step) == action:
                step = max(step, self._actions.pop().published)
        self._add(action._replace(published=step))

    def first_request(self) -> Request:
        """The state here when a connection begins; credits granted before it are void."""
        self._granted = 0
        spare = self.step.demand().num_spare
        if spare:
            self.step.grant(-spare, epoch=self._local_epoch)
        self._last = Request(0, "")
        request = self._request(0)
        return request._replace(number=max(1, self._number) if self.epoch else 0)

    def next_request(self, *, is_heartbeat: bool = False) -> Request | None:
        """The request to send now, if any.

        One request with actions, or a heartbeat, is under way at a time, and is answered; changes
        of the state here are sent when they concern the scheduler.
        """
        if self._sent is not None:  # its answer comes soon: changes until then go together
            return None
        move = self._next_move()
        before = self._last
        request = self._request(move.ask)
        self.look_at = min(move.look_at, now() + _LOOK_SECS if request.num_held else math.inf)
        if is_heartbeat or self._actions:
            self._number += 1
            request = self._request(move.ask, takes=True)
        elif not (
            request.next_step < before.next_step
            or request.limit != before.limit
            or (request.limit is not None and request.num_held < before.num_held)
            or request.num_wanted > before.num_wanted or 0 == request.num_wanted < before.num_wanted
        ):  # fmt: skip
            return None
        self._last = request
        self.num_requests += 1
        return request

    def last_request(self) -> Request | None:
        """The request whose answer had not arrived when the connection broke."""
        if self._sent is not None:
            self._last = self._request(0, resends=True)
        return None if self._sent is None else self._last

    def receive(self, news: Mapping[str, Any]) -> None:
        """Apply news from the scheduler."""
        step, limit = self.step, news["limit"]
        if news["epoch"] != self.epoch:
            if self.epoch:
                step.restart(news["step"])
            self._local_epoch, self.epoch, self._granted = step.epoch, news["epoch"], 0
            self._last = self._last._replace(num_held=0, num_granted=0)
        step.publish(news["step"], epoch=self._local_epoch)
        if limit is not None and limit != self.limit:
            self.limit = limit
            step.raise_limit(limit)
        num = news["num_granted"] - self._granted
        if num > 0:
            self._granted += num
            step.grant(num, epoch=self._local_epoch)
            self._policy.take_note(num, step.demand(), now())
            self._last = self._last._replace(num_wanted=0, num_held=self._last.num_held + num)
        if news["step"] >= self._last.next_step:
            self._last = self._last._replace(next_step=math.inf)
        number, after = news["answer"]
        if self._sent is not None and number == self._number:
            self._answer(self._sent, after)

    def set_state(self, state: SourceState, reason: str = "") -> None:
        if state is SourceState.CLOSED:
            with self._lock:
                self._closed_for = self._closed_for or reason or "its DaskCluster is closed"
                pending = [*(self._sent or []), *self._actions]
                self._sent, self._actions = None, []
            for each in pending:
                if each.slot is not None:
                    each.slot.wake(_CLOSED)
        self.step.set_source_state(state, reason)

    async def _settle(self, slot: Slot, epoch: int) -> int:
        with self._lock:
            self._unsettled[epoch] += 1
        try:
            return await self._answer_to(slot)
        finally:
            with self._lock:
                self._unsettled[epoch] -= 1

    async def _answer_to(self, slot: Slot) -> int:
        value = await slot.engine.park(slot)
        if value is _CLOSED:
            raise StepUnreachableError(f"{self.step!r} gets no more news: {self._closed_for}")
        assert isinstance(value, int)
        return value

    def _add(self, action: Action) -> None:
        with self._lock:
            is_closed = bool(self._closed_for)
            if not is_closed:
                self._actions.append(action)
        if is_closed and action.slot is not None:
            action.slot.wake(_CLOSED)
        self._kick()

    def _answer(self, done: list[Action], after: int) -> None:
        # their runs were counted together: each gets its own step
        with self._lock:
            self._sent = None
        left = sum(each.num_runs for each in done)
        for each in done:
            left -= each.num_runs
            if each.slot is not None:
                each.slot.wake(after - left)

    def _take_actions(self) -> list[Action]:
        """The actions of one request; one that begins an epoch goes alone."""
        restarts = (i for i, each in enumerate(self._actions) if each.restart_at is not None)
        end = max(next(restarts, len(self._actions)), 1)
        taken, self._actions = self._actions[:end], self._actions[end:]
        return taken

    def _next_move(self) -> Move:
        demand = self.step.demand()
        move = self._policy.next_move(demand, now()) if self.grants_credits else Move()
        if move.give_back:
            self.step.grant(-move.give_back, epoch=demand.epoch)
        return move

    def _request(self, num_wanted: int, *, takes: bool = False, resends: bool = False) -> Request:
        demand = self.step.demand()
        # A run is held until it is among the actions of a request, whether its ticket was returned
        # or not. One that ends after `demand` was read is held, too.
        with self._lock:
            if takes:
                self._sent = self._take_actions()
            num_held = demand.num_spare + demand.num_out - self._unsettled[demand.epoch]
            num_held += sum(each.ticket_of == demand.epoch for each in self._actions)
            actions = (self._sent or []) if takes or resends else []
        limits = [each for each in (demand.limit, self.limit) if each is not None]
        valid = [each for each in actions if each.epoch == self.epoch]
        restart = actions[0] if actions else Action()  # one that begins an epoch is alone
        return Request(
            number=self._number, epoch=self.epoch, num_runs=sum(each.num_runs for each in valid),
            published=max((each.published for each in valid), default=0),
            restart_at=restart.restart_at, restart_of=restart.restart_of,
            is_done=any(each.is_done for each in actions),
            next_step=demand.next_step, limit=max(limits, default=None),
            num_held=max(0, num_held) if self.grants_credits else 0,
            num_granted=self._granted, num_wanted=num_wanted,
        )  # fmt: skip
