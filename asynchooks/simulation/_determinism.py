"""check_determinism: runs a program several times, and compares the events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import zip_longest
from typing import Any, get_args

from .._check import integer
from .._errors import DeterminismError
from ._simulation import Backend, Simulation
from .kernel._kernel import Event, Recording, Until

_SHOWN = 5
"""Events before the first difference that the error shows."""


def check_determinism(
    main: Callable[..., Awaitable[Any]],
    *args: Any,
    seed: int = 0,
    backends: Sequence[Backend] = get_args(Backend),
    runs: int = 2,
    until: Until | None = None,
    **options: Any,
) -> str:
    """Run `main(simulation, *args)` several times, and compare every event.

    Args:
        main: an async function of the simulation, which is new each time. State that it keeps
            elsewhere makes runs differ.
        seed: of all runs.
        backends: each is run; for programs that wait through asynchooks only, all agree. Leave
            "turbo" out for others.
        runs: how often on each backend, >= 1.
        until: as for `Simulation.run`.
        options: further ones of `Simulation`.

    Returns:
        The digest of the events. It is the same in every process, so you can compare it with a
        stored one.

    Raises:
        TypeError, ValueError: an argument does not fit.
        DeterminismError: two runs differ; it shows the first event that does.
        BaseException: what the program raises.
    """
    allowed = ", ".join(get_args(Backend))
    if isinstance(backends, str):
        raise TypeError(f"backends is {backends!r}; give a list, as in [{backends!r}]")
    if not backends:
        raise ValueError(f"backends is empty; give at least one of {allowed}")
    runs = integer("runs", runs, least=1)
    traces: list[tuple[str, Recording]] = []
    for backend in backends:
        for number in range(1, runs + 1):
            simulation = Simulation(seed, backend, keep_trace=True, **options)
            simulation.run(main, simulation, *args, until=until)
            traces.append((f'run {number} on "{backend}"', simulation.trace))
    (first, expected), *others = traces
    for name, trace in others:
        if trace.events != expected.events:
            raise DeterminismError(_difference(first, expected.events, name, trace.events))
    return expected.digest()


def _difference(first: str, expected: list[Event], name: str, events: list[Event]) -> str:
    pairs = enumerate(zip_longest(expected, events))
    place, (ours, theirs) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    before = "".join(f"\n    {each}" for each in expected[max(0, place - _SHOWN) : place])
    return (
        f"event {place} of {name} differs from that of {first}, with the same seed:"
        f"{before}\n  {first}: {ours or 'nothing more'}\n  {name}: {theirs or 'nothing more'}\n"
        "Look for clocks, hash order, random numbers that no stream gives, and waits of other "
        "libraries."
    )
