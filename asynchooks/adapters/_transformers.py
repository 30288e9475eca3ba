"""TrainerHooks: hooks in the Trainer of Hugging Face's transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from anyio.from_thread import BlockingPortal
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from .._errors import FetchError, add_note
from .._hook import AnyHook
from ._driver import LoopDriver, TrainerSession, TrainingBlock

_STATE = "TrainerHooks"


class TrainerHooks(TrainingBlock, TrainerCallback, ExportableState):  # type: ignore[misc]
    """A callback of transformers' `Trainer` that calls hooks around each optimizer step.

    Fetches are names of the logs ("loss", "grad_norm", "learning_rate"). The Trainer logs at some
    steps only; at the others, hooks get the last ones: with `logging_steps=1` those of each step.
    The global step is `state.global_step`, the optimizer's steps: batches whose gradients are
    accumulated are one. A hook that asks to stop, a StopAtStepHook at its step, and the end of a
    hook's input end `train` after the step. States of hooks are in `trainer_state.json` of the
    Trainer's checkpoints, and `train(resume_from_checkpoint=...)` gives them back; leave
    `restore_callback_states_from_checkpoint=False`, as the Trainer cannot make new hooks. A Trainer
    takes one of these callbacks.

    `with TrainerHooks(hooks) as callback:` around `train` calls `on_error` of hooks when `train`
    fails; without it they get only their own errors.

    Args:
        hooks: an iterable of `SessionRunHook`; may be used for one `train` after the other.
        portal: anyio's blocking portal to an event loop of yours; None starts one (asyncio).

    Raises:
        BaseException: out of `train`: what a hook raised, with a note of which it was.
        ValueError: out of `train`: the Trainer has another of these callbacks.

    Example:
        callback = TrainerHooks([NanTensorHook("loss"), StopAtStepHook(last_step=1000)])
        trainer = transformers.Trainer(model, arguments, callbacks=[callback])
    """

    def __init__(self, hooks: Iterable[AnyHook], *, portal: BlockingPortal | None = None) -> None:
        self._driver = LoopDriver(hooks, portal, "the Trainer")
        self._logs: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._logs = {}
        saved = (state.stateful_callbacks or {}).get(_STATE)
        num_callbacks = len(saved) if isinstance(saved, list) else 1  # a list of those of one type
        if num_callbacks > 1:
            raise ValueError(
                f"the Trainer has {num_callbacks} TrainerHooks, whose states it cannot tell apart; "
                "give all hooks to one"
            )
        if state.global_step > 0 and saved is not None:
            attributes = saved.get("attributes") if isinstance(saved, dict) else None
            found = attributes.get("hooks") if isinstance(attributes, dict) else saved
            self._driver.resume_from(found)

        def request_stop() -> None:
            control.should_training_stop = True

        self._driver.begin(
            TrainerSession(
                lambda: int(state.global_step),
                request_stop,
                "the Trainer",
                model=kwargs.get("model"),
                optimizer=kwargs.get("optimizer"),
                state=state,
            )
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._complete()
        self._driver.before_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not control.should_log:  # else the logs of this step come next
            self._complete()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._logs |= logs or {}
        self._complete()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._complete()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._complete()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._complete()
        self._driver.end()
        if state.stateful_callbacks is not None:  # for `save_state`, which asks no callback
            state.stateful_callbacks[_STATE] = self.state()

    def _complete(self) -> None:
        """Call after_run of the step, if one has begun."""
        try:
            self._driver.after_step(self._logs)
        except FetchError as error:
            add_note(
                error,
                "hooks get what the Trainer has logged so far: give TrainingArguments("
                "logging_steps=1), or logging_first_step=True",
            )
            raise

    def state(self) -> dict[str, Any]:
        """For the Trainer, which saves it with each checkpoint."""
        return {"args": {}, "attributes": {"hooks": self._driver.state()}}
