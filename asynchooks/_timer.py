"""SecondOrStepTimer: when a hook is due, by steps or by seconds. It starts nothing by itself."""

from __future__ import annotations

from ._engine import now


class SecondOrStepTimer:
    """Tells whether a hook is due, at most once every so many seconds or steps.

    The hook that uses it makes it. Seconds are those of the engine (real or simulated) that the
    caller runs in, and the system's where there is none.

    Args:
        every_secs: seconds between two triggers, >= 0.
        every_steps: steps between two triggers, >= 0; exactly one of the two is given.

    Source: TensorFlow's `tf.compat.v1.train.SecondOrStepTimer`.

    Example:
        timer = SecondOrStepTimer(every_steps=100)
        if timer.should_trigger_for_step(step):
            seconds, steps = timer.update_last_triggered_step(step)
    """

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        if (every_secs is None) == (every_steps is None):
            raise ValueError(
                f"got every_secs={every_secs} and every_steps={every_steps}; give exactly one"
            )
        interval = every_steps if every_secs is None else every_secs
        assert interval is not None
        if not interval >= 0:
            raise ValueError(f"a timer's interval is {interval}; give a number >= 0")
        self._every_secs = every_secs
        self._every_steps = every_steps
        self.reset()

    def reset(self) -> None:
        """Forget the last trigger: the next query is True."""
        self._last_step: int | None = None
        self._last_time = 0.0

    def should_trigger_for_step(self, step: int) -> bool:
        """Whether the hook is due at this step.

        True until the first update; then never for the step of the last update, and else as soon
        as the interval has passed (`>=`, counted from the last update, not at multiples).
        """
        if self._last_step is None:
            return True
        if step == self._last_step:
            return False
        if self._every_steps is not None:
            return step >= self._last_step + self._every_steps
        assert self._every_secs is not None
        return now() >= self._last_time + self._every_secs

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Note a trigger; returns (seconds, steps) since the last one, (None, None) at first."""
        time = now()
        elapsed: tuple[float | None, int | None] = (None, None)
        if self._last_step is not None:
            elapsed = (time - self._last_time, step - self._last_step)
        self._last_step, self._last_time = step, time
        return elapsed

    def last_triggered_step(self) -> int | None:
        """The step of the last update, None before the first."""
        return self._last_step
