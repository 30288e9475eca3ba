"""Training on rollouts in virtual time, after a schedule drawn from a seed, and what must hold.

A schedule is one training in several lives, each of which goes on from what the one before has
saved. What is random in a life depends on the item or the step, and not on the order of things.
"""

import json
import random
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from enum import Enum, auto
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

from asynchooks import (
    FeedHook,
    FunctionSessionCreator,
    GlobalStep,
    InputError,
    InputPositionHook,
    MonitoredSession,
    PreemptionError,
    Restart,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.data import Rollout, WhenStale, repeat, rollouts, run_once, shuffle
from asynchooks.simulation import Simulation

ENGINES = ("asyncio", "trio", "turbo")
MANY_SECS = 10_000.0
"""What takes longer hangs."""
HARD = (WhenStale.WAIT, WhenStale.DROP)
"""The bound holds for each item."""


def drawn(*what: object) -> random.Random:
    """A generator of its own for each thing that may happen in any order."""
    return random.Random(repr(what))


class Ending(Enum):
    """How a life ends, apart from the last one, which ends with its data."""

    KILL = auto()
    """What was not saved is lost."""
    CANCEL = auto()
    """The learners are cancelled, and the position then is gone on with."""
    STOP = auto()
    ERROR = auto()
    """A step raises."""
    DATA = auto()


def draw_schedule(seed: int) -> SimpleNamespace:
    """One training, of several lives."""
    r = drawn("schedule", seed)
    failing, refused = r.choice([(0, 0), (0, 0), (0.2, 0), (0, 0.3), (0.2, 0.3)])
    endings = [r.choice(list(Ending)[:-1]) for _ in range(r.choice([0, 0, 1, 2, 3]))]
    return SimpleNamespace(
        seed=seed,
        when_stale=r.choice(list(WhenStale)),
        num_items=r.randint(1, 28),
        num_epochs=r.choice([1, 1, 2]),
        is_shuffled=r.random() < 0.3,
        call_secs=r.choice(["none", "whole", "log-normal", "some long"]),
        train_secs=r.choice([0.0, 0.5, 1.0, 3.0]),
        failing=failing,
        refused=refused,
        restart=r.choice([None, Restart(max_attempts=2, first_pause_secs=0.5)]),
        begin=r.choice([0, 0, 1000]),  # the global step
        lives=[_draw_life(r, ending) for ending in [*endings, Ending.DATA]],
        shuffles_ties=r.random() < 0.5,
        has_journal=drawn("journal", seed).random() < 0.6,
    )


def _draw_life(r: random.Random, ending: Ending) -> SimpleNamespace:
    """What may differ from life to life."""
    batch_size, max_staleness = r.randint(1, 6), r.randint(0, 5)
    publish_every = min(r.choice([0, 0, 1, 2, 3]), max_staleness + 1)
    return SimpleNamespace(
        ending=ending,
        # half seconds, or steps, until it ends
        at=r.randint(0, 30) if ending in (Ending.KILL, Ending.CANCEL) else r.randint(1, 6),
        batch_size=batch_size,
        concurrency=batch_size + r.randint(0, 4 * batch_size),
        max_staleness=max_staleness,
        num_learners=r.choice([1, 1, 1, 2, 3]),
        publish_every=publish_every,  # steps; 0: the version is the session's step
        # from a step to the publication of its weights
        lag_secs=r.choice([0.0, 0.7]) if publish_every else 0.0,
        loops=r.random() < 0.3,  # the learners read `session.batches`, and no FeedHook
        # the steps, counted from 1, that lose the session, which goes back to what was saved
        lost_at=[r.randint(1, 8) for _ in range(r.choice([0, 0, 0, 1, 2]))],
    )


@dataclass
class Saved:
    """A checkpoint."""

    step: int
    position: Any = None
    trained: list[int] = field(default_factory=list)
    """Places."""


class Answer(NamedTuple):
    """A result."""

    item: int
    weights: int
    """The version that the function had."""


class LostBackendError(Exception):
    """What a step raises that is to fail."""


def train(schedule: SimpleNamespace, backend: Any, reached: Counter[str]) -> None:
    """All lives of a schedule; AssertionError if what must hold does not.

    Args:
        reached: counts what has happened, by its name.
    """
    saved, parts = Saved(schedule.begin), Counter[tuple[int, int]]()
    num_outdated = reached["outdated"]
    with TemporaryDirectory() as place:
        journal = f"{place}/journal" if schedule.has_journal else None
        for number, life in enumerate(schedule.lives):
            training = _Training(schedule, life, number, saved, reached, journal, parts)
            saved = training.train(backend)
    if not any(life.lost_at for life in schedule.lives):  # calls of a lost model keep nothing
        num_remade = sum(max(0, num - schedule.num_epochs) for num in parts.values())
        most = 2 * (reached["outdated"] - num_outdated)
        assert num_remade <= most, "a part in the journal was made again"


class _Training:
    """One life."""

    def __init__(
        self,
        schedule: Any,
        life: Any,
        number: int,
        saved: Saved,
        reached: Counter[str],
        journal: str | None,
        parts: Counter[tuple[int, int]],
    ) -> None:
        self.schedule, self.life, self.reached = schedule, life, reached
        self.journal = journal
        self.parts = parts  # how often each part of an item was made, in all lives
        self.is_killed = False
        # else others train while one has its batch in hand, or a loop keeps it as it goes back
        before = schedule.lives[: number + 1] if journal else [life]
        self.is_exact = all(
            each.num_learners == 1 and not (each.loops and each.lost_at) for each in before
        )
        self.key = schedule.seed, number
        self.saved = saved
        self.trained = list(saved.trained)
        self.step = GlobalStep(saved.step)
        self.own = GlobalStep(saved.step) if life.publish_every else None
        self.num_published = saved.step
        self.is_restored = False
        self.num_here = 0  # trained in this life
        self.calls: Counter[int] = Counter()
        self.num_steps = 0
        self.sizes: list[int] = []

    def train(self, backend: Any) -> Saved:
        schedule = self.schedule
        seed = drawn(self.key).randrange(2**30)
        self.simulation = Simulation(seed, backend, shuffle_ties=schedule.shuffles_ties)
        # to be cut off is an error, too
        saved: Saved | None = self.simulation.run(self._main, until=MANY_SECS)
        assert saved is not None, "it does not come to its end"
        return saved

    async def _main(self) -> Saved:
        schedule, life, simulation = self.schedule, self.life, self.simulation
        source: Any = range(schedule.num_items)
        if schedule.is_shuffled:
            source = shuffle(source, 7, seed=schedule.seed)
        self.stage = rollouts(
            self._answer,
            repeat(source, schedule.num_epochs),
            life.batch_size,
            concurrency=life.concurrency,
            max_staleness=life.max_staleness,
            when_stale=schedule.when_stale,
            version=self.own,
            accept=self._is_of_use if schedule.refused else None,
            restart=schedule.restart,
            max_failures=10**6,
            journal=self.journal,
        )
        self.creator = SharedSessionCreator(
            FunctionSessionCreator(self._train_with, global_step=self.step)
        )
        self.feeds = [self._feed() for _ in range(life.num_learners)]
        if self.saved.position is not None:
            self.feeds[0].load_state_dict(self.saved.position)
        self.save()
        learners = [simulation.start(self._learn, feed) for feed in self.feeds]
        if life.ending in (Ending.KILL, Ending.CANCEL):
            await simulation.sleep(life.at / 2)
            left, self.is_killed = self.saved, life.ending is Ending.KILL
            for learner in learners:
                learner.cancel()
        for learner in learners:
            await learner.wait()
        self._check_end()
        if life.ending is Ending.KILL:
            return left
        return Saved(self.step.value, self._position(), self.trained)

    def _feed(self) -> FeedHook | InputPositionHook:
        return InputPositionHook(self.stage) if self.life.loops else FeedHook(self.stage, "groups")

    async def _answer(self, item: int) -> Answer:
        # which weights it has, at once; they are not known to the stage
        version = self.step if self.own is None else self.own
        weights, attempt = version.value, self.calls[item]
        self.calls[item] += 1
        r = drawn(self.key, "call", item, attempt)
        secs = {
            "none": 0.0,
            "whole": float(r.randint(0, 3)),
            "log-normal": r.lognormvariate(0, 1.2),
            "some long": 0.1 if r.random() < 0.8 else 15.0,
        }[self.schedule.call_secs]
        for number in range(2 if self.journal else 0):
            part = await run_once(f"part {number}", self._make_part, item, number, secs)
            weights = min(weights, part)
        if secs or r.random() < 0.5:
            await self.simulation.sleep(secs)
        if r.random() < self.schedule.failing:
            raise OSError(item)
        return Answer(item, weights)

    async def _make_part(self, item: int, number: int, secs: float) -> int:
        weights = (self.step if self.own is None else self.own).value
        if secs:
            await self.simulation.sleep(secs)
        self.parts[item, number] += 1
        return weights

    def _is_of_use(self, answer: Answer) -> bool:
        return bool(drawn(self.schedule.seed, "use", answer.item).random() >= self.schedule.refused)

    async def _train_with(self, groups: list[Rollout]) -> dict[str, float]:
        self._check_batch(groups)
        self.num_steps += 1
        if self.num_steps in self.life.lost_at:
            raise PreemptionError
        if self.life.ending is Ending.ERROR and self.num_steps == self.life.at:
            raise LostBackendError
        if self.schedule.train_secs:
            secs = drawn(self.key, "train", self.num_steps).random()
            await self.simulation.sleep(self.schedule.train_secs * secs)
        self.trained += [each.place for each in groups]
        self.num_here += len(groups)
        return {"loss": 0.0}

    async def _learn(self, feed: FeedHook | InputPositionHook) -> None:
        hooks: list[SessionRunHook] = [feed]
        if self.life.ending is Ending.KILL or self.life.lost_at:
            hooks.append(_Saves(self))
        if self.life.ending is Ending.STOP:
            hooks.append(StopAtStepHook(last_step=self.saved.step + self.life.at))
        try:
            async with MonitoredSession(hooks, self.creator) as session:
                await self.simulation.quiescence()  # until all have opened theirs
                if self.life.loops:
                    async for groups in session.batches(self.stage):
                        await session.run("loss", {"groups": groups})
                        self._publish()
                while not session.should_stop() and not self.life.loops:
                    await session.run("loss")
                    self._publish()
        except LostBackendError:
            assert self.life.ending is Ending.ERROR
        except PreemptionError:  # it goes back no more when it is to stop
            assert self.life.lost_at
            assert session.should_stop()
        except InputError:
            assert not self.trained  # nothing was of use

    def _publish(self) -> None:
        every, reached = self.life.publish_every, self.step.value
        if self.own is None or reached - reached % every <= self.num_published:
            return
        self.num_published = reached - reached % every
        if self.life.lag_secs:
            self.simulation.start(self._publish_late, self.num_published, self.own.epoch)
        else:
            self.own.publish(self.num_published)

    async def _publish_late(self, version: int, epoch: int) -> None:
        await self.simulation.sleep(self.life.lag_secs)
        assert self.own is not None
        self.own.publish(version, epoch=epoch)  # unless the model has gone back since

    def _position(self) -> Any:
        return json.loads(json.dumps(self.feeds[0].state_dict()))

    def save(self) -> None:
        self.saved = Saved(self.step.value, self._position(), list(self.trained))
        if self.journal is not None and not self.is_killed:
            state: Any = self.feeds[0].state_dict()
            if drawn(self.key, "cut", self.num_steps).random() < 0.7:
                state.when_saved()

    def restore(self) -> int | None:
        """For each raw session: the first one has what was saved already."""
        if not self.is_restored:
            self.is_restored = True
            return None
        self.trained = list(self.saved.trained)
        self.feeds[0].load_state_dict(self.saved.position)
        if self.own is not None:
            self.own.restart(self.saved.step)
        self.num_published = self.saved.step
        return self.saved.step

    # What must hold

    def _check_batch(self, groups: list[Rollout]) -> None:
        """At the beginning of the step that is to train with them."""
        life, step = self.life, self.step.value
        self.sizes.append(len(groups))
        places = [each.place for each in groups]
        assert places == sorted(places)
        for each in groups:
            assert each.item == each.result.item
            if not self.schedule.is_shuffled:
                assert each.item == each.place % self.schedule.num_items
            assert each.version <= each.result.weights, "stamped younger than its weights"
            if self.schedule.when_stale in HARD:
                assert each.staleness <= life.max_staleness, "older than the bound"
            if self.is_exact:
                assert each.staleness == max(0, step - each.version), "of another step"
                excess = step - each.result.weights - life.max_staleness
                if self.schedule.when_stale in HARD:
                    assert excess <= 0, "truly older than the bound"
                    self.reached["the bound"] += excess == 0
        if life.num_learners == 1:
            known = self.stage.statistics()
            num_given = sum(known.staleness.values())
            may_repeat = life.ending is Ending.ERROR or life.lost_at
            assert num_given == self.num_here + len(groups) or may_repeat, "put together early"

    def _check_end(self) -> None:
        schedule, life = self.schedule, self.life
        num = schedule.num_items * schedule.num_epochs
        twice = [place for place, count in Counter(self.trained).items() if count > 1]
        assert not twice, f"trained twice: {twice}"
        if life.num_learners == 1:
            assert set(self.sizes[:-1]) <= {life.batch_size} or life.lost_at
        position = self._position()
        counts = Counter[str](position["counts"])
        self.reached.update(counts)
        known: Any = self.stage.statistics()
        self.reached.update(recovered=known.num_recovered, outdated=known.num_outdated)
        del counts["retried"]
        num_finished = len(self.trained) + counts.total()
        assert num_finished <= num
        if schedule.when_stale is not WhenStale.DROP:
            assert counts["dropped"] == 0
        if life.ending is Ending.DATA:
            assert num_finished == num, f"{num_finished} of {num} are finished: {position}"
            assert (position["place"], position["beyond"]) == (num, [])
            by_stage = known.num_refused, known.num_failures, known.num_dropped
            assert by_stage == (counts["refused"], counts["failed"], counts["dropped"])
            if not (schedule.failing or schedule.refused or counts["dropped"]):
                assert sorted(self.trained) == list(range(num))


class _Saves(SessionRunHook):
    """Saves behind some steps, while no step is under way, and brings a lost model back there."""

    def __init__(self, training: _Training) -> None:
        self.training = training

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        training = self.training
        if drawn(training.key, "save", run_context.global_step.value).random() < 0.5:
            run_context.finish_with(lambda: self._save(run_context))

    async def restore_model(self, session: Any) -> int | None:
        return self.training.restore()

    def _save(self, run_context: SessionRunContext) -> Awaitable[None]:
        async def save() -> None:
            async with run_context.global_step.exclusive():
                self.training.save()

        return save()
