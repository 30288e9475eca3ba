"""RankStopHook: a stop of one rank, or its error, ends training on all ranks, at one step.

It starts no process and restarts none: the launcher does.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

from ... import _check
from ..._engine.base import Slot
from ..._engine.current import current_engine
from ..._engine.stop import StopReason
from ..._engine.threads import run_blocking
from ..._errors import RankError, StopTraining
from ..._hook import SessionHooks, SessionRunContext, SessionRunHook
from ..._stopping.coordinator import Coordinator
from ...checkpoints._ranks import Ranks
from ._thread import GuardThread

_STORE_SECS = 2.0
"""How long the store, which may be in a rank that hangs, is asked which rank failed first."""


@_check.names_options
class RankStopHook(SessionRunHook):
    """Ends training on all ranks of a PyTorch process group at one step, whichever rank stops.

    Give it to the session of each rank, in any place of its list, and make it on all ranks at the
    same point of the program: it makes a Gloo process group of its own. Before a step, when every
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
    error, also where they wait in a collective: that rank closes the connections of all Gloo groups
    of its process. The end of a process does the same. Where a rank hangs, the others end by
    `timeout_secs`. The process groups are of no use after that: end the processes, and start them
    again. NCCL's collectives end as NCCL has them end.

    A cancellation ends the wait for other ranks at once. The ranks are out of turn then, so let it
    end the session: if another run follows, all end by `timeout_secs`. A `PreemptionHook` keeps its
    exit code, and its deadline: a stop that is held back for half of it is its concern.

    Args:
        every_n_steps: steps between two agreements, >= 1. With more than one, a rank whose data
            ends between two agreements ends all with a RankError, as it can make no further step.
        timeout_secs: seconds from one agreement to the next at most, > 0, with all steps,
            evaluations and saves between them, and from the last one to the end of the session.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, or out of its range.
        RuntimeError: when opening: no session calls the hook, or several workers share the model.
        RankError: out of the block: another rank has failed, is gone or hangs, or the ranks have
            come to different steps.

    Example:
        hooks = [RankStopHook(timeout_secs=300), PreemptionHook(), TimeLimitHook(3600)]
    """

    acts_outside = True
    uses_default_graph = False
    _shown = (("every_n_steps", "every_n_steps"), ("timeout_secs", "_timeout_secs"))

    def __init__(self, every_n_steps: int = 1, *, timeout_secs: float = 600.0) -> None:
        self.every_n_steps = _check.integer("every_n_steps", every_n_steps, least=1)
        self._timeout_secs = _check.seconds("timeout_secs", timeout_secs)
        self._ranks = Ranks()
        self._watch: GuardThread | None = None  # while a session with other ranks is open

    async def begin(self) -> None:
        self._shared = SessionHooks.of(self)

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        if self._ranks.size == 1 or self._watch:
            return
        self._step, stop = session.global_step, self._shared.stop
        if stop is None or not self._step.gate.is_alone(stop.worker):
            raise RuntimeError(
                "RankStopHook got no session, or one of several that share a model in this "
                "process; expected one MonitoredSession in each rank. Train with one worker, or "
                "leave the hook out"
            )
        self._stop, self._engine = stop, current_engine()
        self._due_at = self._engine.now() + self._timeout_secs
        self._watch = GuardThread(self._look, self._timeout_secs, "asynchooks-ranks")
        self._shared.watch_runs(_BeforeStep(self))
        stop.held = []

    async def before_end(self, session: Any) -> None:
        if self._watch and self._stop.held is not None:
            reason = self._stop.reason or StopReason("the block", "it has ended")
            self._stop.held.append((reason, None))
            await self.agree()

    async def agree(self) -> bool:
        """Whether some rank wants to stop at this step: then this one stops, too."""
        import torch
        import torch.distributed as dist

        ranks, step, held = self._ranks, self._step.value, self._stop.held
        if held is None:  # the watch has ended all, and the call below fails
            held = []
        slot = Slot(self._engine, "the agreement of the ranks")
        num_stops = torch.tensor(len(held))
        work = dist.all_reduce(num_stops, group=ranks.group, async_op=True)
        work.get_future().add_done_callback(slot.wake)
        (await self._engine.park(slot)).value()  # raises where it has failed
        self._due_at = self._engine.now() + self._timeout_secs
        if not num_stops:
            return False
        why, has_error = str(held[0][0]) if held else "", any(error for _, error in held)
        gather = partial(ranks.gathered, (step, why, has_error))
        said = await run_blocking(self._engine, gather, 0.0, "asynchooks-ranks")
        if any(each[0] != step for each in said):
            raise RankError(
                f"the ranks stop at different steps: {said}, each with its reason, where it has "
                "one; give all ranks as many batches, or RankStopHook(every_n_steps=1)"
            )
        # an error of one is one on all: on_error of hooks is called on each, and may save together
        rank = max(range(ranks.size), key=lambda each: (said[each][2], said[each][1] != ""))
        _, why, its_error = said[rank]
        if not held or (its_error and not has_error):
            reason, error = StopReason(f"rank {rank}", why), None
            if its_error:
                error = RankError(f"all ranks have stopped at step {step}, by {reason}")
            held.append((reason, error))
        self._release()
        return True

    def _release(self) -> None:
        """Hold no stop back any longer."""
        held, self._stop.held = self._stop.held or [], None
        for reason, error in held:
            self._stop.request(error, reason)

    def _look(self) -> float | None:
        """In the thread of the watch: end all if the time is over; else how long that is."""
        left = self._due_at - self._engine.now()
        if left > 0:
            return left
        secs = self._timeout_secs
        self._end(f"no agreement for {secs:g} s: a rank hangs, or timeout_secs is too short")
        return None

    def _end(self, why: str) -> None:
        """End all ranks, and this one with a RankError; from any thread."""
        error = RankError(
            f"training has ended on all ranks, here at step {self._step.last_known}: {why}. See "
            "their logs, and start all ranks again: they go on from the newest checkpoint"
        )
        self._release()
        self._stop.reason = reason = StopReason("RankStopHook", why, error)
        self._stop.request(error, reason)
        self._close_connections()

    def _close_connections(self) -> None:
        """Have each collective of any rank that this one takes part in fail, now and later."""
        import torch
        import torch.distributed as dist

        for group in dist.distributed_c10d._world.pg_map:
            for rank in dist.get_process_group_ranks(group):
                # gloo closes all connections of a group when one call, on one that is open, has
                # taken too long: so the calls that wait on others end, too
                with suppress(Exception):
                    call = dist.irecv(torch.zeros(1), rank, group)
                    call.wait(timedelta(milliseconds=1))

    async def on_error(self, session: Any, exception: BaseException) -> None:
        if not self._watch or self._stop.error:
            return
        from torch.distributed.distributed_c10d import _get_default_store

        self._release()
        first = text = f"rank {self._ranks.rank}: {exception!r}"
        if "gloo/transport" in text:
            first = "a rank is gone"
        with suppress(Exception):  # it was in a process that is gone
            say = partial(_get_default_store().compare_set, "asynchooks", "", first)
            until = self._engine.now() + _STORE_SECS
            said = await run_blocking(self._engine, say, 0.0, "asynchooks-ranks", until=until)
            first = said.decode()
        if first == text:
            self._close_connections()
        else:
            self._end(first)

    async def after_close(self, exception: BaseException | None) -> None:
        if self._watch:
            self._watch.let_go()
            self._watch = None


class _BeforeStep(SessionRunHook):
    """Stands behind all other hooks, which may end training before the step, too."""

    acts_outside = True
    uses_default_graph = False

    def __init__(self, hook: RankStopHook) -> None:
        self._hook, self._runs = hook, count()  # all ranks make the same

    async def before_run(self, run_context: SessionRunContext) -> None:
        if next(self._runs) % self._hook.every_n_steps == 0 and await self._hook.agree():
            raise StopTraining("no run begins after a stop that the ranks have agreed on")
