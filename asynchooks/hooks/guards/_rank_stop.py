"""RankStopHook: a stop of one rank, or its error, ends training on all ranks, at one step.

It starts no process and restarts none: the launcher does.
"""

from __future__ import annotations

import math
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

from ... import _check
from ..._engine.base import Slot
from ..._engine.current import current_engine
from ..._engine.stop import StopReason
from ..._engine.threads import run_blocking
from ..._errors import RankError, StopTraining
from ..._hook import SessionHooks, SessionRunContext, SessionRunHook
from ..._stopping.coordinator import Coordinator
from ..._stopping.session_stop import SessionStop
from ...backends._raw_session import RawSession, raw_session_of
from ...checkpoints._ranks import Ranks
from ._thread import GuardThread

_STORE_SECS = 2.0
"""How long the store, which may be in a rank that hangs, is asked which rank failed first."""


@_check.names_options
class RankStopHook(SessionRunHook):
    """Ends training on all ranks of a PyTorch process group at one step, whichever rank stops.

    Give it to the session of each rank, in any place of its list, and make it on all ranks at the
    same point of the program: it makes a gloo process group of its own. Before a step, when every
    hook's `before_run` has returned, the ranks agree by one small all-reduce whether they go on;
    the event loop goes on meanwhile. With one rank, or without a process group, it does nothing.

    A stop that one rank asks for (a signal, a time limit, a hook's or `session.request_stop`) is
    held back until the ranks agree: `should_stop()` stays False, no wait ends, and the rank makes
    the same steps as the others. Then all stop, before the same step. The other ranks' reason names
    the rank and its reason: "rank 2: PreemptionHook: the process got SIGTERM". An error that comes
    with the stop, such as that of a side task or of a `NanTensorHook`, leaves its own rank, and a
    RankError the others; `end` of all hooks runs before that on each, as after any stop. A rank
    whose data ends, or whose block is left, is a stop of all as well.

    An error that leaves a session ends the others at once with a RankError that names rank and
    error, also where they wait in a collective: that rank closes the connections of all gloo groups
    of its process. The end of a process does the same. Where a rank hangs, the others end by
    `timeout_secs`. The process groups are of no use after that: end the processes, and start them
    again. A `PreemptionHook` keeps its deadline meanwhile, and its exit code.

    Args:
        every_n_steps: steps between two agreements, >= 1. With more than one, a rank whose data
            ends between two agreements ends all with a RankError, as it can make no further step.
        timeout_secs: seconds from one agreement to the next at most, > 0, with all steps,
            evaluations and saves between them, and from the last one to the end of the session.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, or out of its range.
        ImportError: when it is made: PyTorch is not installed.
        RuntimeError: when opening: no session calls the hook, or several workers share the model.
        RankError: out of the block: another rank has failed, is gone or hangs, or the ranks have
            come to different steps.

    Example:
        hooks = [RankStopHook(timeout_secs=300), PreemptionHook(), TimeLimitHook(3600)]
    """

    acts_outside = True
    uses_default_graph = False
    _shown = (("every_n_steps", "_every"), ("timeout_secs", "_timeout_secs"))
    _stop: SessionStop  # from begin on, where there are other ranks
    _raw: RawSession

    def __init__(self, every_n_steps: int = 1, *, timeout_secs: float = 600.0) -> None:
        self._every = _check.integer("every_n_steps", every_n_steps, least=1)
        self._timeout_secs = _check.seconds("timeout_secs", timeout_secs)
        self._ranks = Ranks()
        self._watch: GuardThread | None = None  # while a session with other ranks is open

    async def begin(self) -> None:
        shared = SessionHooks.of(self)
        if self._ranks.size == 1:
            return
        if shared.stop is None:
            raise RuntimeError(
                "RankStopHook has no session that it could stop: give it to a MonitoredSession, "
                "rather than call its begin()"
            )
        self._stop, self._held = shared.stop, None
        self._agreed_at = -math.inf  # the step of the last agreement
        shared.watch_runs(_BeforeStep(self))

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        if self._ranks.size == 1:
            return
        worker = self._stop.worker
        if worker is None or not session.global_step.gate.is_alone(worker):
            raise RuntimeError(
                "RankStopHook got a model that several workers of this process share, which make "
                "steps of their own; expected one session in each rank. Train with one, or without "
                "the hook"
            )
        self._raw, self._engine = raw_session_of(session), current_engine()
        self._due_at = self._engine.now() + self._timeout_secs
        self._stop.hold = self._hold
        if self._watch is None:
            self._watch = GuardThread(self._look, self._timeout_secs, "asynchooks-ranks")

    def _hold(self, reason: StopReason, error: BaseException | None) -> None:
        """For the session's stop: keep it until the ranks agree; in any thread."""
        self._held = self._held or (reason, error)

    async def before_step(self, step: int) -> None:
        """Stop here if any rank wants to; StopTraining says so."""
        if step - self._agreed_at >= self._every and await self._agree(step, self._held):
            raise StopTraining(f"no run begins after a stop, by {self._stop.reason}")

    async def before_end(self, session: Any) -> None:
        if self._watch is not None and self._stop.hold is not None:
            reason = self._stop.reason or StopReason("the block", "it has ended")
            await self._agree(self._raw.global_step.value, self._held or (reason, None))

    async def _agree(self, step: int, own: tuple[StopReason, BaseException | None] | None) -> bool:
        """Whether some rank wants to stop before the step after this one: then this one stops."""
        import torch
        import torch.distributed as dist

        slot = Slot(self._engine, "the agreement of the ranks")
        said = torch.tensor([own is not None, step, -step])
        group, largest = self._ranks.group, dist.ReduceOp.MAX
        work = dist.all_reduce(said, largest, group, async_op=True)
        work.get_future().add_done_callback(slot.wake)
        (await self._engine.park(slot)).value()  # raises where it has failed
        self._agreed_at, self._due_at = step, self._engine.now() + self._timeout_secs
        does_stop, last, first = said.tolist()
        if not does_stop and last == -first:
            return False
        mine = None if own is None else (str(own[0]), own[1] is not None)
        gather = partial(self._ranks.gathered, (step, mine))
        said_by = await run_blocking(self._engine, gather, 0.0, "asynchooks-ranks")
        others = [(f"rank {rank}", *its) for rank, (_, its) in enumerate(said_by) if its]
        if last != -first:
            raise RankError(
                f"the ranks agree at different steps, {[each for each, _ in said_by]}, and end "
                f"there, by {others}; give all ranks as many batches, or every_n_steps=1"
            )
        if own is None:
            who, why, has_error = others[0]
            error = RankError(f"{who} has stopped all ranks at step {step}: {why}")
            own = StopReason(who, why), error if has_error else None
        self._stop.hold = None
        self._stop.request(own[1], own[0])
        return True

    def _look(self) -> float | None:
        """In the thread of the watch: end all if the time is over; else how long that is."""
        left = self._due_at - self._engine.now()
        if left > 0:
            return left
        secs = f"{self._timeout_secs:g} s, as one hangs, or timeout_secs is too short"
        self._fail(f"the ranks have not agreed for {secs}", is_own=False)
        return None

    def _fail(self, what: str, *, is_own: bool) -> None:
        """End all ranks, also those that wait in a collective; blocks, in any thread.

        This one with a RankError, unless the failure is its own.
        """
        import torch
        import torch.distributed as dist

        self._stop.hold = None
        ranks, step, said = self._ranks, self._raw.global_step.last_known, []
        gone = [each for each in range(ranks.size) if each != ranks.rank and self._is_gone(each)]
        text = f"rank {ranks.rank}: {what}"
        if gone:
            text = f"rank {', '.join(map(str, gone))} is gone"

        def say() -> None:
            store, key = dist.distributed_c10d._get_default_store(), ranks.group.group_name
            with suppress(Exception):  # it was in a process that is gone
                said.append(store.compare_set(f"asynchooks/{key}", "", text).decode())

        asking = Thread(target=say, daemon=True)
        asking.start()
        asking.join(_STORE_SECS)
        first = next(iter(said), text)
        if not is_own or first != text or gone:
            error = RankError(
                f"training has ended on all ranks, here at step {step}: {first}. See the log of "
                "that rank, and start all ranks again: they go on from the newest checkpoint"
            )
            self._stop.reason = reason = StopReason("RankStopHook", first, error)
            self._stop.request(error, reason)
        for group in list(dist.distributed_c10d._world.pg_map):
            for each in dist.get_process_group_ranks(group):
                # gloo closes all connections of a group when one call, on one that is open, has
                # taken too long: so the calls that wait on others end, too
                with suppress(Exception):
                    call = dist.irecv(torch.zeros(1), each, group, tag=1)
                    call.wait(timedelta(milliseconds=1))

    def _is_gone(self, rank: int) -> bool:
        """Whether the connection to it is closed; what is sent to others is never received."""
        import torch
        import torch.distributed as dist

        try:
            dist.isend(torch.zeros(1), rank, self._ranks.group, tag=2)
        except RuntimeError:
            return True
        return False

    async def on_error(self, session: Any, exception: BaseException) -> None:
        if self._watch is not None and exception is not self._stop.error:
            fail = partial(self._fail, repr(exception), is_own=True)
            await run_blocking(self._engine, fail, _STORE_SECS, "asynchooks-ranks")

    async def after_close(self, exception: BaseException | None) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def on_drop(self) -> None:
        if self._watch is not None:
            self._watch.let_go()


class _BeforeStep(SessionRunHook):
    """Stands behind all other hooks, which may end training before the step, too."""

    acts_outside = True
    uses_default_graph = False

    def __init__(self, hook: RankStopHook) -> None:
        self._hook = hook

    async def before_run(self, run_context: SessionRunContext) -> None:
        await self._hook.before_step(run_context.global_step.value)
