"""EvaluationHook(every_n_epochs=...): after the last step of an epoch, as the data says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointSaverHook,
    EarlyStoppingHook,
    EvaluationHook,
    FeedHook,
    FunctionSessionCreator,
    InputStateError,
    MonitoredSession,
    PreemptionError,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.checkpoints import CheckpointDirectory, Retention
from asynchooks.data import batch, interleave, prefetch, repeat, shuffle

from .inputs import Diary

pytestmark = pytest.mark.anyio


class Evaluations:
    """The steps that were evaluated; the later one, the better, up to the best."""

    def __init__(self, best: int = 999) -> None:
        self.steps: list[int] = []
        self.best = best

    def evaluate(self, session: Any, step: int) -> dict[str, float]:
        self.steps.append(step)
        return {"loss": float(abs(step - self.best))}

    async def concurrently(self, session: Any, step: int) -> dict[str, float]:
        return self.evaluate(session, step)


async def train(hooks: list[SessionRunHook], creator: Any = None) -> None:
    async with MonitoredSession(hooks, creator or (lambda x: {"loss": 0.5})) as session:
        while not session.should_stop():
            await session.run([])


SOURCES = [
    lambda: repeat(range(4), 3),
    lambda: prefetch(repeat(range(4), 3), 5),
    lambda: repeat(batch(range(8), 2), 3),
    lambda: prefetch(repeat(shuffle(range(4), 4, seed=1), 3), 2),
]


@pytest.mark.parametrize("is_concurrent", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("make", SOURCES)
async def test_it_evaluates_after_the_last_step_of_each_epoch(
    make: Any, is_first: bool, is_concurrent: bool
) -> None:
    seen = Evaluations()
    evaluate = seen.concurrently if is_concurrent else seen.evaluate
    hook = EvaluationHook(evaluate, every_n_epochs=1, at_end=False)
    feed = FeedHook(make(), "x")
    await train([hook, feed] if is_first else [feed, hook])
    assert seen.steps == [4, 8, 12]
    assert hook.latest_step == 12


@pytest.mark.parametrize(("every", "expected"), [(2, [8, 16, 20]), (3, [12, 20]), (9, [20])])
async def test_it_evaluates_at_multiples_of_epochs_and_at_the_end(
    every: int, expected: list[int]
) -> None:
    seen = Evaluations()
    hook = EvaluationHook(seen.evaluate, every_n_epochs=every)
    await train([hook, FeedHook(repeat(range(4), 5), "x")])
    assert seen.steps == expected


async def test_epochs_are_those_of_the_first_of_several_inputs() -> None:
    seen = Evaluations()
    hook = EvaluationHook(seen.evaluate, every_n_epochs=1, at_end=False)
    feeds = [FeedHook(repeat(range(3), 2), "x"), FeedHook(repeat(range(2)), "y")]
    await train([hook, *feeds], lambda x, y: {"loss": 0.5})
    assert seen.steps == [3, 6]


async def test_the_best_epoch_is_saved_and_restored(tmp_path: Path) -> None:
    model, seen = Diary(), Evaluations(best=8)
    evaluation = EvaluationHook(seen.evaluate, every_n_epochs=1)
    metric = evaluation.metric("loss")
    saving = CheckpointSaverHook(
        str(tmp_path),
        save_steps=1000,
        saver=StateDictSaver(model=model),
        metric=metric,
        retention=Retention(max_to_keep=1, keep_best=1),
    )
    stopping = EarlyStoppingHook(metric, patience=2, restore_best=True)
    feed = FeedHook(prefetch(repeat(range(4)), 2), "x")
    await train([evaluation, stopping, saving, feed], model.creator)
    assert seen.steps == [4, 8, 12, 16]
    assert (stopping.best_step, len(model.items)) == (8, 8)
    assert CheckpointDirectory(str(tmp_path)).best is not None


async def test_in_any_two_lives_each_epoch_is_evaluated_once(tmp_path: Path) -> None:
    for last in range(1, 12):
        seen = Evaluations()
        for limit in (last, 99):
            model = Diary()
            saver = StateDictSaver(model=model)
            await train(
                [
                    EvaluationHook(seen.evaluate, every_n_epochs=1, at_end=False),
                    FeedHook(repeat(range(4), 3), "x"),
                    CheckpointSaverHook(str(tmp_path / str(last)), save_steps=99, saver=saver),
                    StopAtStepHook(last_step=limit),
                ],
                model.creator,
            )
            assert model.items == ([*range(4)] * 3)[: min(limit, 12)]
        # an epoch that ends at the limit is that of the evaluation at the end
        assert seen.steps == [step for step in (4, 8, 12) if step != last]


async def test_a_model_that_goes_back_is_evaluated_again_where_its_epochs_end(
    tmp_path: Path,
) -> None:
    seen, model = Evaluations(), Diary({6: PreemptionError("lost")})
    saver = StateDictSaver(model=model)
    hooks: list[SessionRunHook] = [
        EvaluationHook(seen.evaluate, every_n_epochs=1, at_end=False),
        FeedHook(prefetch(repeat(range(4), 3), 2), "x"),
        CheckpointSaverHook(str(tmp_path), save_steps=3, saver=saver),
    ]
    await train(hooks, model.creator)
    assert model.items == [*range(4)] * 3
    assert seen.steps in ([4, 8, 12], [4, 4, 8, 12])


async def test_a_run_that_is_to_be_the_last_does_not_wait_for_an_item() -> None:
    class Stops(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            run_context.request_stop("enough")

    async def items() -> Any:
        yield 1
        await anyio.sleep_forever()

    seen = Evaluations()
    evaluation = EvaluationHook(seen.evaluate, every_n_epochs=1)
    with anyio.fail_after(10):
        await train([evaluation, FeedHook(repeat(items), "x"), Stops()])
    assert seen.steps == [1]


async def test_of_several_workers_one_evaluates_the_epochs_of_all() -> None:
    num_steps = 0

    async def step(x: int) -> dict[str, Any]:
        nonlocal num_steps
        await anyio.lowlevel.checkpoint()
        num_steps += 1
        return {"loss": 0.5}

    seen, creator = Evaluations(), SharedSessionCreator(FunctionSessionCreator(step), 3)
    source = prefetch(repeat(range(10), 4), 2)
    hook = EvaluationHook(seen.evaluate, every_n_epochs=1, at_end=False)

    async with anyio.create_task_group() as workers:
        for worker in range(3):
            hooks = [FeedHook(source, "x"), *([hook] if worker == 0 else [])]
            workers.start_soon(train, hooks, creator)
    assert num_steps == 40
    assert len(seen.steps) in (3, 4)  # the last item may be another worker's
    # up to one item of each other worker is in hand
    assert all(abs(step - 10 * (place + 1)) <= 3 for place, step in enumerate(seen.steps))


async def test_it_needs_a_feed_hook_and_epochs_that_end() -> None:
    hook = EvaluationHook(Evaluations().evaluate, every_n_epochs=1)
    with pytest.raises(ValueError, match=r"no FeedHook.*FeedHook\(repeat\(loader, 10\), names\)"):
        await train([hook])
    source = interleave([repeat([1], 2), repeat([2], 2)])
    with pytest.raises(InputStateError, match="mixes items of several passes"):
        await train([hook, FeedHook(source, "x")])


@pytest.mark.parametrize("given", [0, 1.5, "1"])
def test_a_number_of_epochs_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="every_n_epochs is"):
        EvaluationHook(Evaluations().evaluate, every_n_epochs=given)


def test_one_interval_is_given_and_shown() -> None:
    evaluate = Evaluations().evaluate
    with pytest.raises(ValueError, match=r"every_n_epochs=1.*every_n_steps=2|every_n_steps=2.*"):
        EvaluationHook(evaluate, every_n_steps=2, every_n_epochs=1)
    assert "every_n_epochs=3" in repr(EvaluationHook(evaluate, every_n_epochs=3))
    assert "every_n_steps" not in repr(EvaluationHook(evaluate, every_n_epochs=3))
