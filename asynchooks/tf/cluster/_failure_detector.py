"""Which of the processes that train on a server are alive: by their heartbeats and their ports."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .._threads import TensorFlowThread
from ._spec import split_address

_HEARTBEATS_MISSED = 4
"""After so many heartbeats of this process without one of another process, that one is silent."""
_HEARTBEATS_WAITED = 24
"""After so many, its credits are given to others, even if it might still resume."""
HEARTBEATS_LEASED = _HEARTBEATS_MISSED - 0.5
"""For so many heartbeats after one, granted credits may be used: a process that was stopped must
not run, when it resumes, what others have been granted meanwhile."""

_TASK_BITS = 16
_CONNECT_SECS = 2.0


class SilentProcess(NamedTuple):
    """A process without a heartbeat for a while: its slot, as last seen."""

    slot: int
    process_id: int
    held: int  # steps
    heartbeats: int
    is_new: bool  # since this heartbeat
    is_for_long: bool


class FailureDetector:
    """Finds silent processes by counting heartbeats of this process.

    Not by a clock: after a server was stopped for a while, all processes are late alike.
    """

    def __init__(self, every_secs: float) -> None:
        self.every_secs = every_secs
        self._seen: dict[int, tuple[int, int, int]] = {}  # slot: process id, heartbeats, own since
        self._lost = 0, 0  # runs of an earlier epoch: how many, for how many heartbeats

    def have_lasted(self, num_lost: int) -> bool:
        """Whether the same number of lost runs has been there for longer than a run may take."""
        num, count = self._lost
        self._lost = num_lost, count + 1 if num_lost and num_lost == num else 0
        return self._lost[1] >= _HEARTBEATS_MISSED

    def silent(self, rows: np.ndarray, own_slot: int) -> list[SilentProcess]:
        """The processes that are silent now, by all rows; call it once for each own heartbeat."""
        found = []
        before, self._seen = self._seen, {}
        for slot in np.flatnonzero(rows[:, 0]).tolist():
            process_id, held, count, every = rows[slot].tolist()
            if slot == own_slot:
                continue
            old = before.get(slot)
            missed = old[2] + 1 if old is not None and old[:2] == (process_id, count) else 0
            self._seen[slot] = process_id, count, missed
            own = max(1.0, every / 1e6 / self.every_secs)  # heartbeats in one of that process
            if missed >= _HEARTBEATS_MISSED * own:
                is_new = missed - 1 < _HEARTBEATS_MISSED * own
                is_for_long = missed >= _HEARTBEATS_WAITED * own
                found.append(SilentProcess(slot, process_id, held, count, is_new, is_for_long))
        return found


class ProcessIds:
    """Makes process ids that contain the task, and checks whether silent processes may resume.

    A process that is stopped, or cut off, may resume at any moment, and the runs that it has under
    way then exceed what others have been granted. One that was killed never does: its port refuses
    connections, or another process of its task has taken a slot. Where there is no cluster, there
    are no addresses, and no process is known.
    """

    def __init__(self, name: str, addresses: Mapping[str, str]) -> None:
        self._addresses = addresses
        self._names = ["", *sorted(addresses)]
        self._own = self._names.index(name)
        self._probing: set[int] = set()
        self._refuses: dict[int, bool] = {}  # whether a process's port refused the last connection

    def new(self) -> int:
        """A new id for this process, > 0 and below 2**63, with its task in the low bits."""
        return (secrets.randbits(62 - _TASK_BITS) + 1) << _TASK_BITS | self._own

    def name(self, process_id: int) -> str:
        """The name of its task, for messages."""
        return self._task(process_id) or "a process"

    def others_of_task(self, process_id: int, in_slots: np.ndarray) -> list[int]:
        """The slots of other processes of its task. Only one can listen: one of them is alive."""
        task = self._task(process_id)
        return [
            slot
            for slot, each in enumerate(in_slots.tolist())
            if task and each != process_id and self._task(each) == task
        ]

    def may_resume(self, process_id: int, in_slots: np.ndarray) -> bool:
        """Whether the process may still exist; False where that cannot be known.

        Each call probes its port again, in a thread, and the next call has the result.
        """
        task = self._task(process_id)
        if not task or self.others_of_task(process_id, in_slots):
            return False
        if process_id not in self._probing:
            self._probing.add(process_id)
            TensorFlowThread(lambda: self._probe(process_id, task), "asynchooks-membership-probe")
        return not self._refuses.get(process_id, False)

    def _probe(self, process_id: int, task: str) -> None:
        try:
            socket.create_connection(split_address(self._addresses[task]), _CONNECT_SECS).close()
            self._refuses[process_id] = False
        except (OSError, UnicodeError) as error:  # of all but a refusal nothing is known
            self._refuses[process_id] = isinstance(error, ConnectionRefusedError)
        finally:
            self._probing.discard(process_id)

    def _task(self, process_id: int) -> str:
        """The name of its task; "" if it is unknown."""
        place = process_id & ((1 << _TASK_BITS) - 1)
        return self._names[place] if place < len(self._names) else ""
