"""Steps in flight under random faults, kills and cancellations: no step lost, none made twice."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextvars import ContextVar
from typing import Any

import pytest

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionRunArgs,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks._engine.current import current_engine
from asynchooks.data import Rollout, batch, map_concurrent, prefetch, rollouts
from asynchooks.simulation import Simulation

from .service import Service

BACKENDS = ("asyncio", "trio", "turbo")
FAULTS = ("in the results", "at submission", "in before_run", "in after_run", "in a save")
SOON = Recovery(first_pause_secs=0.5)


_client: ContextVar[Any] = ContextVar("client", default=None)
"""The worker in whose session a step is submitted."""


class FaultError(Exception):
    pass


class World:
    """One random program: a training with steps in flight, in one life or several."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.seed = seed
        self.backend: Any = BACKENDS[seed % 3]
        self.depth = rng.choice([2, 2, 3, 4])
        self.num_workers = rng.choice([1, 1, 1, 2])
        self.last = rng.choice([None, rng.randint(1, 12)])
        self.num_batches = rng.randint(1, 14)
        self.source = rng.choice(["list", "prefetch", "slow", "rollouts"])
        self.max_staleness = rng.randint(0, 3)
        self.save_every = rng.choice([0, 1, 3])
        self.fault = rng.choice([None, *FAULTS])
        self.error: Any = rng.choice([FaultError, PreemptionError])
        self.fault_at = rng.randint(1, 8)
        self.stop_at = rng.choice([None, None, rng.randint(1, 8)])
        self.swallows = rng.random() < 0.5  # the loop goes on after an error of a run
        self.restores = rng.random() < 0.7  # a lost session goes back to what was saved
        self.cycle_secs = rng.choice([1.0, 10.0])
        self.saved: dict[str, Any] = {"position": None, "updates": [], "step": 0}
        self.num_lives = 0
        self.seen: Counter[str] = Counter()

    def play(self) -> None:
        is_over = False
        while not is_over:
            self.num_lives += 1
            rng, kills = self.rng, self.num_lives < 4 and self.rng.random() < 0.6
            if self.saved["step"] == self.num_batches:
                return  # a life would begin at the end of the input
            self.kill_at = rng.uniform(5, 120) if kills and rng.random() < 0.5 else None
            self.cancel_at = rng.uniform(5, 120) if kills and self.kill_at is None else None
            is_over = self._live()

    def _live(self) -> bool:
        self.simulation = Simulation(
            self.rng.randrange(1000), self.backend, shuffle_ties=self.rng.random() < 0.5
        )
        self.delays = random.Random(self.rng.randrange(10**6))
        self.has_ended = False
        self.left: BaseException | None = None
        try:
            self.simulation.run(self._main, until=self.kill_at or 5000.0)
        except RuntimeError as error:  # at a kill a stage may notice that its task was cancelled
            if self.kill_at is None or "was cancelled from outside" not in str(error):
                raise
        self.seen["in the results"] += self.service.num_errors > 0
        if self.kill_at is not None and self.simulation.now >= self.kill_at:
            self.seen["killed"] += 1
            return False
        assert self.has_ended, "it hangs"
        statistics = self.step.statistics()
        assert statistics.tickets == statistics.tasks_waiting_for_ticket == 0
        assert statistics.workers_open == 0
        assert not statistics.is_exclusive
        if self.left is not None:
            self.seen["cancelled" if self.was_cancelled else "failed"] += 1
            self.fault = None
            return False
        self._check_end()
        return True

    async def _main(self) -> None:
        simulation = self.simulation
        self.is_faulty, self.was_cancelled = self.fault is not None, False
        self.num_faults: Counter[str] = Counter()
        service = self.service = Service(simulation, self.cycle_secs)
        service.updates = list(self.saved["updates"])
        self.step = GlobalStep(self.saved["step"])
        self.trained: list[list[Any]] = []
        self.source_stage = self._make_source()
        if self.saved["position"] is not None:
            FeedHook(self.source_stage).load_state_dict(self.saved["position"])
        self.first = json.loads(json.dumps(FeedHook(self.source_stage).state_dict()))
        creator: Any = FunctionSessionCreator(
            self._step, in_flight=self.depth, global_step=self.step
        )
        if self.num_workers > 1:
            creator = SharedSessionCreator(creator, self.num_workers)
        tasks = [simulation.start(self._train, creator) for _ in range(self.num_workers)]
        if self.cancel_at is not None:
            await tasks[0].wait(self.cancel_at)
            self.was_cancelled = True
            for task in tasks:
                task.cancel()
        for task in tasks:
            await task.wait()
        assert self._tasks_in_flight() == []
        self.has_ended = True

    @property
    def has_failed(self) -> bool:
        """Whether something went wrong in this life."""
        return bool(self.num_faults or self.service.num_errors)

    def _tasks_in_flight(self) -> list[str]:
        running = current_engine().running_tasks()
        return [name for name, coroutine in running if "_fly" in repr(coroutine)]

    def _make_source(self) -> Any:
        async def slowly(item: int) -> int:
            await self.simulation.sleep(random.Random(item).uniform(0, 12))
            return item

        items = range(2 * self.num_batches)
        if self.source == "rollouts":
            return rollouts(slowly, items, 2, concurrency=6, max_staleness=self.max_staleness)
        if self.source == "slow":
            return batch(map_concurrent(slowly, items, 4), 2)
        stage = batch(items, 2)
        return prefetch(stage, 2) if self.source == "prefetch" else stage

    def _meet(self, place: str) -> None:
        if self.is_faulty and self.fault == place:
            self.num_faults[place] += 1
            if self.num_faults[place] == self.fault_at:
                self.seen[place] += 1
                if self.error is PreemptionError:
                    self.service.lose()
                raise self.error(place)

    async def _step(self, items: Any) -> Any:
        if self.delays.random() < 0.5:
            await self.simulation.sleep(self.delays.uniform(0, 3))
        self._meet("at submission")
        service = self.service
        if self.fault == "in the results" and self.is_faulty:
            service.errors = {self.fault_at: self.error("in the results")}
        plain = [each.item if isinstance(each, Rollout) else int(each) for each in items]
        return service.submit(plain, _client.get()).result()

    async def _train(self, creator: Any) -> None:
        feed, trained = FeedHook(self.source_stage, "items"), list[Any]()
        _client.set(trained)
        self.trained.append(trained)
        hooks: list[Any] = [StopAtStepHook(last_step=self.last)] if self.last else []
        hooks += [feed, _Worker(self, feed, trained)]
        try:
            async with MonitoredSession(hooks, creator, recovery=SOON) as session:
                while not session.should_stop():
                    try:
                        outputs = await session.run("items")
                    except FaultError:
                        if not self.swallows:
                            raise
                        self.seen["swallowed"] += 1
                    else:
                        assert outputs in self.service.updates or self.has_failed
        except (FaultError, PreemptionError) as error:
            self.left = error
        except RuntimeError as error:  # it opens after the other one has failed and closed
            if self.num_workers == 1 or "is closed; make a new one" not in str(error):
                raise
            self.left = self.left or error
        except BaseException as error:
            self.left = error
            raise

    def _check_end(self) -> None:
        """Of a life that ended cleanly."""
        updates, value = self.service.updates, self.step.value
        assert len(updates) == value
        flat = [item for each in updates for item in each]
        assert len(flat) == len(set(flat)), "an item was trained twice"
        if self.stop_at is None:
            assert value == min(self.last or self.num_batches, self.num_batches)
        if value == self.num_batches:
            assert sorted(flat) == list(range(2 * self.num_batches))
        is_plain = not (self.swallows or self.error is PreemptionError) or not self.has_failed
        if self.num_lives == 1 and self.num_workers == 1 and is_plain:
            assert self.trained[0] == updates[: len(self.trained[0])]
            assert len(self.trained[0]) == value


class _Worker(SessionRunHook):
    """Stops, fails and saves as its program says."""

    may_overlap = True

    def __init__(self, world: World, feed: FeedHook, trained: list[Any]) -> None:
        self.world, self.feed, self.trained = world, feed, trained
        self.last_value = -1
        self.num_restored = 0

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        self.world._meet("in before_run")
        return SessionRunArgs("items")

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        world, value = self.world, run_context.global_step.value
        if world.num_workers == 1 and not world.has_failed and world.num_lives == 1:
            assert value == len(self.trained) + 1
        assert run_values.results == run_values.results
        self.trained.append(run_values.results)
        world._meet("in after_run")
        if world.stop_at is not None and value >= world.stop_at:
            run_context.request_stop("enough")
        if world.save_every and value % world.save_every == 0:
            run_context.finish_with(lambda: self.save(run_context))

    async def save(self, run_context: Any) -> None:
        world = self.world
        timeout = 0.0 if world.num_workers == 1 else None  # nothing is in flight
        async with run_context.global_step.exclusive(timeout=timeout):
            world._meet("in a save")
            value = run_context.global_step.value
            assert len(world.service.updates) == value
            position = json.loads(json.dumps(self.feed.state_dict()))
            world.saved = {"position": position, "updates": world.service.state(), "step": value}
            await world.simulation.sleep(0.5)
            assert run_context.global_step.value == value

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self.world.service.lose(self.trained)  # what a former session has submitted

    async def restore_model(self, session: Any) -> Any:
        world = self.world
        self.num_restored += 1
        if self.num_restored == 1 or not world.restores or world.num_workers > 1:
            return None
        world.service.updates = list(world.saved["updates"])
        self.feed.load_state_dict(world.saved["position"] or world.first)
        return world.saved["step"]


def test_random_programs_lose_no_step_and_make_none_twice() -> None:
    for seed in (*range(60), 2851, 5763):  # the last ones found what the others do not
        World(seed).play()


@pytest.mark.exhaustive
def test_a_thousand_random_programs() -> None:
    seen: Counter[str] = Counter()
    for seed in range(1000):
        world = World(seed)
        world.play()
        seen += world.seen
    assert {*FAULTS, "killed", "cancelled", "failed", "swallowed"} <= set(seen)
