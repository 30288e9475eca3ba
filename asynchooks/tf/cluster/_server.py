"""One TensorFlow server: what sessions of this process share on it, and the members of its cluster.

`Server` is that state. `Members` exchanges steps and credits with the other tasks of the cluster's
spec; `_table` has the operations, and the `GlobalStep` knows which tasks of this process wait or
run steps. Nothing polls: one thread holds the one blocked wait of the process, and another one
sends what changes. Only where no cluster is known, that is without a `ClusterTask`, the step is
read four times a second while a task waits for it.
"""

from __future__ import annotations

import atexit
import logging
import math
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet, WeakValueDictionary

import tensorflow as tf

from ..._engine.background import BackgroundThread
from ..._engine.base import Slot
from ..._engine.current import system_now
from ..._engine.threads import WorkThread
from ..._step.global_step import GlobalStep
from ..._step.remote import Demand, SourceState, StepSource
from ...distributed._credits import CreditPolicy
from ...distributed._old_objects import OldObjects
from ..graph._default_graph import run_in_graph
from ._heartbeat import Heartbeat
from ._own_server import Servers
from ._publishing import Publishing
from ._table import ANY, NEVER, REFUSED

logger = logging.getLogger("asynchooks")

v1 = tf.compat.v1

_POLL_SECS = 0.25
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.05, 1.0
"""Between two attempts to reach the table again."""
_LEASED_BEATS, _SILENT_BEATS = 10, 12
"""For so many heartbeats a process that is stopped, or cut off, keeps its credits, and after so
many others may be given them. Its lease ends before that, by its own clock."""
_LOST_BEATS = 4
"""After so many, runs that were abandoned with a lost session count as ended."""
_EXIT_SECS = 5.0
"""How long the exit of the process waits at most: a server may not answer."""


class Server:
    """The state that sessions of this process on one server share: the step, and their chief.

    `Server.at` finds or makes it; it lives as long as a session uses it.
    """

    # One object for each server in the whole process.
    _known: ClassVar[WeakValueDictionary[tuple[str, str], Server]] = WeakValueDictionary()
    _guard = threading.Lock()
    # Of all members in the process, as it exits once.
    threads: ClassVar[WeakSet[BackgroundThread]] = WeakSet()

    def __init__(self, master: str, step_name: str) -> None:
        self.master = master
        name, tasks = Servers.cluster_of(master)
        self.targets = {each: f"grpc://{tasks[each]}" for each in sorted(tasks)}
        self.ps = {each: at for each, at in self.targets.items() if each.startswith("ps:")}
        # the tasks that may train, and which one this process is; None if no cluster is known
        self.names = [each for each in self.targets if each not in self.ps]
        self.number = self.names.index(name) if name in self.names else None
        self.global_step = GlobalStep(name=step_name, multi_process=True)
        self._lock = threading.Lock()  # guards what follows
        self.epoch = 0  # of the table; 0: none is known
        self._heartbeats: WeakSet[Heartbeat] = WeakSet()  # of the sessions that are open
        self._members: Members | None = None
        self._join: Callable[[str], Members]  # makes one, given why the last one was lost
        self._num_users = 0  # that have entered and not left
        self.waiting: set[Slot] = set()  # of workers that wait for a chief

    @classmethod
    def at(cls, master: str, step_name: str) -> Server | None:
        """The server at this address; None for sessions in the process itself."""
        if not master.startswith("grpc://"):
            return None
        with cls._guard:
            server = cls._known.get((master, step_name))
            if server is None:
                server = cls._known[master, step_name] = cls(master, step_name)
            return server

    def enter(self) -> None:
        """A session opens, which will leave."""
        with self._lock:
            self._num_users += 1

    def join(self, heartbeat: Heartbeat, publishing: Publishing | None, config: object) -> None:
        """A session was made: when the server is lost, its runs must fail.

        If it has a step, the steps of other processes are needed until all have left.
        """
        heartbeat.on_lost = partial(self.lose, by=heartbeat)
        with self._lock:
            self._heartbeats.add(heartbeat)
            if publishing is None:
                return
            self._join = partial(Members, self, publishing, config, heartbeat.secs)
            if self._members is None:
                OldObjects.leave_out()
                self._members = self._join("")

    def leave(self) -> None:
        """A session closes."""
        with self._lock:
            self._num_users -= 1
            if self._num_users or self._members is None:
                return
            members, self._members = self._members, None
        OldObjects.take_back()
        members.close()

    def lose(self, problem: str, by: object) -> None:
        """Have runs on this server raise an error; sessions are recreated then. From any thread.

        Args:
            by: the heartbeat or the members that noticed it, which may be those of a loss before.
        """
        with self._lock:
            if by is not self._members and by not in self._heartbeats:
                return
            heartbeats, self._heartbeats = list(self._heartbeats), WeakSet()
            members = self._members
            # one that has not joined yet waits for the server already
            if members is not None and members.has_joined:
                members.give_up()
                self._members = self._join(problem)
        for each in heartbeats:
            each.report(problem)

    def note(self, news: Any, *, begins: bool = False) -> bool:
        """Apply news (step, epoch), from any thread; returns whether they are of the newest epoch.

        Older ones come from a server that has just started, before its chief has initialised the
        model, or they are late. `begins`: a session begins with them, which has made no run yet.
        """
        step, epoch = int(news[0]), int(news[1])
        with self._lock:
            if epoch < self.epoch:
                return False
            # the first known epoch is the one in which training began, unless the step is behind
            is_known = self.epoch > 0 or (begins and step < self.global_step.value)
            is_new, self.epoch = is_known and epoch > self.epoch, epoch
            before = self.global_step.value
            change = self.global_step.restart if is_new else self.global_step.publish
            change(step)
        if is_new and step < before:
            logger.warning(
                "%s has gone back from %d to %d: its chief on %s has initialised the model again, "
                "or restored a checkpoint",
                self.global_step.name,
                before,
                step,
                self.master,
            )
        return True

    def wake_workers(self) -> None:
        """A chief of this process has initialised the model."""
        for slot in list(self.waiting):
            slot.wake()

    @classmethod
    def end_threads(cls) -> None:
        """When the process exits: wait for the threads that may be within TensorFlow.

        One that comes back from there while the interpreter is being taken down aborts the process
        ("terminate called ... exception not rethrown"). One that never comes back does no harm.
        """
        until = system_now() + _EXIT_SECS
        threads = list(cls.threads)
        for each in threads:
            each.end()
        left: list[Any] = [*threads, *WorkThread.left_alone]
        for each in left:
            each.join(max(0.0, until - system_now()))


atexit.register(Server.end_threads)


class Members(StepSource):
    """This process among the members, from its first session on a server until the last one closes.

    A server that is lost ends it, and its `Server` begins another one, which waits for the server.

    Args:
        lost: why the server is lost, "" if it is not.
    """

    def __init__(
        self, server: Server, publishing: Publishing, config: Any, heartbeat_secs: float, lost: str
    ) -> None:
        self._server, self._step, self._number = server, server.global_step, server.number
        self._table, self._stride = publishing.table, publishing.stride
        self._config = v1.ConfigProto()
        if config is not None:
            self._config.CopyFrom(config)
        self._config.operation_timeout_in_ms = 0  # a wait may take any time
        self._beat_secs = heartbeat_secs
        self._where = f"the table of {self._table.name} at {self._table.device or server.master}"
        self.grants_credits = self._number is not None
        self.has_joined = False  # this table; so sessions are lost with it
        self._owner = secrets.randbits(62) + 1
        self._silent_since: dict[int, float] = {}  # other tasks that do not answer
        self._lost_since = math.inf  # runs that were abandoned
        self._listener = BackgroundThread("asynchooks-membership-wait", self._listen)
        self._thread = BackgroundThread("asynchooks-membership", self._serve)
        Server.threads.add(self._thread)
        self._step.feed_from(self, self._stride)
        if lost:
            self._set_state(SourceState.LOST, lost)
        self._thread.start()

    def look_again(self) -> None:
        self._thread.ring()

    def close(self) -> None:
        """Leave. Returns at once; a call that is under way is left behind."""
        self._step.feed_from(None, instead_of=self)
        self.give_up()

    def give_up(self) -> None:
        """As `close`, but the step waits for the one that comes next."""
        self._thread.end()

    def _rest(self, secs: float) -> None:
        """Wait for that time, whatever rings, or until this is over."""
        until = system_now() + secs
        while (left := until - system_now()) > 0 and not self._thread.pause(left):
            pass

    def _serve(self) -> None:
        graph, pause = self._table.graph_alone(), _FIRST_PAUSE_SECS
        while not self._thread.is_ending:
            with self._reporting():
                # a session on a server that does not answer would block
                Heartbeat(self._server.master, self._beat_secs, self._server.ps).check()
                with v1.Session(self._server.master, graph=graph, config=self._config) as session:
                    self._session = session
                    self._take_part()
            self._rest(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)
        self._listener.join()  # the end of the session has ended its wait

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """An error within, unless this has ended, is the loss of the server."""
        try:
            yield
        except Exception as error:
            if not self._thread.is_ending:
                text = str(getattr(error, "message", error)).strip() or "no reason is known"
                problem = f"{type(error).__name__}: {text.splitlines()[0]}"
                self._set_state(SourceState.LOST, problem)
                if self.has_joined:
                    self._server.lose(f"{self._where} is lost: {problem}", self)

    def _set_state(self, state: SourceState, problem: str = "") -> None:
        reason = problem and f"{self._where}: {problem}"
        self._step.set_source_state(state, reason, source=self)

    def _take_part(self) -> None:
        self._server.note(run_in_graph(self._session, self._table.news.name))
        self.has_joined = True
        self._set_state(SourceState.LIVE)
        if self._number is None:
            self._poll()
            return
        self._listener.start()
        self._keep_row(self._number)
        self._free(self._number, self._owner)

    def _listen(self) -> None:
        """The one blocked wait of this process; the end of the session ends it."""
        with self._reporting():
            receive = self._session.make_callable(self._table.wait.name)
            while not self._thread.is_ending:
                self._server.note(receive())
                self.look_again()

    def _poll(self) -> None:
        while not self._thread.is_ending:
            if math.isinf(self._step.demand().next_step):
                self._thread.pause()
            else:
                self._server.note(run_in_graph(self._session, self._table.news.name))
                self._rest(_POLL_SECS)

    def _keep_row(self, index: int) -> None:
        """Keep this task's row of the table up to date, and ask for credits, until the end."""
        policy = CreditPolicy()
        armed, held, leased_until, look_for_dead_at = 0, 0, -math.inf, 0.0
        while not self._thread.is_ending:
            demand, moment = self._step.demand(), system_now()
            takes_row = moment > leased_until  # others may have freed it meanwhile
            while takes_row and demand.num_spare and not self._thread.is_ending:
                self._grant(-demand.num_spare, demand)
                demand = self._step.demand()
            self._forget_lost(demand, moment)
            threshold = NEVER if math.isinf(demand.next_step) else int(demand.next_step)
            move = policy.next_move(demand, moment)
            if move.give_back and self._grant(-move.give_back, demand):
                demand = demand._replace(num_spare=0)
            reserved = self._stride * (demand.num_out + demand.num_spare)
            is_inexact = move.is_idle and held != reserved
            is_stale = moment > leased_until - _LEASED_BEATS / 2 * self._beat_secs
            if is_stale or move.ask or threshold != armed or is_inexact:
                before = ANY if takes_row else self._owner
                held_and_wanted = reserved, threshold, move.ask, self._stride, demand.limit or 0
                reply = self._ask(index, before, self._owner, *held_and_wanted)
                granted = int(reply[0][2])
                if granted == REFUSED:
                    leased_until = -math.inf
                    continue
                armed, held = threshold, reserved + self._stride * granted
                leased_until = moment + _LEASED_BEATS * self._beat_secs
                self._step.lease(leased_until)
                self._server.note(reply[0])
                if granted:
                    self._grant(granted, demand)
                if move.ask:
                    policy.take_note(granted, demand, system_now())
                    if not granted and moment >= look_for_dead_at:
                        self._free_dead(index, reply[2:])
                        look_for_dead_at = system_now() + self._beat_secs / 2
            look_at = min(move.look_at, moment + self._beat_secs)
            self._thread.pause(0.0 if move.ask else max(0.0, look_at - system_now()))

    def _grant(self, runs: int, demand: Demand) -> bool:
        step, limit = self._step, demand.limit
        return step.grant(runs, epoch=demand.epoch, limit=limit, source=self)

    def _forget_lost(self, demand: Demand, moment: float) -> None:
        self._lost_since = min(self._lost_since, moment) if demand.num_lost else math.inf
        if moment >= self._lost_since + _LOST_BEATS * self._beat_secs:
            self._step.forget_lost(demand.epoch)

    def _free_dead(self, own: int, rows: Any) -> None:
        """Give the credits of tasks that have died to others, as this process is short of them.

        A process that is stopped, or cut off, may resume at any moment, and the runs that it has
        under way then exceed what others have been granted. So it keeps its credits for a while.
        One that was killed never resumes: its port refuses connections.
        """
        for index, (owner, held, _) in enumerate(rows.tolist()):
            if index == own or not owner or not held:
                continue
            name = self._server.names[index]
            problem = Heartbeat(self._server.targets[name], self._beat_secs).problem()
            if not problem:
                self._silent_since.pop(index, None)
                continue
            is_new = index not in self._silent_since
            since = self._silent_since.setdefault(index, system_now())
            is_for_long = system_now() > since + _SILENT_BEATS * self._beat_secs
            if not (is_for_long or "refused" in problem):
                if is_new:
                    text = "%s is silent, and keeps the %d steps that it has reserved in %s: %s"
                    logger.info(text, name, held, self._where, problem)
            elif self._free(index, owner):
                text = "%s has ended, or stays silent, and the %d steps that it had reserved in %s "
                text += "are given to others: %s"
                logger.warning(text, name, held, self._where, problem)

    def _free(self, index: int, owner: int) -> bool:
        """Free a task's row, unless it has another owner by now; its credits go to who asks."""
        return bool(self._ask(index, owner, 0, 0, NEVER, 0, 1, 0)[0][2] != REFUSED)

    def _ask(self, *request: int) -> Any:
        table = self._table
        return run_in_graph(self._session, table.exchange.name, {table.request.name: request})
