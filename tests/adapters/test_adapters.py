"""Hooks in Lightning, transformers and Ignite: order, stops, resuming, errors, side tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.from_thread import start_blocking_portal

from asynchooks import (
    DamagedCheckpointError,
    FeedFnHook,
    FetchError,
    FinalOpsHook,
    HistoryHook,
    NanTensorHook,
    PreemptionHook,
    SessionRunContext,
    SessionRunHook,
    StepCounterHook,
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
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(params=LIBRARIES)
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    pytest.importorskip(request.param)
    return LIBRARIES[request.param](tmp_path)


@pytest.fixture(params=["asyncio", "trio"])
def portal(request: pytest.FixtureRequest) -> Iterator[Any]:
    with start_blocking_portal(request.param) as opened:
        yield opened


def test_each_moment_is_called_in_order_with_the_step_and_the_loss(training: Any) -> None:
    notes = Notes(training.fetch)
    training.fit([notes])
    runs = ["before_run", "after_run"] * (2 * STEPS)
    assert notes.log == ["begin", "after_create_session 0", *runs, "end"]
    assert notes.steps == list(range(1, 2 * STEPS + 1))
    assert sum(notes.losses[STEPS:]) < sum(notes.losses[:STEPS])
    assert notes.errors == []


def test_a_hook_knows_in_after_run_that_the_step_is_made(training: Any) -> None:
    known: list[bool] = []

    class Asks(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            known.append(run_context.step_is_made)

        async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
            known.append(run_context.step_is_made)

    training.fit([Asks(), StopAtStepHook(last_step=2)])
    assert known[:4] == [False, True] * 2


@pytest.mark.parametrize("last_step", [1, STEPS - 1, STEPS, STEPS + 2])
def test_a_stop_at_a_step_ends_training_after_that_step(training: Any, last_step: int) -> None:
    notes = Notes(training.fetch)
    training.fit([notes, StopAtStepHook(last_step=last_step)], epochs=3)
    assert training.steps == notes.steps[-1] == last_step
    assert notes.log[-1] == "end"


def test_a_resumed_training_gives_what_the_whole_one_gives(tmp_path: Path, training: Any) -> None:
    kind = type(training)
    whole = kind(tmp_path / "whole")
    notes = Notes(whole.fetch)
    whole.fit([notes, StopAtStepHook(last_step=2 * STEPS)], epochs=3)
    training.fit([Notes(training.fetch)], epochs=1)
    resumed = kind(training._path)
    later = Notes(resumed.fetch)
    resumed.fit([later, StopAtStepHook(last_step=2 * STEPS)], epochs=3, resume=True)
    assert f"after_create_session {STEPS}" in later.log
    assert later.steps == list(range(STEPS + 1, 2 * STEPS + 1))
    assert later.losses == notes.losses[STEPS:]
    assert later.total == notes.total
    assert torch.equal(resumed.module.weight, whole.module.weight)


def test_a_stop_that_is_reached_already_makes_no_step(training: Any) -> None:
    training.fit([Notes(training.fetch)], epochs=1)
    resumed = type(training)(training._path)
    notes = Notes(resumed.fetch)
    resumed.fit([notes, StopAtStepHook(last_step=STEPS)], epochs=3, resume=True)
    assert notes.steps == []
    assert notes.log[-1] == "end"


def test_an_error_of_a_hook_leaves_as_itself_and_reaches_the_others(training: Any) -> None:
    notes = Notes(training.fetch)
    with pytest.raises(BrokenError) as caught:
        training.fit([notes, BreaksAt(3)])
    assert notes.errors == [caught.value]
    assert "BreaksAt" in "".join(caught.value.__notes__)
    assert notes.steps == [1, 2, 3]
    notes.log.clear()
    training.fit([notes])  # the hooks can be used again
    assert notes.log[0] == "begin"
    assert notes.log[-1] == "end"


def states_in(training: Any) -> str:
    """The states of hooks as the library saves them."""
    adapter = training.adapter
    given = adapter.state()["attributes"] if hasattr(adapter, "state") else adapter.state_dict()
    text: str = given["hooks"]
    return text


def test_what_is_saved_after_the_end_has_the_states_of_hooks(training: Any) -> None:
    notes = Notes(training.fetch)
    training.fit([notes])
    assert notes.log[-1] == "end"
    assert repr(notes.total) in states_in(training)

    before, notes.total = notes.total, 0.5  # it is as of the last step
    assert repr(before) in states_in(training)


class Ending(Notes):
    """Its end is no part of training."""

    async def end(self, session: Any) -> None:
        self.total = -1.0


def test_what_is_saved_after_the_end_is_as_of_the_last_step(training: Any) -> None:
    notes = Ending(training.fetch)
    training.fit([notes])
    assert notes.total == -1.0
    assert repr(sum(notes.losses)) in states_in(training)


def test_what_is_saved_after_an_error_has_the_states_of_hooks(training: Any) -> None:
    notes = Notes(training.fetch)
    with pytest.raises(BrokenError):
        training.fit([notes, BreaksAt(3)])
    assert repr(notes.total) in states_in(training)


def test_what_lightning_saves_because_of_an_error_has_the_states_of_hooks(tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    training, notes = InLightning(tmp_path), Notes()
    training.more_callbacks = [lightning.callbacks.OnExceptionCheckpoint(tmp_path)]
    with pytest.raises(BrokenError):
        training.fit([notes, BreaksAt(3)])
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert repr(notes.total) in saved["callbacks"]["LightningHooks"]["hooks"]


def test_what_lightning_loads_to_predict_is_not_what_training_goes_on_from(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    training, notes = InLightning(tmp_path), Notes()
    training.fit([notes], epochs=1)
    total, notes.total = notes.total, 0.5
    trainer = training.trainer
    trainer.predict(
        trainer.lightning_module, training.loader,
        ckpt_path=tmp_path / "last.ckpt", weights_only=False,
    )  # fmt: skip
    notes.log.clear()
    training.reuses_adapter = True
    training.fit([], epochs=1)
    assert notes.total == pytest.approx(0.5 + sum(notes.losses) - total)


def test_what_transformers_save_state_writes_after_the_end_is_as_of_the_last_step(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    training, notes = InTransformers(tmp_path), Notes()
    training.fit([notes, StopAtStepHook(last_step=8)])  # six steps are an epoch, which is saved
    training.trainer.save_state()
    saved = json.loads((tmp_path / "trainer_state.json").read_text())
    assert repr(notes.total) in saved["stateful_callbacks"]["TrainerHooks"]["attributes"]["hooks"]


@pytest.mark.parametrize(
    "crafted", [5, [], {}, {"attributes": {}}, {"attributes": {"hooks": "\ud800"}}]
)
def test_a_crafted_state_in_transformers_checkpoint_is_damage(
    tmp_path: Path, crafted: object
) -> None:
    pytest.importorskip("transformers")
    training = InTransformers(tmp_path)
    training.fit([Notes()], epochs=1)
    path = tmp_path / "checkpoint-6" / "trainer_state.json"
    state = json.loads(path.read_text())
    state["stateful_callbacks"]["TrainerHooks"] = crafted
    path.write_text(json.dumps(state))
    with pytest.raises(DamagedCheckpointError, match="saved state of the hooks is damaged"):
        training.fit([Notes()], epochs=2, resume=True)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_ignite_saves_when_it_has_completed_has_the_states_of_hooks(
    is_first: bool, tmp_path: Path
) -> None:
    engines = pytest.importorskip("ignite.engine")
    handlers = pytest.importorskip("ignite.handlers")
    from asynchooks.adapters import IgniteHooks

    engine, notes = engines.Engine(lambda engine, batch: float(batch)), Notes("output")
    hooks = IgniteHooks([notes])
    saver = handlers.DiskSaver(str(tmp_path))
    save = handlers.Checkpoint({"engine": engine, "hooks": hooks}, saver, filename_pattern="e.pt")
    if is_first:
        engine.add_event_handler(engines.Events.COMPLETED, save)
    hooks.attach(engine)
    if not is_first:
        engine.add_event_handler(engines.Events.COMPLETED, save)
    engine.run(range(10))
    assert repr(notes.total) in torch.load(tmp_path / "e.pt", weights_only=False)["hooks"]["hooks"]


def test_each_fit_runs_so_many_steps(training: Any) -> None:
    """Also where one adapter is used for one fit after the other."""
    notes = Notes(training.fetch)
    for num in (1, 2):
        training.fit([notes, StopAtStepHook(num_steps=STEPS + 1)], epochs=3)
        training.reuses_adapter = True
        assert len(notes.steps) == num * (STEPS + 1)


def test_an_error_of_the_training_reaches_the_hooks(training: Any) -> None:
    notes, num_calls = Notes(training.fetch), 0

    def break_third(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise BrokenError

    training.module.register_forward_hook(break_third)
    with pytest.raises(BrokenError) as caught:
        training.fit([notes])
    assert notes.errors == [caught.value]
    assert notes.steps == [1, 2]


def test_a_hook_that_feeds_is_refused(training: Any) -> None:
    with pytest.raises(ValueError, match="feeds its batches itself"):
        training.fit([FeedFnHook(lambda: {"x": 1})])


def test_a_loss_that_is_not_there_names_the_hook_and_what_there_is(training: Any) -> None:
    with pytest.raises(FetchError, match=f"accuracy.*{training.fetch}"):
        training.fit([Notes("accuracy")])


def test_hooks_of_ours_work(training: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "asynchooks")
    training.fit([NanTensorHook(training.fetch), StepCounterHook(every_n_steps=5)])
    assert "global_step/sec" in caplog.text


@pytest.mark.parametrize("library", ["pytorch_lightning", "transformers"])
def test_accumulated_batches_count_as_the_optimizer_steps(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    training = LIBRARIES[library](tmp_path, accumulate=2)
    notes = Notes(training.fetch)
    training.fit([notes, StopAtStepHook(last_step=4)], epochs=3)
    assert training.steps == notes.steps[-1] == 4
    assert sorted(set(notes.steps)) in ([1, 2, 3, 4], [0, 1, 2, 3, 4])


class AsksFromATask(SessionRunHook):
    """Stops training from a task beside it, once that has seen a step."""

    def __init__(self) -> None:
        self.ended = False

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self._seen = anyio.Event()
        coord.start_soon(self._ask, coord)

    async def _ask(self, coord: Any) -> None:
        await self._seen.wait()
        coord.request_stop()
        self.ended = True

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        if run_context.global_step.value == 3:
            self._seen.set()
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("library", LIBRARIES)
def test_hooks_run_in_a_portal_of_the_user_with_side_tasks(
    library: str, portal: Any, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    training = LIBRARIES[library](tmp_path, portal=portal)
    asks = AsksFromATask()
    training.fit([asks], epochs=20)
    assert asks.ended
    assert 3 <= training.steps < 20 * STEPS


def test_what_is_no_engine_is_refused() -> None:
    pytest.importorskip("ignite")
    from asynchooks.adapters import IgniteHooks

    with pytest.raises(TypeError, match=r"ignite\.engine\.Engine"):
        IgniteHooks([]).attach(3)


def test_a_second_callback_in_one_trainer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from asynchooks.adapters import TrainerHooks

    training = LIBRARIES["transformers"](tmp_path)
    training.more_callbacks = [TrainerHooks([])]
    with pytest.raises(ValueError, match="2 TrainerHooks.*give all hooks to one"):
        training.fit([Notes("loss")])


def asks_the_library(library: str, step: int, error: BaseException | None) -> Any:
    """A callback that stops training as users of the library do, or raises, after a step."""
    if library == "pytorch_lightning":
        import pytorch_lightning

        base: Any = pytorch_lightning.Callback

        class Callback(base):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == step:
                    if error is not None:
                        raise error
                    trainer.should_stop = True

        return Callback()
    import transformers

    base = transformers.TrainerCallback

    class Stops(base):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                if error is not None:
                    raise error
                control.should_training_stop = True

    return Stops()


WITH_CALLBACKS = ["pytorch_lightning", "transformers"]


@pytest.mark.parametrize("library", WITH_CALLBACKS)
def test_a_stop_of_the_library_ends_the_hooks_once_after_its_last_step(
    library: str, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    training, notes = LIBRARIES[library](tmp_path), Notes()
    training.more_callbacks = [asks_the_library(library, 3, None)]
    training.fit([notes])
    assert notes.steps == [1, 2, 3]
    assert notes.log.count("end") == 1
    assert notes.log[-1] == "end"
    assert notes.errors == []


@pytest.mark.parametrize("library", WITH_CALLBACKS)
@pytest.mark.parametrize("error", [BrokenError("theirs"), KeyboardInterrupt()], ids=type)
def test_an_error_of_another_callback_reaches_the_hooks_which_can_be_used_again(
    library: str, error: BaseException, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    training, notes = LIBRARIES[library](tmp_path), Notes()
    training.more_callbacks = [asks_the_library(library, 3, error)]
    with pytest.raises((type(error), SystemExit)):  # Lightning exits at a KeyboardInterrupt
        training.fit([notes])
    assert notes.errors == [error]
    assert "end" not in notes.log
    training.more_callbacks = ()
    notes.steps.clear()
    training.fit([notes], epochs=1)
    assert notes.steps == list(range(1, STEPS + 1))
    assert notes.log[-1] == "end"


def test_the_last_step_of_a_training_is_among_the_values(training: Any) -> None:
    """Whatever ends it; a trainer says of no step beforehand that it is the last one."""
    history, final = HistoryHook(training.fetch, every_n_steps=5), FinalOpsHook(training.fetch)
    training.fit([history, final])
    assert [row["step"] for row in history.rows] == [1, 5, 10, 2 * STEPS]
    assert float(final.final_ops_values) == history.rows[-1][training.fetch]
    training.fit([history, StopAtStepHook(last_step=3)])
    assert history.rows[-1]["step"] == 3


def test_a_trainer_that_trains_for_no_epoch_leaves_the_hooks_in_order(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    notes = Notes()
    InTransformers(tmp_path).fit([notes], epochs=0)
    assert notes.log == ["begin", "after_create_session 0", "end"]


@pytest.mark.parametrize("library", WITH_CALLBACKS)
def test_a_trainer_may_be_used_after_its_end(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    training, notes = LIBRARIES[library](tmp_path), Notes()
    training.fit([notes], epochs=1)
    log, trainer = [*notes.log], training.trainer
    if library == "transformers":
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


def test_ignites_engine_may_be_interrupted_and_go_on() -> None:
    engines = pytest.importorskip("ignite.engine")
    from asynchooks.adapters import IgniteHooks

    engine, notes = engines.Engine(lambda engine, batch: float(batch)), Notes("output")
    IgniteHooks([notes]).attach(engine)
    events = engines.Events
    engine.add_event_handler(events.ITERATION_COMPLETED(once=3), lambda: engine.interrupt())
    engine.run(range(5))
    assert (notes.steps, notes.log.count("end")) == ([1, 2, 3], 0)
    engine.run(range(5))
    assert (notes.steps, notes.log.count("end")) == ([1, 2, 3, 4, 5], 1)
    engine.run(range(5), max_epochs=2)
    assert notes.steps[5:] == [6, 7, 8, 9, 10]


def test_a_hook_that_asks_for_what_transformers_has_not_logged_yet_hears_what_to_do(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    from asynchooks.adapters import TrainerHooks

    arguments = transformers.TrainingArguments(
        str(tmp_path), logging_steps=5, use_cpu=True, report_to="none", disable_tqdm=True
    )
    rows = [{"x": float(x)} for x in range(9)]

    class Module(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            return {"loss": (self.weight * x).mean()}

    with TrainerHooks([Notes()]) as callback:
        trainer = transformers.Trainer(
            Module(), arguments, train_dataset=rows, callbacks=[callback]
        )
        with pytest.raises(FetchError) as caught:
            trainer.train()
    assert "give TrainingArguments(logging_steps=1)" in "".join(caught.value.__notes__)


def test_a_host_stops_a_training_of_another_library_by_preempt(training: Any) -> None:
    hook, notes = PreemptionHook(signals=()), Notes(training.fetch)

    def preempt(*_: Any) -> None:
        hook.preempt("the host ends")

    training.module.register_forward_hook(preempt)
    training.fit([hook, notes], epochs=500)
    assert training.steps < 500 * STEPS
    assert notes.log[-1] == "end"
