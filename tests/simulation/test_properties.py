"""Random programs of tasks, run on every engine: all do the same, and lose nothing.

Slots are private: by them all waits suspend, and nothing public is woken at a chosen moment.
"""

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asynchooks._engine.base import EngineTask, Slot
from asynchooks.simulation import Simulation

from .engines import BACKENDS

NUM_SCRIPTS, NUM_SLOTS = 5, 3
_variable: ContextVar[int] = ContextVar("variable")
_SECS = st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0, 1.0, 2.0, 3.5, 1 / 3, 3.2e9, 1e12])

Op = tuple[Any, ...]


class Failed(Exception):  # noqa: N818 - a program's own
    """What a script raises."""


class Halted(BaseException):
    """What a script raises that is no Exception."""


def _op(name: str, *args: st.SearchStrategy[Any]) -> st.SearchStrategy[Op]:
    return st.tuples(st.just(name), *args)


def _simple() -> st.SearchStrategy[Op]:
    scripts, slots = st.integers(0, NUM_SCRIPTS - 1), st.integers(0, NUM_SLOTS - 1)
    return st.one_of(
        _op("sleep", _SECS),
        _op("sleep", _SECS),
        _op("quiescence"),
        _op("start", scripts),
        _op("cancel", scripts),
        _op("wait", scripts, st.none() | _SECS),
        _op("park", slots, st.one_of(st.none(), _SECS, _SECS)),
        _op("wake", slots),
        _op("set", st.integers(0, 2)),
        _op("fail", st.sampled_from([Failed, Failed, Halted])),
    )


def _nested(ops: st.SearchStrategy[Op]) -> st.SearchStrategy[Op]:
    bodies = st.lists(ops, min_size=1, max_size=4)
    return st.one_of(
        _op("shield", st.none() | _SECS, bodies),
        _op("finally", bodies, bodies),
        _op("swallow", bodies),
    )


OPS = st.recursive(_simple(), _nested, max_leaves=8)
PROGRAMS = st.lists(
    st.lists(OPS, min_size=1, max_size=6), min_size=NUM_SCRIPTS, max_size=NUM_SCRIPTS
)


@dataclass
class Run:
    """One run of a program: its log, and what became of its tasks and slots."""

    simulation: Simulation
    scripts: list[list[Op]]
    log: list[tuple[float, str]] = field(default_factory=list)
    begun: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    started: list[EngineTask] = field(default_factory=list)
    slots: dict[int, Slot] = field(default_factory=dict)
    num_wakes: int = 0
    num_woken: int = 0

    def note(self, what: str) -> None:
        now = self.simulation.now
        assert not self.log or now >= self.log[-1][0], "time went back"
        seen = f"{what}, where the variable is {_variable.get(None)}"
        self.log.append((now, seen))
        self.simulation.note(seen)

    async def main(self) -> None:
        await self._script("main", 0)
        await self.simulation.sleep(5.0)

    async def _script(self, name: str, number: int) -> None:
        self.begun[name] += 1
        self.note(f"{name} begins")
        try:
            await self._all(name, self.scripts[number])
        finally:
            self.ended[name] += 1
            self.note(f"{name} ends")

    async def _all(self, name: str, ops: list[Op]) -> None:
        for op in ops:
            await self._do(name, op)

    async def _do(self, name: str, op: Op) -> None:
        simulation, kernel = self.simulation, self.simulation.kernel
        match op:
            case "sleep", secs:
                begin = simulation.now
                await simulation.sleep(secs)
                assert simulation.now == begin + secs
            case ("quiescence",):
                await simulation.quiescence()
            case "start", number:
                if len(self.started) < 30:
                    child = f"{number}.{len(self.started)}"
                    task = simulation.start(self._script, child, number, name=child)
                    self.started.append(task)
            case "cancel", number:
                if self.started:
                    self.started[number % len(self.started)].cancel()
            case "wait", number, secs:
                if self.started:
                    task = self.started[number % len(self.started)]
                    until = {} if secs is None else {"until": simulation.now + secs}
                    self.note(f"{name} saw the end: {await task.wait(**until)}")
            case "park", number, secs:
                slot = self.slots[number] = Slot(kernel, f"slot {number}")
                until = {} if secs is None else {"until": kernel.now() + secs}
                value = await kernel.park(slot, **until)
                self.num_woken += isinstance(value, int)
                self.note(f"{name} got {value}")
            case "wake", number:
                woken = self.slots.pop(number, None)
                if woken is not None and not woken.is_woken:
                    self.num_wakes += 1
                    woken.wake(self.num_wakes)
            case "set", value:
                _variable.set(value)
            case "fail", error:
                raise error(name)
            case "shield", secs, ops:
                with kernel.shielded(100.0 if secs is None else secs) as scope:
                    await self._all(name, ops)
                self.note(f"{name} left the shield, cut short: {scope.cancelled_caught}")
            case "finally", ops, at_end:
                try:
                    await self._all(name, ops)
                finally:
                    await self._all(name, at_end)
            case "swallow", ops:
                try:
                    await self._all(name, ops)
                except BaseException as error:
                    self.note(f"{name} swallows {isinstance(error, Exception)}")
            case _:
                raise NotImplementedError(op)
        self.note(f"{name} did {op[0]}")


def run_on(
    backend: Any, scripts: list[list[Op]], shuffle_ties: bool, keep_trace: bool = True
) -> tuple[Run, Any]:
    simulation = Simulation(
        5, backend, shuffle_ties=shuffle_ties, max_turns=500, keep_trace=keep_trace
    )
    run = Run(simulation, scripts)
    try:
        return run, simulation.run(run.main)
    except BaseException as error:
        return run, type(error)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS, st.booleans())
def test_every_engine_does_the_same_and_loses_nothing(
    scripts: list[list[Op]], shuffle_ties: bool
) -> None:
    runs = [run_on(backend, scripts, shuffle_ties) for backend in BACKENDS]
    runs.append(run_on("turbo", scripts, shuffle_ties, keep_trace=False))  # by its faster way
    first, expected = runs[0]
    for run, outcome in runs:
        # time went back, or a sleep ended at another time
        assert outcome is not AssertionError
        assert outcome == expected
        assert run.log == first.log
        if run.simulation.recording is not None:
            assert run.simulation.trace.to_bytes() == first.simulation.trace.to_bytes()
        # every task ends once, whatever fails; no wake-up comes twice
        assert run.begun == run.ended
        assert set(run.begun.values()) <= {1}
        assert run.num_woken <= run.num_wakes
        assert all(getattr(task, "is_done", False) for task in run.started)
