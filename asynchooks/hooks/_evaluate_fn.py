"""A user's `evaluate`: how it is called, and what it must return. Nothing here decides when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

from .._engine.current import current_engine
from .._engine.threads import is_async
from .._errors import is_input_end, out_of_range_types
from ..backends._creator import close_raw
from ..backends._raw_session import RawSession


class EvaluateFn:
    """Calls one `evaluate`. Its hook makes it.

    Args:
        fn: `fn(session, step)`, a coroutine function, or a plain one for a thread.
        name: what the hook's evaluations are called in errors.
    """

    def __init__(self, fn: Callable[[Any, int], Any], name: str) -> None:
        if not callable(fn):
            raise TypeError(
                f"evaluate is {fn!r}; give a function of the session and the step that returns a "
                "mapping of names to numbers"
            )
        self._fn = fn
        self.is_plain = not is_async(fn)
        self._who = f"evaluate of EvaluationHook {name!r}"

    async def call(
        self, raw: RawSession, step: int, *, is_alone: bool, is_held: bool
    ) -> dict[str, float]:
        """Evaluate once, and return the results as floats by name.

        Args:
            is_alone: whether a plain function must overlap no call of the step function.
            is_held: whether the session's end keeps the raw session open.

        Raises:
            StopTraining: training was asked to stop while it waited.
            RuntimeError: it read an input to its end, and let that out.
            TypeError: it returned something else.
            BaseException: what else it raised.
        """
        raw.enter_run(is_held=is_held)  # no worker that shares it closes it meanwhile
        try:
            results = await raw.call(self._fn, raw.exposed, step, is_alone=is_alone)
        except Exception as error:
            if isinstance(error, out_of_range_types()) or is_input_end(error):
                # left as it is, it would pass for the end of training
                raise RuntimeError(
                    f"{self._who} let {error!r} out: its input has ended; catch that where it "
                    "reads, and return the results"
                ) from error
            raise
        finally:
            if raw.leave():
                await close_raw(raw, current_engine(), raw.grace_secs)
        return self._as_numbers(results)

    def _as_numbers(self, results: object) -> dict[str, float]:
        if not isinstance(results, Mapping):
            raise TypeError(
                f"{self._who} returned {results!r}; expected a mapping of names to numbers, such "
                'as {"accuracy": 0.93}'
            )
        numbers = {}
        for key, value in results.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"{self._who} returned a result called {key!r}; expected a text, such as "
                    f"{str(key)!r}"
                )
            numbers[key] = self._as_number(key, value)
        return numbers

    def _as_number(self, key: str, value: object) -> float:
        error: Exception | None = None
        # NumPy's texts have __float__, too; its arrays of one element would only warn
        is_scalar = not isinstance(value, (str, bytes)) and getattr(value, "ndim", 0) == 0
        if is_scalar and isinstance(value, SupportsFloat):
            try:
                return float(value)
            except Exception as raised:  # a graph's variable has one that adds ops to the graph
                error = raised
        raise TypeError(
            f"{self._who} returned {key!r}: {value!r} of type {type(value).__name__}; expected one "
            "number (of an array its mean, of a graph's tensor what session.run gives for it)"
        ) from error
