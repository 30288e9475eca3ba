"""Training inside a web service: status, live metrics and a stop over HTTP.

The model trains in the lifespan of a FastAPI application, on the event loop of the server. Open
the address that it logs: a page shows the loss while it falls. GET /status says how far training
has come, GET /events streams values as server-sent events, POST /stop ends training and leaves
the server up. SIGTERM and Ctrl-C end the streams and the training, save a last checkpoint, and
then end the server. Needs: pip install fastapi uvicorn
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType
from typing import Annotated, Any

import anyio
import numpy as np
import uvicorn
from anyio.abc import TaskStatus
from fastapi import FastAPI, Query
from fastapi.responses import HTMLResponse, StreamingResponse

import asynchooks as ah

logger = logging.getLogger("example")

PAGE = """<!doctype html><title>Training</title>
<h1>Step <span id="step">0</span>, loss <span id="loss">?</span></h1>
<script>
  const source = new EventSource("/events?every=20");
  source.onmessage = (event) => {
    const values = JSON.parse(event.data);
    document.getElementById("step").textContent = values.step;
    document.getElementById("loss").textContent = values.loss?.toFixed(4) ?? "not finite";
  };
  source.addEventListener("end", () => source.close());  // else it connects again
</script>
"""


class Model:
    """Least squares by gradient descent; `weights` is float64 of shape (50,)."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(seed=0)
        self.inputs = self.rng.normal(size=(4096, 50))
        self.targets = self.inputs @ self.rng.normal(size=50)
        self.weights = np.zeros(50)

    async def step(self) -> dict[str, float]:
        rows = self.rng.integers(4096, size=64)
        error = self.inputs[rows] @ self.weights - self.targets[rows]
        self.weights -= 0.01 * self.inputs[rows].T @ error / 64
        await anyio.sleep(0.01)  # so that the example leaves the processor to others
        return {"loss": float(np.mean(error**2))}


class Latest(ah.SessionRunHook):
    """The newest values, for any task that wants to see them."""

    def __init__(self) -> None:
        self.values: dict[str, float | None] = {"step": 0, "loss": None}

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        return ah.SessionRunArgs("loss")

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        loss = run_values.results
        # JSON has no NaN and no infinity
        self.values["loss"] = loss if math.isfinite(loss) else None
        self.values["step"] = run_context.global_step.value


class Training:
    """One training: its session, its newest values, and the error that ended it, if any."""

    def __init__(self, directory: str) -> None:
        model, self.latest = Model(), Latest()
        saver = ah.StateDictSaver(model={"weights": model.weights})
        self.preemption = ah.PreemptionHook(signals=())  # the server has the signals
        hooks = [
            self.preemption,
            self.latest,
            ah.CheckpointSaverHook(directory, save_secs=60, saver=saver, background=True),
        ]
        self.session = ah.MonitoredSession(hooks, ah.FunctionSessionCreator(model.step))
        self.error: Exception | None = None

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        is_open = False
        try:
            async with self.session:
                is_open = True
                task_status.started()
                while not self.session.should_stop():
                    await self.session.run([])
        except Exception as error:
            if not is_open:  # the server does not start
                raise
            self.error = error
            logger.exception("training failed; the server stays up")
        step, reason = self.session.global_step.value, self.session.stop_reason
        logger.info("training ended at step %d: %s", step, reason)

    def status(self) -> dict[str, Any]:
        reason = self.session.stop_reason
        return {
            "is_training": not self.session.should_stop(),
            "stop_reason": None if reason is None else str(reason),
            "error": None if self.error is None else repr(self.error),
            **self.latest.values,
        }

    async def events(self, every: int) -> AsyncIterator[str]:
        """Server-sent events: values every so many steps, and one that says that all is over."""
        step = 0
        while True:
            try:
                step = await self.session.global_step.wait_for(step + every)
            except ah.StopTraining:  # the stream ends with the training
                break
            yield f"data: {json.dumps(self.latest.values)}\n\n"
        yield "event: end\ndata: {}\n\n"


def make_app(training: Training) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            await group.start(training.run)  # requests are served when the session is open
            yield
            training.preemption.preempt("the server shuts down")

    app = FastAPI(lifespan=lifespan)

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE

    @app.get("/status")
    async def status() -> dict[str, Any]:
        return training.status()

    @app.get("/events")
    async def events(every: Annotated[int, Query(ge=1)] = 10) -> StreamingResponse:
        return StreamingResponse(training.events(every), media_type="text/event-stream")

    @app.post("/stop")
    async def stop() -> dict[str, Any]:
        training.session.request_stop("POST /stop")
        return training.status()

    return app


class Server(uvicorn.Server):
    """Stops training at a signal: uvicorn waits for open streams before it ends the lifespan."""

    def __init__(self, config: uvicorn.Config, training: Training) -> None:
        super().__init__(config)
        self.training = training

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.training.preemption.preempt(f"the server got {signal.Signals(sig).name}")
        super().handle_exit(sig, frame)


def leave(sig: int, frame: FrameType | None) -> None:
    """Has blocks end as usual: a signal's own way would leave the temporary directory behind."""
    raise SystemExit(128 + sig)


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, leave)  # uvicorn raises the signal again when the server has ended
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="for checkpoints; a temporary one by default")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as temporary:
        own_training = Training(arguments.directory or temporary)
        config = uvicorn.Config(make_app(own_training), port=arguments.port)
        Server(config, own_training).run()
