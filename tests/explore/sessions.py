"""Promises of sessions, steps, stops, hooks and side tasks, as programs that check themselves."""

import math
import re
from functools import partial
from typing import Any

import numpy as np

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    EarlyStoppingHook,
    FeedHook,
    FunctionSessionCreator,
    GlobalStep,
    GlobalStepWaiterHook,
    HistoryHook,
    MonitoredSession,
    NanTensorHook,
    OnFailure,
    PreemptionError,
    Restart,
    Retention,
    SessionRunArgs,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StepUnreachableError,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.data import prefetch
from asynchooks.protocols import ParameterServer, ProtocolHook, StaleSynchronous
from asynchooks.simulation import Simulation

from ..support.moments import at
from .training import (
    MOMENTS,
    NUM_STEPS,
    NUM_WORKERS,
    Boom,
    Machines,
    Model,
    Program,
    Waiting,
    directory_of,
    run_if_open,
    train,
    train_together,
    until_stop,
    workers,
)

# Steps


def exact_stop(num_workers: int, stride: int = 1) -> Program:
    """At the step, not before and not beyond it, also where each run makes several."""

    async def main(simulation: Simulation) -> None:
        model, last_step = Model(simulation), NUM_STEPS * stride

        async def step() -> dict[str, Any]:
            await model.step()
            return {"global_step": model.steps * stride}

        creator = SharedSessionCreator(model.step if stride == 1 else step, num_workers)
        hooks: list[Any] = [[]] * num_workers
        ends = await train_together(simulation, creator, *hooks, last_step=last_step)
        assert set(ends.values()) <= {last_step}, ends
        assert model.steps == NUM_STEPS or not ends, model.steps

    return main


async def waits_end(simulation: Simulation) -> None:
    """At their step, or at the stop, also if they begin after that; none takes further time."""
    model, sessions, begun, ended = Model(simulation), [], [], []
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)

    async def wait(session: Any, step: int, secs: float = 0.0) -> None:
        begun.append(step)
        try:
            await simulation.sleep(secs)
            reached = await session.global_step.wait_for(step)
            assert simulation.now == max(secs, model.made_at[step])
            assert step <= reached <= model.steps
        finally:
            ended.append(step)

    async def worker(i: int) -> None:
        hooks = [GlobalStepWaiterHook(i), StopAtStepHook(last_step=NUM_STEPS)]

        def body(session: Any) -> None:
            sessions.append(session)
            session.start_soon(wait, session, 2)
            session.start_soon(wait, session, NUM_STEPS + 1)
            session.start_soon(wait, session, NUM_STEPS + 1, 4.0)

        try:
            await train(creator, hooks, body if i == 0 else None)
        except StepUnreachableError:
            assert model.steps < NUM_STEPS  # whoever was to make it is cancelled

    await workers(simulation, worker)
    for each in sessions:
        assert each.global_step.statistics().tasks_waiting_for_step == 0
    assert sorted(begun) == sorted(ended), (begun, ended)
    assert simulation.now <= 4.0, simulation.now


async def waits_that_are_left_leave_nothing(simulation: Simulation) -> None:
    """A wait is cancelled just as its step comes, another one at that time, and others end late.

    A worker whose run waits for a step, and is cancelled, goes on as one that trains.
    """
    model, is_cut = Model(simulation), False
    creator = SharedSessionCreator(model.step, num_workers=3)

    class WaitsOnce(SessionRunHook):
        num_runs = 0

        async def before_run(self, run_context: Any) -> None:
            self.num_runs += 1
            if self.num_runs == 1:
                await wait(run_context.global_step, 99)

    async def wait(step: GlobalStep, number: int) -> None:
        try:
            await step.wait_for(number)
        except StepUnreachableError:
            assert is_cut, "a worker is there that could make it"

    async def late(wait: Any, *args: Any) -> None:
        try:
            await wait(*args, timeout=0.25)
        except TimeoutError:
            assert simulation.now == 0.75, simulation.now
        except StopTraining:
            pass

    async def hold(step: GlobalStep, *, timeout: float) -> None:
        async with step.exclusive(timeout=timeout):
            pass

    async def leaves() -> None:
        hooks = [WaitsOnce(), StopAtStepHook(last_step=NUM_STEPS)]
        async with MonitoredSession(hooks, creator) as session:
            step = session.global_step
            tasks = [
                simulation.start(until_stop, wait, step, 1, name="first"),
                simulation.start(until_stop, wait, step, 99, name="never"),
                simulation.start(run_if_open, session, name="run"),
            ]
            try:
                await simulation.sleep(0.5)
                tasks[2].cancel()
                await tasks[2].wait()
                tasks.append(simulation.start(late, step.wait_for, 99, name="late"))
                tasks.append(simulation.start(late, partial(hold, step), name="hold"))
                await simulation.sleep(0.5)
            finally:
                for each in tasks:
                    each.cancel()
            for each in tasks:
                await each.wait()
            seen = step.statistics()
            assert seen.tasks_waiting_for_step <= 1, seen  # the worker that waits for step 1
            assert not seen.is_exclusive, seen
            while not session.should_stop():
                await session.run([])

    async def trains(i: int) -> None:
        async with MonitoredSession([StopAtStepHook(last_step=NUM_STEPS)], creator) as session:
            if i == 1:
                await simulation.sleep(0.25)
                await session.run([])
            while i == 2 and not session.should_stop():
                await session.run([])

    async def worker(i: int) -> None:
        nonlocal is_cut
        try:
            await (leaves() if i == 0 else trains(i))
        except BaseException:
            is_cut = True
            raise

    await workers(simulation, worker)


async def a_relay_goes_on(simulation: Simulation) -> None:
    """Each worker waits for the step of the one before it, makes the next one, and leaves."""
    model = Model(simulation)
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)
    is_cancelled = False

    async def worker(i: int) -> None:
        nonlocal is_cancelled
        try:
            async with MonitoredSession([GlobalStepWaiterHook(i)], creator) as session:
                await session.run([])
        except StepUnreachableError:
            assert is_cancelled, "whoever was to make the step is there"
        except BaseException:
            is_cancelled = True
            raise

    whole = await workers(simulation, worker)
    assert model.steps == NUM_WORKERS or len(whole) < NUM_WORKERS, model.steps


async def waits_in_vain_end(simulation: Simulation) -> None:
    """One that trains leaves at step 2; then nobody trains to the step that the others wait for."""
    model, ends = Model(simulation), {}
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)

    async def worker(i: int) -> None:
        try:
            async with MonitoredSession([GlobalStepWaiterHook(9 * i)], creator) as session:
                for _ in range(2):
                    await session.run([])
        except StepUnreachableError:
            ends[i] = simulation.now

    whole = await workers(simulation, worker)
    assert ends == dict.fromkeys(whole - {0}, model.made_at.get(2, max(ends.values(), default=0)))


def no_step_runs_beside_the_exclusive_side(has_limit: bool) -> Program:
    """Two tasks hold it, each twice, for half a step, in turn with the runs of two workers."""

    async def main(simulation: Simulation) -> None:
        model = Model(simulation)
        creator = SharedSessionCreator(model.step, num_workers=2)

        async def hold(session: Any) -> None:
            for _ in range(2):
                asked = simulation.now
                async with session.global_step.exclusive():
                    assert simulation.now - asked <= 2.5, "a run overtakes a task that waits"
                    with model.held():
                        await simulation.sleep(0.5)
                await session.or_stop(simulation.sleep, 0.5)

        async def worker(i: int) -> None:
            await simulation.sleep(0.5 * i)
            hooks = [StopAtStepHook(last_step=6)] if has_limit else []
            async with MonitoredSession(hooks, creator) as session:
                session.start_soon(hold, session)
                num_runs = 0
                while not session.should_stop() and (has_limit or num_runs < 3):
                    num_runs += 1
                    await session.run([])

        whole = await workers(simulation, worker, 2)
        assert model.steps == 6 or len(whole) < 2, model.steps

    return main


async def a_turn_comes_as_the_step_ends(simulation: Simulation) -> None:
    """Not when its run does, which goes on in hooks."""
    model, entered = Model(simulation), []

    async def hold(session: Any) -> None:
        await simulation.sleep(0.5)
        async with session.global_step.exclusive():
            entered.append(simulation.now)
            with model.held():
                await simulation.sleep(0.5)

    async def worker(i: int) -> None:
        def body(session: Any) -> None:
            session.start_soon(hold, session)

        slow = at(after_run=lambda *_: simulation.sleep(2.0))
        hooks = [slow, StopAtStepHook(last_step=1)]
        await train(FunctionSessionCreator(model.step), hooks, body)

    whole = await workers(simulation, worker, 1)
    assert entered == [1.0] or not whole, entered


async def evaluations_are_alone(simulation: Simulation) -> None:
    """Each worker looks at the model after each of its runs, for half a step."""
    model = Model(simulation)

    async def evaluate() -> None:
        with model.held():
            await simulation.sleep(0.5)

    evaluates = at(after_run=lambda context, _: context.finish_with(evaluate, exclusive=True))
    creator = SharedSessionCreator(model.step, num_workers=2)
    whole = await train_together(simulation, creator, [evaluates], [evaluates])
    assert model.steps == NUM_STEPS or not whole, model.steps


class Recorded(SessionRunHook):
    """Notes the step of each run, and the count of steps that the model had made then.

    It waits first, while other workers make further steps.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.sleep = simulation.sleep
        self.rows: list[tuple[int, int]] = []

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        return SessionRunArgs("steps")

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        await self.sleep(1.0)
        self.rows.append((run_context.step, run_values.results))


async def values_carry_their_step(simulation: Simulation) -> None:
    model, hooks = Model(simulation), [Recorded(simulation) for _ in range(NUM_WORKERS)]
    histories = [HistoryHook("steps", every_n_steps=1) for _ in range(NUM_WORKERS)]
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)
    whole = await train_together(simulation, creator, *zip(hooks, histories, strict=True))
    rows = sorted(row for each in hooks for row in each.rows)
    assert all(step == steps for step, steps in rows), rows
    if len(whole) == NUM_WORKERS:
        assert [step for step, _ in rows] == list(range(1, NUM_STEPS + 1)), rows
    for row in (row for each in histories for row in each.rows if "steps" in row):
        assert row["step"] == row["steps"], row


# Stops


async def one_stops_all(simulation: Simulation) -> None:
    """Also the one that opens just then."""
    model = Model(simulation)
    stopped: list[int] = []
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)

    async def worker(i: int) -> None:
        if i == 2:
            await simulation.sleep(2.0)
        async with MonitoredSession([StopAtStepHook(last_step=9)], creator) as session:
            while not session.should_stop():
                await session.run([])
                if session.global_step.value >= 4 and not stopped:
                    session.request_stop(all_workers=True)
                    stopped.append(model.steps)
        assert session.should_stop()

    whole = await workers(simulation, worker)
    if stopped and len(whole) == NUM_WORKERS:
        assert model.steps < stopped[0] + NUM_WORKERS, (model.steps, stopped)


class StopsAll(SessionRunHook):
    """Stops all workers in a run; its own side tasks go on until `end` of all hooks."""

    def __init__(self, run: int = 2) -> None:
        self.run, self.num_runs = run, 0
        self.coords: list[Any] = []

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self.coords.append(coord)

    async def end(self, session: Any) -> None:
        assert len(self.coords) > 1 or not self.coords[0].should_stop()

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.num_runs += 1
        if self.num_runs == self.run:
            run_context.request_stop("it is enough", all_workers=True)


def a_stop_of_all_reaches_late_sessions(by_hook: bool) -> Program:
    """They open while the one that asked for it is still open, and make no step."""

    async def main(simulation: Simulation) -> None:
        model, phases, waits = Model(simulation), [""], []
        creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS)

        async def asks() -> None:
            ends_late = at(end=lambda _: simulation.sleep(2.0))
            hooks = [*([StopsAll()] if by_hook else []), ends_late]
            try:
                async with MonitoredSession(hooks, creator) as session:
                    for _ in range(2):
                        await session.run([])
                    if not by_hook:
                        session.request_stop("it is enough", all_workers=True)
                    phases[0] = "stopped"
                    assert session.should_stop()
            finally:
                phases[0] = "closed"

        async def wait(session: Any) -> None:
            try:
                await session.global_step.wait_for(99)
            finally:
                waits.append(simulation.now)

        async def opens_late(secs: float) -> None:
            await simulation.sleep(secs)
            async with MonitoredSession([StopAtStepHook(last_step=9)], creator) as session:
                if phases[0] == "stopped":
                    assert session.should_stop()
                    assert "it is enough" in str(session.stop_reason), session.stop_reason
                session.start_soon(wait, session)
                while not session.should_stop():
                    await session.run([])

        async def worker(i: int) -> None:
            if i == 0:
                await asks()
            else:
                await opens_late(1.0 + i)

        whole = await workers(simulation, worker)
        if 0 in whole:
            assert model.steps <= 3, model.steps  # one that opened just before may make one step
            assert all(secs <= 3.0 for secs in waits), waits

    return main


class Asking(SessionRunHook):
    """Starts side tasks of the coordinator that wait for ever."""

    def __init__(self, wait: Any) -> None:
        self.wait = wait

    async def after_create_session(self, session: Any, coord: Any) -> None:
        coord.start_soon(self.wait, self.wait_and_start, coord)
        coord.start_soon(self.wait, coord.or_stop, session.global_step.wait_for, 99)

    async def wait_and_start(self, coord: Any) -> None:
        await coord.wait_stopped()
        coord.start_soon(self.wait, coord.wait_stopped)


def a_stop_ends_every_wait(*kinds: str) -> Program:
    """At once; of each kind there is one worker, and one that trains."""

    async def main(simulation: Simulation) -> None:
        model, sessions, waiting, most = Model(simulation), {}, [], math.inf
        looped: list[MonitoredSession] = []
        creator = SharedSessionCreator(model.step, num_workers=len(kinds) + 1)

        async def wait(fn: Any, *args: Any) -> None:
            waiting.append(fn)
            try:
                await fn(*args)
            finally:
                waiting.remove(fn)

        async def watch(session: Any) -> None:
            async for _ in session.subscribe(every_secs=100.0):
                pass

        async def hold(session: Any) -> None:
            async with session.global_step.exclusive():
                await session.or_stop(simulation.sleep, math.inf)

        async def never() -> Any:
            await simulation.sleep(math.inf)
            yield 0

        async def loop(session: Any) -> None:
            async for _ in session.batches(never()):
                pass
            assert session.should_stop()
            looped.append(session)

        async def worker(i: int) -> None:
            kind = [*kinds, "trains"][i]
            hooks: list[SessionRunHook] = []
            if kind == "item":
                hooks = [FeedHook(never())]
            elif kind == "step":
                hooks = [GlobalStepWaiterHook(99)]
            elif kind == "coordinator":
                hooks = [Asking(wait)]

            def body(session: Any) -> None:
                sessions[i] = session
                if kind == "status":
                    session.start_soon(wait, watch, session)
                elif kind == "exclusive":
                    session.start_soon(wait, hold, session)
                elif kind == "side task":
                    session.start_soon(wait, session.global_step.wait_for, 99)

            if kind == "loop":
                async with MonitoredSession([], creator) as session:
                    sessions[i] = session
                    await wait(loop, session)
            else:
                await train(creator, [*hooks, StopAtStepHook(last_step=9)], body)
            del sessions[i]

        async def stop() -> None:
            nonlocal most
            await simulation.sleep(1.5)
            if sessions:
                most = model.steps + model.num_under_way
                session = next(iter(sessions.values()))
                session.request_stop(all_workers=True)
                await simulation.quiescence()
                assert not waiting, waiting
                assert session.global_step.statistics().tasks_waiting_for_step == 0

        stopping = simulation.start(stop)
        whole = await workers(simulation, worker, len(kinds) + 1)
        await stopping.wait()
        assert simulation.now <= 2.0, simulation.now
        assert len(looped) == kinds.count("loop") or len(whole) <= len(kinds), looped
        assert model.steps <= most, "a step begins after the stop"

    return main


def leaving_waits_for_a_run_of_another_task(
    error: Exception | None, waits: bool = False
) -> Program:
    """Behind the block no step is under way, and the hooks are over; also after an error.

    Where the run waits for a step of its own, leaving ends that wait.
    """

    async def main(simulation: Simulation) -> None:
        model, hook, runs = Model(simulation), Waiting(simulation), []
        waiter = [GlobalStepWaiterHook(9)] if waits else []

        async def worker() -> None:
            try:
                async with MonitoredSession([hook, *waiter], model.step) as session:
                    runs.append(simulation.start(run_if_open, session, name="worker 1"))
                    await simulation.sleep(0.5)
                    if error is not None:
                        raise error
            except Boom as raised:
                assert raised is error
            finally:
                assert not model.num_under_way, "a step goes on behind the block"
                assert re.fullmatch(MOMENTS, hook.moments), hook.moments

        await simulation.start(worker, name="worker 0").wait()
        for each in runs:
            await each.wait()
        assert not waits or simulation.now <= 1.0, "leaving ends no wait"

    return main


async def early_stopping_stops_all(simulation: Simulation) -> None:
    """Two looks behind the best one; the best step is that of its loss."""
    model, reasons = Model(simulation), {}
    stopped: list[int] = []
    hook = EarlyStoppingHook("loss", patience=2, mode="min")

    async def step() -> dict[str, Any]:
        await model.step()
        return {"loss": abs(model.steps - 2.5)}

    creator = SharedSessionCreator(step, num_workers=2)

    async def worker(i: int) -> None:
        hooks = [hook] if i == 0 else []
        async with MonitoredSession([*hooks, StopAtStepHook(last_step=20)], creator) as session:
            while not session.should_stop():
                await session.run([])
                if session.should_stop() and i == 0:
                    stopped.append(model.steps)
        reasons[i] = session.stop_reason

    whole = await workers(simulation, worker, 2)
    if hook.best_step is not None:
        assert hook.best == abs(hook.best_step - 2.5), (hook.best, hook.best_step)
    if len(whole) == 2:
        assert all("EarlyStoppingHook" in str(each) for each in reasons.values()), reasons
        assert model.steps <= stopped[0] + 1, (model.steps, stopped)


# Errors and cancellations


async def first_error_leaves(simulation: Simulation) -> None:
    """Of the worker that met it; the others stop: their waits at once, their steps complete."""
    model, left, made = Model(simulation, error_at=2), [], []
    creator = SharedSessionCreator(model.step, num_workers=NUM_WORKERS + 1)
    is_cancelled = False

    async def worker(i: int) -> None:
        nonlocal is_cancelled
        waiter = [GlobalStepWaiterHook(9)] if i == NUM_WORKERS else []
        try:
            await train(creator, [*waiter, StopAtStepHook(last_step=10)])
            assert not waiter or simulation.now <= 2.0
        except Boom as error:
            left.append(error)
            made.append(model.steps)
        except StepUnreachableError:
            assert waiter
            assert is_cancelled, "whoever was to make the step is there"
        except BaseException:
            is_cancelled = True
            raise

    whole = await workers(simulation, worker, NUM_WORKERS + 1)
    assert len(left) == 1 or len(whole) <= NUM_WORKERS, left
    if left:
        assert model.steps < made[0] + NUM_WORKERS, (model.steps, made)


async def errors_leave_as_themselves(simulation: Simulation) -> None:
    """Of two workers, one has two hooks that wait; its error leaves it, and ends the other."""
    model, hooks = Model(simulation), [Waiting(simulation), Waiting(simulation)]
    creator = SharedSessionCreator(model.step, num_workers=2)

    limit = StopAtStepHook(last_step=NUM_STEPS)
    task = simulation.start(train, creator, [limit], name="worker 1")
    try:
        await train(creator, [*hooks, limit])
    finally:
        await task.wait()
        for each in hooks:
            assert re.fullmatch(MOMENTS, each.moments), each.moments


async def hooks_see_their_moments_in_order(simulation: Simulation) -> None:
    """Each `begin` has its `end` or `on_error`, each session that opens its `after_close`."""
    model = Model(simulation)
    creator = SharedSessionCreator(model.step, num_workers=2)
    hooks = [[Waiting(simulation), Waiting(simulation)], [Waiting(simulation)]]
    whole = await train_together(simulation, creator, *hooks, last_step=2)
    for i, its in enumerate(hooks):
        for each in its:
            assert re.fullmatch(MOMENTS, each.moments), each.moments
            assert i not in whole or each.moments.endswith("edz"), each.moments
    assert model.steps == 2 or not whole, model.steps


# Side tasks


async def side_tasks_end_with_their_session(simulation: Simulation) -> None:
    """And what they wait for by `or_stop` has ended before, with its clean-up."""
    model, running, sessions = Model(simulation), set(), list[Any]()
    creator = SharedSessionCreator(model.step, num_workers=2)

    async def call(name: str) -> None:
        running.add(name)
        try:
            await simulation.sleep(math.inf)
        finally:
            try:
                await simulation.sleep(0.0)
            finally:
                running.remove(name)

    async def never() -> Any:
        await simulation.sleep(math.inf)
        yield 0

    async def read(batches: Any, name: str) -> None:
        running.add(name)
        try:
            async for _ in batches:
                pass
        finally:
            running.remove(name)

    async def task(session: Any, name: str) -> None:
        running.add(name)
        try:
            await session.or_stop(call, f"call of {name}")
        except StopTraining as stop:
            try:
                session.start_soon(call, "another")
                raise AssertionError("a side task begins at the end") from stop
            except StopTraining:
                pass
        finally:
            assert f"call of {name}" not in running
            running.remove(name)

    async def worker(i: int) -> None:
        def body(session: Any) -> None:
            sessions.append(session)
            session.start_soon(task, session, f"task {i}")
            session.start_soon(read, session.batches(never()), f"loop {i}")
            session.start_soon(call, f"cancelled {i}", cancel_at_end=True)

        try:
            await train(creator, [StopAtStepHook(last_step=NUM_STEPS)], body)
        finally:
            mine = {f"{what} {i}" for what in ("task", "call of task", "cancelled", "loop")}
            assert not running & mine, running

    await workers(simulation, worker, 2)
    assert simulation.now <= NUM_STEPS, simulation.now
    assert [each.status().side_tasks for each in sessions] == [()] * len(sessions)


class Chain(SessionRunHook):
    """Has a side task that starts another one at the stop, which starts another one."""

    def __init__(self, simulation: Simulation) -> None:
        self.sleep, self.num_running, self.num_ended = simulation.sleep, 0, 0

    async def after_create_session(self, session: Any, coord: Any) -> None:
        coord.start_soon(self.link, coord, 5)

    async def link(self, coord: Any, num_left: int) -> None:
        self.num_running += 1
        try:
            await coord.wait_stopped()
            await self.sleep(0.5)
            if num_left > 1:
                coord.start_soon(self.link, coord, num_left - 1)
        finally:
            self.num_running -= 1
        self.num_ended += 1


async def side_tasks_start_others_at_the_end(simulation: Simulation) -> None:
    """They are waited for as well."""
    model, hook = Model(simulation), Chain(simulation)

    async def worker(i: int) -> None:
        try:
            hooks = [hook, StopAtStepHook(last_step=1)]
            await train(FunctionSessionCreator(model.step), hooks)
        finally:
            assert not hook.num_running, "a side task outlives its session"

    whole = await workers(simulation, worker, 1)
    assert hook.num_ended == 5 or not whole, hook.num_ended


async def errors_of_side_tasks_end_training(simulation: Simulation) -> None:
    """But not those that are only logged, or after which the task is started again."""
    model, left, attempts = Model(simulation), [], []
    creator = SharedSessionCreator(model.step, num_workers=2)

    async def fail(session: Any) -> None:
        await session.global_step.wait_for(1)
        await simulation.sleep(0.0)
        raise Boom

    async def fail_twice() -> None:
        attempts.append(simulation.now)
        if len(attempts) < 3:
            raise Boom("again")

    async def worker(i: int) -> None:
        def body(session: Any) -> None:
            policy = Restart(max_attempts=2, first_pause_secs=0.5)
            session.start_soon(fail_twice, on_failure=policy)
            session.start_soon(fail, session, on_failure=OnFailure.LOG)
            session.start_soon(fail, session)

        try:
            await train(creator, [StopAtStepHook(last_step=9)], body if i == 0 else None)
        except Boom as error:
            assert str(error) == "", error
            left.append(i)
            return
        assert model.steps < 9 or i == 1, "the error did not stop training"

    whole = await workers(simulation, worker, 2)
    assert left == [0] or 0 not in whole, left
    assert attempts == [0.0, 0.0, 0.5][: len(attempts)], attempts
    assert len(attempts) == 3 or 0 not in whole, attempts


# Sessions that are shared, lost, restored and saved


class Remembering(SessionRunHook):
    """Saves how many steps the model has made, and brings the model back, alone with it."""

    def __init__(self, model: Model, saved: list[int]) -> None:
        self.model, self.saved = model, saved

    async def restore_model(self, session: Any) -> int:
        with self.model.held():
            await self.model.simulation.sleep(0.5)
            self.model.steps = self.saved[-1]
        return self.saved[-1]

    async def before_end(self, session: Any) -> None:
        self.saved.append(self.model.steps)


async def who_opens_first_restores(simulation: Simulation) -> None:
    """Workers open together; the one with the saver restores for all, or is refused."""
    saved, refused = [0], []

    async def worker(creator: Any, hooks: Any, last_step: int, i: int) -> None:
        try:
            await train(creator, [*hooks[i], StopAtStepHook(last_step=last_step)])
        except CheckpointError as error:
            refused.append(error)

    for last_step in (1, 3):
        model = Model(simulation, steps=-100)  # not trained
        hooks = [[], [Remembering(model, saved)]]
        creator = SharedSessionCreator(model.step)
        whole = await workers(simulation, partial(worker, creator, hooks, last_step), 2)
        if len(whole) == 2 and not refused:
            assert model.steps == saved[-1] == last_step, (model, saved)


def late_restores_are_refused(secs: float) -> Program:
    """A model is restored before its first step, or not at all, and nothing trains meanwhile."""

    async def main(simulation: Simulation) -> None:
        model, refused = Model(simulation), []
        creator = SharedSessionCreator(model.step)
        are_gone = False

        class Late(Remembering):
            async def restore_model(self, session: Any) -> int:
                assert are_gone or not model.steps, "a model is restored while others train it"
                return await super().restore_model(session)

        async def worker(i: int) -> None:
            nonlocal are_gone
            hooks: list[Any] = [StopAtStepHook(last_step=NUM_STEPS)]
            if i == 0:
                hooks.append(Late(model, [0]))
                await simulation.sleep(secs)
            try:
                await train(creator, hooks, None)
            except CheckpointError as error:
                refused.append(error)
            except BaseException:
                are_gone = True
                raise

        whole = await workers(simulation, worker, 2)
        if len(whole) == 2:
            assert model.steps == NUM_STEPS, model.steps
            assert secs == 0.0 or refused, "a worker that opened late was not refused"

    return main


async def the_last_one_closes(simulation: Simulation) -> None:
    """Workers come and go; the raw session is made with the first and closed with the last.

    Then the same creator serves another training, which knows no limit and no stop of the first.
    """
    machines = Machines(simulation)
    creator = SharedSessionCreator(machines)

    async def worker(i: int) -> None:
        await simulation.sleep(0.5 * i)
        async with MonitoredSession([StopAtStepHook(last_step=20)], creator) as session:
            while not session.should_stop():
                await session.run([])
                assert not machines.made[-1].is_closed
                if i == 2 and machines.steps >= 5:
                    session.request_stop(all_workers=True)

    whole = await workers(simulation, worker)
    assert len(machines.made) == 1 or len(whole) < NUM_WORKERS, machines
    assert all(each.is_closed for each in machines.made)
    assert machines.steps >= 5 or not whole, machines.steps
    num_made, num_steps = len(machines.made), machines.steps
    again = await train_together(simulation, creator, [], [], last_step=num_steps + 3)
    assert machines.steps == num_steps + 3 or not again, machines.steps
    assert len(machines.made) == num_made + 1 or len(again) < 2, machines
    assert all(each.is_closed for each in machines.made)


class TasksOfRaw(SessionRunHook):
    """Of each raw session: its side tasks end before the next one is made."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.running: list[Any] = []

    async def after_create_session(self, session: Any, coord: Any) -> None:
        assert not self.running, "a side task outlives its raw session"
        coord.start_soon(self.task, coord)

    async def task(self, coord: Any) -> None:
        self.running.append(coord)
        try:
            await coord.wait_stopped()
            await self.simulation.sleep(0.0)
        finally:
            self.running.remove(coord)

    async def before_run(self, run_context: Any) -> None:
        await self.simulation.sleep(0.0)  # another worker may find meanwhile that it is lost


async def lost_sessions_are_replaced_once(simulation: Simulation) -> None:
    """For all workers; each row is used once, and no step runs on a lost one."""
    machines, source = Machines(simulation), prefetch(range(3), 1)
    creator = SharedSessionCreator(machines, num_workers=2)
    feeds = [[FeedHook(source, "row")] for _ in range(2)]
    async with machines.lost_after(0.5):
        ends = await train_together(simulation, creator, *feeds, last_step=None)
    assert all(each.is_closed for each in machines.made), machines
    assert len(machines.made) <= 1 + machines.num_lost, machines
    assert len(machines.rows) == len(set(machines.rows)), machines.rows
    if len(ends) == 2:
        assert sorted(machines.rows) == [0, 1, 2], machines.rows
        assert machines.steps == 3 == max(ends.values()), (machines, ends)


async def stops_are_exact_though_sessions_are_lost(simulation: Simulation) -> None:
    """Twice, and side tasks of a raw session end with it."""
    machines = Machines(simulation)
    creator = SharedSessionCreator(machines, num_workers=2)
    async with machines.lost_after(1.0, 1.5):
        ends = await train_together(simulation, creator, [TasksOfRaw(simulation)], [])
    assert all(each.is_closed for each in machines.made), machines
    assert len(machines.made) <= 1 + machines.num_lost, machines
    assert set(ends.values()) <= {NUM_STEPS}, ends
    assert machines.steps == NUM_STEPS or not ends, machines.steps


async def hooks_survive_that_their_session_is_replaced(simulation: Simulation) -> None:
    """By another worker, under a hook, whose error tells that the session is closed."""
    machines = Machines(simulation)
    creator = SharedSessionCreator(machines, num_workers=2)

    async def use(run_context: Any) -> None:
        await simulation.sleep(1.5)
        if run_context.session.is_closed:
            raise Boom("the session is closed")

    async with machines.lost_after(0.5):
        uses = at(before_run=use)
        whole = await train_together(simulation, creator, [uses], [], last_step=4)
    assert machines.steps == 4 or not whole, machines


async def steps_on_a_lost_machine_do_not_count(simulation: Simulation) -> None:
    """One worker finds that the machine is lost; the step of the other goes on beside the next."""
    machines, ends = Machines(simulation, fails_all=False), {}
    creator = SharedSessionCreator(machines, num_workers=2)

    async def worker(i: int) -> None:
        async with MonitoredSession([StopAtStepHook(last_step=4)], creator) as session:
            while not session.should_stop():
                await session.run([], {"secs": 1.0 + i})
        ends[i] = session.global_step.value

    async with machines.lost_after(1.5, 1.5):
        whole = await workers(simulation, worker, 2)
    assert machines.steps == 4 or not whole, machines
    assert ends == dict.fromkeys(whole, 4), ends


def stops_stand_though_a_session_is_lost(who: str) -> Program:
    """A stop of the block, of a hook for all workers, or by a side task's error."""

    async def main(simulation: Simulation) -> None:
        machines, left = Machines(simulation), []
        creator = SharedSessionCreator(machines, num_workers=2)

        async def fail() -> None:
            await simulation.sleep(2.0)
            raise Boom

        async def stop(session: Any) -> None:
            await simulation.sleep(2.0)
            session.request_stop("it is enough", all_workers=True)

        async def worker(i: int) -> None:
            hooks: list[SessionRunHook] = [StopAtStepHook(last_step=20)]

            def body(session: Any) -> None:
                if who == "side task" and i == 0:
                    session.start_soon(fail)
                elif who == "block" and i == 0:
                    session.start_soon(stop, session)

            if who == "hook" and i == 0:
                hooks.append(StopsAll())
            try:
                await train(creator, hooks, body)
            except Boom:
                left.append(i)

        async with machines.lost_after(2.5):
            whole = await workers(simulation, worker, 2)
        if len(whole) == 2:
            assert left == [0] * (who == "side task"), left
            assert machines.steps <= 6, machines.steps

    return main


def an_end_meets_losses(how: str) -> Program:
    """Another worker replaces the session before the end, and the one that is made for the end.

    The end is of a body that was not stopped, was stopped by a hook, or has a failed side task.
    """

    async def main(simulation: Simulation) -> None:
        machines, hook = Machines(simulation), Waiting(simulation)
        reasons, cuts = list[str](), list[BaseException]()
        creator = SharedSessionCreator(machines, num_workers=2)

        async def fail() -> None:
            raise Boom

        async def leaves() -> None:
            stops = at(
                after_create_session=lambda *_: simulation.sleep(2.0),
                after_run=lambda context, _: how == "stopped" and context.request_stop("enough"),
                end=lambda _: reasons.append(str(session.stop_reason)),
            )
            async with MonitoredSession([hook, stops], creator) as session:
                await session.run([])
                if how == "side task":
                    session.start_soon(fail)
                await simulation.sleep(1.5)

        async def worker(i: int) -> None:
            try:
                await (train(creator, [StopAtStepHook(last_step=12)]) if i else leaves())
            except Boom as error:
                assert how == "side task"
                cuts.extend(filter(None, [error.__context__]))  # it leaves before a cancellation

        async with machines.lost_after(3.5, 2.0):
            whole = await workers(simulation, worker, 2)
        if len(whole) == 2 and not cuts:
            ends = {"clean": "ccedz", "stopped": "ccedz", "side task": "edxz"}
            assert hook.moments.endswith(ends[how]), hook.moments
            assert ["enough" in each for each in reasons] == [how == "stopped"], reasons

    return main


async def a_stop_of_all_stands_where_the_session_was_replaced(simulation: Simulation) -> None:
    """The worker whose hook asked for it pauses; meanwhile another one replaces what is lost."""
    machines = Machines(simulation)
    creator = SharedSessionCreator(machines, num_workers=2)

    async def worker(i: int) -> None:
        await simulation.sleep(0.5 * i)
        hooks = [StopsAll(1)] if i == 0 else []
        async with MonitoredSession(hooks, creator) as session:
            for _ in range(4):
                await session.run([])
                await simulation.sleep(1.5 * (i == 0))

    async with machines.lost_after(1.25):
        whole = await workers(simulation, worker, 2)
    assert machines.steps <= 2 or len(whole) < 2, machines.steps


def checkpoints_are_of_one_step_and_have_its_metric(is_background: bool) -> Program:
    """Each step changes two halves of the model, at two times; its loss is minus its number.

    What is saved in a run is what was evaluated in it.
    """

    async def main(simulation: Simulation) -> None:
        weights = np.zeros(2)

        async def step() -> dict[str, Any]:
            await simulation.sleep(1.0)
            weights[0] += 1.0
            try:
                await simulation.sleep(0.0)
            except BaseException:
                weights[0] -= 1.0
                raise
            weights[1] += 1.0
            return {"loss": -weights[1]}

        place, creator = directory_of(simulation), SharedSessionCreator(step, num_workers=2)
        evaluated: list[float] = []

        async def evaluate() -> None:
            evaluated.append(weights[0])
            await simulation.sleep(0.0)

        evaluates = at(after_run=lambda context, _: context.finish_with(evaluate, exclusive=True))
        saving = CheckpointSaverHook(
            place,
            save_steps=1,
            saver=StateDictSaver(model={"weights": weights}),
            retention=Retention(max_to_keep=9, keep_best=1),
            metric="loss",
            background=is_background,
        )

        whole = await train_together(simulation, creator, [evaluates, saving], [])
        checkpoints = CheckpointDirectory(place).checkpoints()
        steps = [each.step for each in checkpoints]
        assert steps[-1:] == [NUM_STEPS] or 0 not in whole, steps
        for each in checkpoints:
            StateDictSaver(model={"weights": weights}).restore(each.prefix)
            assert weights[0] == weights[1] == each.step, (weights, each)
            assert each.metric in (None, -each.step), each
            # the first one is saved as its session opens
            assert each.step in (*evaluated, steps[0], NUM_STEPS), (each, evaluated)
        assert simulation.now <= NUM_STEPS + 2, simulation.now

    return main


async def no_half_made_step_is_saved(simulation: Simulation) -> None:
    """One step is lost in its middle; the model is brought back before it is saved again."""
    weights, is_lost = np.zeros(2), False

    async def step() -> dict[str, Any]:
        nonlocal is_lost
        await simulation.sleep(1.0)
        weights[0] += 1.0
        if weights[0] == 2.0 and not is_lost:
            is_lost = True
            raise PreemptionError
        weights[1] += 1.0
        return {}

    place, creator = directory_of(simulation), SharedSessionCreator(step, num_workers=2)
    saver = StateDictSaver(model={"weights": weights})
    saving = CheckpointSaverHook(place, save_steps=1, saver=saver)
    await train_together(simulation, creator, [saving], [])
    for each in CheckpointDirectory(place).checkpoints():
        saver.restore(each.prefix)
        assert weights[0] == weights[1] == each.step, (weights, each)


async def no_bad_model_is_saved(simulation: Simulation) -> None:
    """The loss is NaN from step 3 on; whichever worker sees it, what is saved is of before."""
    weights = np.zeros(1)

    async def step() -> dict[str, Any]:
        await simulation.sleep(1.0)
        weights[:] += 1.0
        return {"loss": math.nan if weights[0] >= 3.0 else 0.0}

    place, creator = directory_of(simulation), SharedSessionCreator(step, num_workers=2)
    saver = StateDictSaver(model={"weights": weights})
    saving = CheckpointSaverHook(place, save_steps=1, saver=saver)
    one, other = (NanTensorHook("loss", fail_on_nan_loss=False) for _ in range(2))
    whole = await train_together(simulation, creator, [one, saving], [other], last_step=20)
    assert all(each.step < 3 for each in CheckpointDirectory(place).checkpoints())
    assert weights[0] <= 5.0 or len(whole) < 2, weights


async def the_best_model_is_brought_back(simulation: Simulation) -> None:
    """When no worker trains any more: the model is then that of the best checkpoint."""
    weights = np.zeros(1)

    async def step() -> dict[str, Any]:
        await simulation.sleep(1.0)
        weights[:] += 1.0
        return {"loss": abs(weights[0] - 2.0)}

    creator = SharedSessionCreator(step, num_workers=2)
    early = EarlyStoppingHook("loss", patience=2, mode="min", restore_best=True)
    saving = CheckpointSaverHook(
        directory_of(simulation),
        save_steps=1,
        saver=StateDictSaver(model={"weights": weights}),
        retention=Retention(keep_best=1, mode="min"),
        metric="loss",
    )
    whole = await train_together(simulation, creator, [early, saving], [], last_step=20)
    if len(whole) == 2:
        assert weights[0] == early.best_step, (weights, early.best_step)
        assert early.best == abs(weights[0] - 2.0), (weights, early.best)


async def workers_stay_within_the_bound_of_their_protocol(simulation: Simulation) -> None:
    """No worker begins a step more than one ahead of the slowest; whoever leaves holds up none."""
    server = ParameterServer(np.zeros(1), StaleSynchronous(1), num_workers=NUM_WORKERS)
    done = dict.fromkeys(range(NUM_WORKERS), 0)

    def make_step(i: int) -> Any:
        async def step() -> dict[str, Any]:
            parameters, version = server.pull(i)
            assert done[i] - min(done.values()) <= 1, done
            await simulation.sleep(1.0 if i else 0.5)
            server.push(i, parameters, version)
            done[i] += 1
            return {"global_step": server.version}

        return FunctionSessionCreator(step, global_step=server.global_step)

    async def worker(i: int) -> None:
        try:
            async with MonitoredSession([ProtocolHook(server, i)], make_step(i)) as session:
                for _ in range(3):
                    await session.run([])
        finally:
            server.leave(i)
            done.pop(i)

    whole = await workers(simulation, worker)
    assert not done, done
    assert server.version == 3 * NUM_WORKERS or len(whole) < NUM_WORKERS, server
