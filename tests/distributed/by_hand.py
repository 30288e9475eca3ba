"""One process of a host, whose messages a test carries by hand.

The host is private: only so can a test give the order in which messages come and are lost.
"""

from typing import Any

from asynchooks.distributed._membership import Line
from asynchooks.distributed._messages import Message


class ByHand:
    """What `Stream` and the plugin do for it, without a network."""

    def __init__(self, host: Any, name: str) -> None:
        self.host, self.name = host, name
        self.num_calls = self.num_woken = self.num_hung_up = 0
        self.connect()

    def connect(self) -> None:
        self.line = Line(self._wake, self._hang_up)
        self.member = self.host.join(self.name, self.line, 1e9, self.state())

    def end(self) -> None:
        """Its connection ends."""
        self.host.ended(self.member, self.line)

    def state(self) -> Message:
        """Without calls."""
        return Message()

    def packed(self, args: Any) -> Any:
        return args

    def send(self, *calls: tuple[Any, ...], **changes: Any) -> int:
        """Calls as (function, *arguments); returns the number of the last one."""
        numbered = []
        for function, *args in calls:
            self.num_calls += 1
            numbered.append((self.num_calls, function, self.packed(tuple(args))))
        message = self.state()._replace(calls=numbered, **changes)
        self.host.take(self.member, self.line, message)
        return self.num_calls

    def _wake(self) -> None:
        self.num_woken += 1

    def _hang_up(self) -> None:
        self.num_hung_up += 1
