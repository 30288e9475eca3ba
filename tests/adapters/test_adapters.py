"""Hooks in Lightning, transformers and Ignite: order, stops, resuming, errors, side tasks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from asynchooks import (
    DamagedCheckpointError,
    FeedFnHook,
    FetchError,
    FinalOpsHook,
    HistoryHook,
    PreemptionHook,
    SessionRunHook,
    StopAtStepHook,
)

torch = pytest.importorskip("torch")

from .trainings import (  # noqa: E402
    BATCH,
    NUM_ROWS,
    BreaksAt,
    BrokenError,
    InIgnite,
    InLightning,
    InTransformers,
    Notes,
)

LIBRARIES: dict[str, Any] = {
    "pytorch_lightning": InLightning,
    "transformers": InTransformers,
    "ignite": InIgnite,
}
STEPS = NUM_ROWS // BATCH
"""Of an epoch."""

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{each}Warning")
    for each in ("User", "Future", "Deprecation")
]


@pytest.fixture(params=LIBRARIES)
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    pytest.importorskip(request.param)
    return LIBRARIES[request.param](tmp_path)


def of(*libraries: str) -> pytest.MarkDecorator:
    """The test is about these libraries alone."""
    return pytest.mark.parametrize("training", libraries, indirect=True)


WITH_CALLBACKS = of("pytorch_lightning", "transformers")


def test_each_moment_is_called_in_order_with_the_step_and_the_loss(training: Any) -> None:
    notes = Notes(training.fetch)
    training.fit([notes])
    runs = ["before_run", "after_run"] * (2 * STEPS)
    assert notes.log == ["begin", "after_create_session 0", *runs, "end"]
    assert notes.steps == list(range(1, 2 * STEPS + 1))
    assert sum(notes.losses[STEPS:]) < sum(notes.losses[:STEPS])
    assert notes.errors == []
    assert repr(notes.total_at_end) in training.states()  # as of the last step


@pytest.mark.parametrize("last_step", [1, STEPS])
def test_a_stop_at_a_step_ends_training_after_that_step(training: Any, last_step: int) -> None:
    notes = Notes(training.fetch)
    training.fit([notes, StopAtStepHook(last_step=last_step)], epochs=3)
    assert training.steps == notes.steps[-1] == last_step
    assert notes.log[-1] == "end"


def test_each_fit_of_one_adapter_runs_so_many_steps(training: Any) -> None:
    notes = Notes(training.fetch)
    training.fit([notes, StopAtStepHook(num_steps=STEPS + 1)], epochs=3)
    training.fit(epochs=3)
    assert len(notes.steps) == 2 * (STEPS + 1)


def test_a_resumed_training_gives_what_the_whole_one_gives(tmp_path: Path, training: Any) -> None:
    kind, stop = type(training), StopAtStepHook(last_step=2 * STEPS)
    whole, notes = kind(tmp_path / "whole"), Notes(training.fetch)
    whole.fit([notes, stop], epochs=3)
    training.saves = True
    training.fit([Notes(training.fetch)], epochs=1)
    resumed, later = kind(tmp_path), Notes(training.fetch)
    resumed.fit([later, stop], epochs=3, resume=True)
    assert f"after_create_session {STEPS}" in later.log
    assert later.steps == list(range(STEPS + 1, 2 * STEPS + 1))
    assert later.losses == notes.losses[STEPS:]
    assert json.loads(resumed.states()) == json.loads(whole.states())
    assert torch.equal(resumed.module.weight, whole.module.weight)

    none = Notes(training.fetch)  # the stop is reached already
    kind(tmp_path).fit([none, StopAtStepHook(last_step=STEPS)], epochs=3, resume=True)
    assert (none.steps, none.log[-1]) == ([], "end")


def test_an_error_of_a_hook_leaves_as_itself_and_reaches_the_others(training: Any) -> None:
    notes = Notes(training.fetch)
    with pytest.raises(BrokenError) as caught:
        training.fit([notes, BreaksAt(3)])
    assert notes.errors == [caught.value]
    assert "BreaksAt" in "".join(caught.value.__notes__)
    assert notes.steps == [1, 2, 3]
    assert repr(notes.total) in training.states()


def in_steps(training: Any, fn: Callable[[int], None]) -> None:
    """Have the function called within each step, with its number."""
    numbers = iter(range(1, 10**6))
    training.module.register_forward_hook(lambda *_: fn(next(numbers)))


@pytest.mark.parametrize("error", [BrokenError("theirs"), KeyboardInterrupt()], ids=type)
def test_an_error_of_the_training_reaches_the_hooks_which_can_be_used_again(
    training: Any, error: BaseException
) -> None:
    notes = Notes(training.fetch)

    def break_third(number: int) -> None:
        if number == 3:
            raise error

    in_steps(training, break_third)
    with pytest.raises((type(error), SystemExit)):  # Lightning exits at a KeyboardInterrupt
        training.fit([notes])
    assert notes.errors == [error]
    assert "end" not in notes.log
    training.fit([notes], epochs=1)
    assert notes.steps == [1, 2, *range(1, STEPS + 1)]
    assert notes.log[-1] == "end"


def test_a_host_stops_a_training_of_another_library_by_preempt(training: Any) -> None:
    hook, notes = PreemptionHook(signals=()), Notes(training.fetch)
    in_steps(training, lambda number: hook.preempt("the host ends"))
    training.fit([hook, notes], epochs=500)
    assert training.steps < 500 * STEPS
    assert notes.log[-1] == "end"


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (FeedFnHook(lambda: {"x": 1}), ValueError, "feeds its batches itself"),
        (Notes("accuracy"), FetchError, "accuracy.*(loss|output)"),
    ],
    ids=["feed", "fetch"],
)
def test_a_hook_that_feeds_or_asks_for_what_is_not_there_is_refused(
    training: Any, hook: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        training.fit([hook])


def test_the_last_step_of_a_training_is_among_the_values(training: Any) -> None:
    """Whatever ends it; a trainer says of no step beforehand that it is the last one."""
    history, final = HistoryHook(training.fetch, every_n_steps=5), FinalOpsHook(training.fetch)
    training.fit([history, final])
    assert [row["step"] for row in history.rows] == [1, 5, 10, 2 * STEPS]
    assert float(final.final_ops_values) == history.rows[-1][training.fetch]
    training.fit([history, StopAtStepHook(last_step=3)])
    assert history.rows[-1]["step"] == 3


@WITH_CALLBACKS
def test_accumulated_batches_count_as_the_optimizer_steps(training: Any) -> None:
    training.accumulate, notes = 2, Notes()
    training.fit([notes, StopAtStepHook(last_step=4)], epochs=3)
    assert training.steps == notes.steps[-1] == 4
    assert sorted({*notes.steps} - {0}) == [1, 2, 3, 4]


class AsksFromATask(SessionRunHook):
    """Stops training from a task beside it, once that has seen a step."""

    ended = False

    async def after_create_session(self, session: Any, coord: Any) -> None:
        coord.start_soon(self._ask, session, coord)

    async def _ask(self, session: Any, coord: Any) -> None:
        await session.global_step.wait_for(3)
        coord.request_stop()
        self.ended = True


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_hooks_run_in_a_portal_of_the_user_with_side_tasks(training: Any, backend: str) -> None:
    asks = AsksFromATask()
    with start_blocking_portal(backend) as training.portal:
        training.fit([asks], epochs=20)
    assert asks.ended
    assert 3 <= training.steps < 20 * STEPS


@WITH_CALLBACKS
def test_a_stop_of_the_library_ends_the_hooks_once_after_its_last_step(training: Any) -> None:
    notes = Notes()
    in_steps(training, lambda number: training.stop() if number == 3 else None)
    training.fit([notes])
    assert notes.steps == [1, 2, 3]
    assert (notes.log.count("end"), notes.log[-1], notes.errors) == (1, "end", [])


@WITH_CALLBACKS
def test_a_trainer_may_be_used_after_its_end(training: Any) -> None:
    notes = Notes()
    training.fit([notes], epochs=1)
    log, trainer = [*notes.log], training.trainer
    if isinstance(training, InTransformers):
        trainer.predict(trainer.train_dataset)
        assert notes.log == log
        trainer.train()
    else:
        trainer.predict(trainer.lightning_module, training.loader)
        assert notes.log == log
        trainer.fit_loop.max_epochs = 2
        trainer.fit(trainer.lightning_module, training.loader)
    assert len(notes.steps) == 2 * STEPS
    assert notes.log.count("end") == 2


@of("pytorch_lightning")
def test_what_lightning_loads_to_predict_is_not_what_training_goes_on_from(training: Any) -> None:
    notes = Notes()
    training.fit([notes], epochs=1)
    trainer, notes.total, total = training.trainer, 0.5, notes.total_at_end
    trainer.predict(
        trainer.lightning_module, training.loader,
        ckpt_path=training.path / "last.ckpt", weights_only=False,
    )  # fmt: skip
    training.fit(epochs=1)
    assert notes.total_at_end == pytest.approx(0.5 + sum(notes.losses) - total)


@of("transformers")
def test_what_transformers_save_state_writes_after_the_end_is_as_of_the_last_step(
    training: Any,
) -> None:
    training.saves, notes = True, Notes()
    training.fit([notes, StopAtStepHook(last_step=8)])  # six steps are an epoch, which is saved
    training.trainer.save_state()
    saved = json.loads((training.path / "trainer_state.json").read_text())
    text = saved["stateful_callbacks"]["TrainerHooks"]["attributes"]["hooks"]
    assert repr(notes.total_at_end) in text


@of("transformers")
def test_a_crafted_state_in_transformers_checkpoint_is_damage(training: Any) -> None:
    training.saves = True
    training.fit([Notes()], epochs=1)
    path = training.path / "checkpoint-6" / "trainer_state.json"
    state = json.loads(path.read_text())
    crafted_states: list[Any] = [5, {"attributes": {}}, {"attributes": {"hooks": "\ud800"}}]
    for crafted in crafted_states:
        state["stateful_callbacks"]["TrainerHooks"] = crafted
        path.write_text(json.dumps(state))
        with pytest.raises(DamagedCheckpointError, match="saved state of the hooks is damaged"):
            training.fit([Notes()], epochs=2, resume=True)


@of("transformers")
def test_a_trainer_that_trains_for_no_epoch_leaves_the_hooks_in_order(training: Any) -> None:
    notes = Notes()
    training.fit([notes], epochs=0)
    assert notes.log == ["begin", "after_create_session 0", "end"]


@of("transformers")
def test_a_second_callback_in_one_trainer_is_refused(training: Any) -> None:
    from asynchooks.adapters import TrainerHooks

    training.more_callbacks = [TrainerHooks([])]
    with pytest.raises(ValueError, match="2 TrainerHooks.*give all hooks to one"):
        training.fit([Notes()])


@of("transformers")
def test_a_hook_that_asks_for_what_transformers_has_not_logged_yet_hears_what_to_do(
    training: Any,
) -> None:
    training.logging_steps = 5
    with pytest.raises(FetchError) as caught:
        training.fit([Notes()])
    assert "give TrainingArguments(logging_steps=1)" in "".join(caught.value.__notes__)


@pytest.fixture
def ignite() -> Any:
    """(`IgniteHooks`, its notes, an engine, Ignite's events.)"""
    engines = pytest.importorskip("ignite.engine")
    from asynchooks.adapters import IgniteHooks

    notes = Notes("output")
    engine = engines.Engine(lambda engine, batch: float(batch))
    return IgniteHooks([notes]), notes, engine, engines.Events


@pytest.mark.parametrize("is_first", [True, False])
def test_what_ignite_saves_when_it_has_completed_has_the_states_of_hooks(
    is_first: bool, ignite: Any
) -> None:
    hooks, notes, engine, events = ignite
    saved = []

    def save() -> None:
        saved.append(hooks.state_dict()["hooks"])

    if is_first:
        engine.add_event_handler(events.COMPLETED, save)
    hooks.attach(engine)
    if not is_first:
        engine.add_event_handler(events.COMPLETED, save)
    engine.run(range(10))
    assert repr(notes.total_at_end) in saved[0]


def test_ignites_engine_may_be_interrupted_and_go_on(ignite: Any) -> None:
    hooks, notes, engine, events = ignite
    hooks.attach(engine)
    engine.add_event_handler(events.ITERATION_COMPLETED(once=3), lambda: engine.interrupt())
    engine.run(range(5))
    assert (notes.steps, notes.log.count("end")) == ([1, 2, 3], 0)
    engine.run(range(5))
    assert (notes.steps, notes.log.count("end")) == ([1, 2, 3, 4, 5], 1)
    engine.run(range(5), max_epochs=2)
    assert notes.steps[5:] == [6, 7, 8, 9, 10]


def test_what_is_no_engine_is_refused(ignite: Any) -> None:
    with pytest.raises(TypeError, match=r"ignite\.engine\.Engine"):
        ignite[0].attach(3)
