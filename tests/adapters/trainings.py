"""The same small training in three libraries, with hooks that note what they are called for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from asynchooks import SessionRunArgs, SessionRunHook

NUM_ROWS, BATCH = 24, 4
X = torch.linspace(-1.0, 1.0, NUM_ROWS).reshape(-1, 1)
Y = 3.0 * X + 1.0


def new_module() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(1, 1)


class Notes(SessionRunHook):
    """Notes each moment, the step and the loss; its sum of losses is a state."""

    def __init__(self, fetch: str = "loss") -> None:
        self.log: list[str] = []
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.total = 0.0
        self.errors: list[BaseException] = []
        self._fetch = fetch

    async def begin(self) -> None:
        self.log.append("begin")

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self.log.append(f"after_create_session {session.global_step.value}")

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        self.log.append("before_run")
        return SessionRunArgs(self._fetch)

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.log.append("after_run")
        self.steps.append(run_context.global_step.value)
        self.losses.append(float(run_values.results))
        self.total += self.losses[-1]

    async def end(self, session: Any) -> None:
        self.log.append("end")

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


class InLightning:
    """One `Trainer.fit`; `module` is what it trains."""

    fetch = "loss"
    more_callbacks: Sequence[Any] = ()
    reuses_adapter = False
    adapter: Any

    def __init__(self, path: Path, *, accumulate: int = 1, portal: Any = None) -> None:
        self._path, self._accumulate, self._portal = path, accumulate, portal
        self.module = new_module()

    def fit(self, hooks: Iterable[SessionRunHook], epochs: int = 2, resume: bool = False) -> None:
        import pytorch_lightning as lightning

        from asynchooks.adapters import LightningHooks

        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        inner = self.module

        base: Any = lightning.LightningModule

        class Module(base):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return torch.nn.functional.mse_loss(self.inner(batch[0]), batch[1])

            def predict_step(self, batch: Any, batch_idx: int) -> Any:
                return self.inner(batch[0])

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=0.05)

        if not self.reuses_adapter:
            self.adapter = LightningHooks(hooks, portal=self._portal)
        saver = lightning.callbacks.ModelCheckpoint(self._path, save_last=True, every_n_epochs=1)
        self.trainer = trainer = lightning.Trainer(
            max_epochs=epochs, callbacks=[self.adapter, saver, *self.more_callbacks],
            accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, accumulate_grad_batches=self._accumulate,
        )  # fmt: skip
        rows = torch.utils.data.TensorDataset(X, Y)
        self.loader = loader = torch.utils.data.DataLoader(rows, BATCH)
        place = self._path / "last.ckpt" if resume else None
        trainer.fit(Module(), loader, ckpt_path=place, weights_only=False)
        self.steps = trainer.global_step


class InTransformers:
    fetch = "loss"
    more_callbacks: Sequence[Any] = ()
    reuses_adapter = False
    adapter: Any

    def __init__(self, path: Path, *, accumulate: int = 1, portal: Any = None) -> None:
        self._path, self._accumulate, self._portal = path, accumulate, portal
        self.module = new_module()

    def fit(self, hooks: Iterable[SessionRunHook], epochs: int = 2, resume: bool = False) -> None:
        import transformers

        from asynchooks.adapters import TrainerHooks

        inner = self.module

        base: Any = torch.nn.Module

        class Module(base):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Any, y: Any) -> Any:
                return {"loss": torch.nn.functional.mse_loss(self.inner(x), y)}

        arguments = transformers.TrainingArguments(
            output_dir=str(self._path), per_device_train_batch_size=BATCH, use_cpu=True,
            num_train_epochs=epochs, logging_steps=1, save_strategy="epoch", report_to="none",
            disable_tqdm=True, gradient_accumulation_steps=self._accumulate, learning_rate=0.05,
            lr_scheduler_type="constant", seed=1,
        )  # fmt: skip
        rows = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
        if not self.reuses_adapter:
            self.adapter = TrainerHooks(hooks, portal=self._portal)
        with self.adapter as callback:
            self.trainer = trainer = transformers.Trainer(
                Module(), arguments, train_dataset=rows,
                callbacks=[callback, *self.more_callbacks],
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=resume)
        self.steps = trainer.state.global_step


class InIgnite:
    fetch = "output"
    reuses_adapter = False
    adapter: Any

    def __init__(self, path: Path, *, accumulate: int = 1, portal: Any = None) -> None:
        self._path, self._portal = path, portal
        self.module = new_module()

    def fit(self, hooks: Iterable[SessionRunHook], epochs: int = 2, resume: bool = False) -> None:
        from ignite.engine import Engine, Events
        from ignite.handlers import Checkpoint, DiskSaver

        from asynchooks.adapters import IgniteHooks

        optimizer = torch.optim.Adam(self.module.parameters(), lr=0.05)

        def update(engine: Any, batch: Any) -> float:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self.module(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return float(loss)

        engine = Engine(update)
        rows = torch.utils.data.TensorDataset(X, Y)
        if not self.reuses_adapter:
            self.adapter = IgniteHooks(hooks, portal=self._portal)
        with self.adapter as attached:
            attached.attach(engine)
            parts = {
                "module": self.module, "optimizer": optimizer, "engine": engine, "hooks": attached
            }  # fmt: skip
            saver = Checkpoint(
                parts, DiskSaver(str(self._path), require_empty=False), filename_pattern="last.pt"
            )
            engine.add_event_handler(Events.EPOCH_COMPLETED, saver)
            if resume:
                Checkpoint.load_objects(parts, torch.load(self._path / "last.pt"))
            engine.run(torch.utils.data.DataLoader(rows, BATCH), max_epochs=epochs)
        self.steps = engine.state.iteration
