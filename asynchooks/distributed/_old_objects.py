"""OldObjects: garbage collections that take no notice of what was there before training."""

from __future__ import annotations

import gc
import threading
from typing import ClassVar


class OldObjects:
    """Leaves out of garbage collections the objects from before training, while it goes on.

    A full collection looks at every object of the modules, 170 ms with TensorFlow, in which no task
    of the process runs. What is not part of a cycle is freed as ever.
    """

    # of the process, as garbage collection is
    _num_callers: ClassVar[int] = 0
    _is_ours: ClassVar[bool] = False
    _guard = threading.Lock()

    @classmethod
    def leave_out(cls) -> None:
        """From now on, unless the program has frozen objects itself; costs nothing."""
        with cls._guard:
            cls._num_callers += 1
            if cls._num_callers == 1 and gc.get_freeze_count() == 0:
                gc.freeze()
                cls._is_ours = True

    @classmethod
    def take_back(cls) -> None:
        """Once for each `leave_out`; after the last one, collections look at all objects again."""
        with cls._guard:
            cls._num_callers -= 1
            if cls._num_callers == 0 and cls._is_ours:
                gc.unfreeze()
                cls._is_ours = False
