"""Owners of seats at a board: which task of the cluster each is, and whether it has ended."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping

import numpy as np

from ._cluster_spec import split_address
from ._end_of_process import TensorFlowThread

_TASK_BITS = 16
_PATIENCE_SECS = 2.0


class Owners:
    """Names the owners of seats, and finds out about silent ones.

    A process that is stopped, or cut off, may go on at any moment, and what it has under way then
    comes on top of what others have been given. One that was killed never does: its port refuses
    connections, or another process of its task has taken a seat.

    Args:
        name: this process's task, "job:index".
        addresses: name -> "host:port" of all tasks; empty where there is no cluster: then nobody is
            known.
    """

    def __init__(self, name: str, addresses: Mapping[str, str]) -> None:
        self._addresses = addresses
        self._names = sorted(addresses)
        self._asking: set[int] = set()
        self._refusing: set[int] = set()  # whose port refused the last connection
        self._own_task = self._names.index(name) + 1 if name in addresses else 0

    def new(self) -> int:
        """A number for this process, > 0, below 2**63; it tells others the task."""
        return (secrets.randbits(62 - _TASK_BITS) + 1) << _TASK_BITS | self._own_task

    def name(self, owner: int) -> str:
        """What to call it."""
        task = self._task(owner)
        return self._names[task - 1] if task else "a process"

    def predecessors(self, owner: int, owners: np.ndarray) -> list[int]:
        """The seats of earlier processes of the same task: they have ended, as this one listens."""
        task = self._task(owner)
        if not task:
            return []
        seats = enumerate(owners.tolist())
        return [seat for seat, each in seats if each != owner and self._task(each) == task]

    def may_go_on(self, owner: int, owners: np.ndarray) -> bool:
        """Whether it may be there still; False where that cannot be known.

        The first answer is a guess: each asks its port anew, in a thread, and the next one knows.

        Args:
            owners: of all seats now, int64.
        """
        task = self._task(owner)
        if not task or any(each != owner and self._task(each) == task for each in owners.tolist()):
            return False
        if owner not in self._asking:
            self._asking.add(owner)
            TensorFlowThread(lambda: self._ask(owner, task), "asynchooks-board-ask")
        return owner not in self._refusing

    def _ask(self, owner: int, task: int) -> None:
        host, port = split_address(self._addresses[self._names[task - 1]])
        try:
            socket.create_connection((host, port), _PATIENCE_SECS).close()
            self._refusing.discard(owner)
        except ConnectionRefusedError:
            self._refusing.add(owner)
        except (OSError, UnicodeError):  # nobody knows
            self._refusing.discard(owner)
        finally:
            self._asking.discard(owner)

    def _task(self, owner: int) -> int:
        """Its place among the names, from 1; 0 if it is unknown."""
        task = owner & ((1 << _TASK_BITS) - 1)
        return task if task <= len(self._names) else 0
