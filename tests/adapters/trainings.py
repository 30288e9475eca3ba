"""The same small training in three libraries, with hooks that note what they are called for."""

import logging
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from asynchooks import SessionRunArgs, SessionRunHook

NUM_ROWS, BATCH = 24, 4
X = torch.linspace(-1.0, 1.0, NUM_ROWS).reshape(-1, 1)
Y = 3.0 * X + 1.0


class Notes(SessionRunHook):
    """Notes each moment, the step and the loss; its sum of losses is a state, until its end."""

    def __init__(self, fetch: str = "loss") -> None:
        self.log: list[str] = []
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.total = self.total_at_end = 0.0
        self.errors: list[BaseException] = []
        self._fetch = fetch

    async def begin(self) -> None:
        self.log.append("begin")

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self.log.append(f"after_create_session {session.global_step.value}")

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        assert not run_context.step_is_made
        self.log.append("before_run")
        return SessionRunArgs(self._fetch)

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        assert run_context.step_is_made
        self.log.append("after_run")
        self.steps.append(run_context.global_step.value)
        self.losses.append(float(run_values.results))
        self.total += self.losses[-1]

    async def end(self, session: Any) -> None:
        self.log.append("end")
        self.total_at_end, self.total = self.total, -1.0  # which is no part of training

    async def on_error(self, session: Any, exception: BaseException) -> None:
        self.errors.append(exception)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.total = state["total"]


class BreaksAt(SessionRunHook):
    def __init__(self, step: int) -> None:
        self._step = step

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        if run_context.global_step.value == self._step:
            raise BrokenError


class BrokenError(Exception):
    pass


class Training:
    """`module` is what it trains; the library's own place for what it saves is `path`."""

    fetch = "loss"
    more_callbacks: Sequence[Any] = ()
    saves = False  # each epoch, which takes transformers a while; the others always do
    accumulate = 1
    portal: Any = None
    kind: str
    adapter: Any = None
    steps: int

    def __init__(self, path: Path) -> None:
        self.path = path
        torch.manual_seed(0)
        self.module = torch.nn.Linear(1, 1)

    def fit(
        self, hooks: Iterable[SessionRunHook] = (), epochs: int = 2, resume: bool = False
    ) -> None:
        """Without hooks, with the adapter of the fit before it."""
        if hooks:
            adapter = getattr(import_module("asynchooks.adapters"), self.kind)
            self.adapter = adapter(hooks, portal=self.portal)
        self.train(epochs, resume)

    def train(self, epochs: int, resume: bool) -> None:
        raise NotImplementedError

    def states(self) -> str:
        """The states of hooks as the library saves them."""
        text: str = self.adapter.state_dict()["hooks"]
        return text


def loss_of(module: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.mse_loss(module(x), y)


class InLightning(Training):
    kind = "LightningHooks"

    def train(self, epochs: int, resume: bool) -> None:
        import pytorch_lightning as lightning

        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        base = lightning.LightningModule

        class Module(base):  # type: ignore[misc, valid-type]
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return loss_of(self.inner, *batch)

            def predict_step(self, batch: Any, batch_idx: int) -> Any:
                return self.inner(batch[0])

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=0.05)

        module = Module()
        module.inner = self.module
        saver = lightning.callbacks.ModelCheckpoint(self.path, save_last=True, every_n_epochs=1)
        self.trainer = lightning.Trainer(
            max_epochs=epochs, callbacks=[self.adapter, saver, *self.more_callbacks],
            accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, accumulate_grad_batches=self.accumulate,
        )  # fmt: skip
        self.loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), BATCH)
        place = self.path / "last.ckpt" if resume else None
        self.trainer.fit(module, self.loader, ckpt_path=place, weights_only=False)
        self.steps = self.trainer.global_step

    def stop(self) -> None:
        self.trainer.should_stop = True


class InTransformers(Training):
    kind = "TrainerHooks"
    logging_steps = 1

    def train(self, epochs: int, resume: bool) -> None:
        import transformers

        class Module(torch.nn.Module):  # type: ignore[misc]
            def forward(self, x: Any, y: Any) -> Any:
                return {"loss": loss_of(self.inner, x, y)}

        module = Module()
        module.inner = self.module
        arguments = transformers.TrainingArguments(
            output_dir=str(self.path), per_device_train_batch_size=BATCH, use_cpu=True,
            num_train_epochs=epochs, logging_steps=self.logging_steps,
            save_strategy="epoch" if self.saves else "no", report_to="none", disable_tqdm=True,
            gradient_accumulation_steps=self.accumulate, learning_rate=0.05,
            lr_scheduler_type="constant", seed=1,
        )  # fmt: skip
        rows = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
        with self.adapter as callback:
            self.trainer = trainer = transformers.Trainer(
                module, arguments, train_dataset=rows, callbacks=[callback, *self.more_callbacks]
            )
            trainer.train(resume_from_checkpoint=resume)
        self.steps = trainer.state.global_step

    def states(self) -> str:
        text: str = self.adapter.state()["attributes"]["hooks"]
        return text

    def stop(self) -> None:
        self.trainer.control.should_training_stop = True


class InIgnite(Training):
    fetch = "output"
    kind = "IgniteHooks"

    def train(self, epochs: int, resume: bool) -> None:
        from ignite.engine import Engine, Events
        from ignite.handlers import Checkpoint, DiskSaver

        optimizer = torch.optim.Adam(self.module.parameters(), lr=0.05)

        def update(engine: Any, batch: Any) -> float:
            optimizer.zero_grad()
            loss = loss_of(self.module, *batch)
            loss.backward()
            optimizer.step()
            return float(loss)

        engine = Engine(update)
        with self.adapter as attached:
            attached.attach(engine)
            parts = {
                "module": self.module, "optimizer": optimizer, "engine": engine, "hooks": attached
            }  # fmt: skip
            saver = Checkpoint(
                parts, DiskSaver(str(self.path), require_empty=False), filename_pattern="last.pt"
            )
            engine.add_event_handler(Events.EPOCH_COMPLETED, saver)
            if resume:
                Checkpoint.load_objects(parts, torch.load(self.path / "last.pt"))
            rows = torch.utils.data.TensorDataset(X, Y)
            engine.run(torch.utils.data.DataLoader(rows, BATCH), max_epochs=epochs)
        self.steps = engine.state.iteration
