"""Training inside a web service: start, status, live chart, stop and cancel over HTTP.

The model trains in a FastAPI application, on the event loop of the server. The page at / shows the
loss while it falls. POST /start opens a session, which goes on from the last checkpoint, GET
/status says how far it has come, GET /events streams its statuses as server-sent events, GET
/history gives the rows of the chart. POST /stop ends training and saves it; POST /cancel ends it at
once, without a last checkpoint. SIGTERM and Ctrl-C end the training and with it the streams, save a
last checkpoint, and then end the server. Needs: pip install fastapi uvicorn
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

import anyio
import numpy as np
import uvicorn
from anyio.abc import TaskGroup, TaskStatus
from fastapi import FastAPI, HTTPException
from fastapi.responses import HTMLResponse, StreamingResponse

import asynchooks as ah
from asynchooks.metrics import steps_per_sec

logger = logging.getLogger("example")

PAGE = """<!doctype html><meta charset="utf-8"><title>Training</title>
<h1 id="title">Training</h1>
<button onclick="post('start')">Start</button>
<button onclick="post('stop')">Stop and save</button>
<button onclick="post('cancel')">Cancel</button>
<p><svg viewBox="0 0 600 200" width="600" style="background: #f6f6f6">
<polyline id="line" fill="none" stroke="#3b7dd8" stroke-width="2"/></svg></p>
<script>
const post = (what) => fetch(what, {method: "POST"});
const get = (id) => document.getElementById(id);
let points = [];
const source = new EventSource("events");  // connects again, 1 s after a training has ended
source.onopen = async () => {
  const rows = await (await fetch("history")).json();
  points = rows.map((row) => [row.step, row.loss]);
};
source.onmessage = (event) => {
  const {phase, step, stop_reason, metrics, metrics_step} = JSON.parse(event.data);
  get("title").textContent = `${stop_reason ?? phase}, step ${step}`;
  if (metrics_step > (points.at(-1)?.[0] ?? 0)) points.push([metrics_step, metrics.loss]);
  const shown = points.filter((point) => point[1] != null);
  const top = Math.max(...shown.map((point) => point[1])), last = shown.at(-1)?.[0];
  const at = ([x, y]) => `${(600 * x) / last},${195 - (190 * y) / top}`;
  get("line").setAttribute("points", shown.map(at).join(" "));
};
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


class Trainer:
    """One training at a time; the next one goes on from the last checkpoint."""

    def __init__(self, directory: str) -> None:
        self.model, self.directory = Model(), directory
        self.preemption = ah.PreemptionHook(signals=())  # the server has the signals
        self.history = ah.HistoryHook(["loss", steps_per_sec()], every_n_steps=10)
        self.scope: anyio.CancelScope | None = None  # of the training
        self.session = self.new_session()

    def new_session(self) -> ah.MonitoredSession:
        saver = ah.StateDictSaver(model={"weights": self.model.weights})
        hooks = [
            self.preemption,
            self.history,
            ah.CheckpointSaverHook(self.directory, save_secs=60, saver=saver, background=True),
        ]
        return ah.MonitoredSession(hooks, self.model.step)

    async def start(self, group: TaskGroup) -> bool:
        """Returns once the session is open; False: one is open already."""
        if self.session.status().phase == "closed":
            self.session = self.new_session()
        if self.session.status().phase != "new":
            return False
        await group.start(self.run, self.session)
        return True

    async def run(self, session: ah.MonitoredSession, *, task_status: TaskStatus[None]) -> None:
        is_open = False
        try:
            with anyio.CancelScope() as self.scope:
                async with session:
                    is_open = True
                    task_status.started()
                    while not session.should_stop():
                        await session.run([])
        except Exception:
            if not is_open:  # the request gets it
                raise
            logger.exception("training failed; the server stays up")
        status = session.status()
        logger.info("training ended at step %d: %s", status.step, status.stop_reason)

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events: the statuses of the training, up to its end."""
        yield "retry: 1000\n\n"
        async for status in self.session.subscribe():
            yield f"data: {json.dumps(status.as_dict())}\n\n"
            if status.phase == "new":  # a stream without a training would hold the server's end up
                break

    def rows(self) -> list[dict[str, float | None]]:
        """The history; JSON has no NaN and no infinity."""
        return [
            {name: value if math.isfinite(value) else None for name, value in row.items()}
            for row in self.history.rows
        ]

    @contextmanager
    def ends_at_signals(self) -> Iterator[None]:
        """End training at a signal: uvicorn waits for open streams before it ends the lifespan.

        uvicorn's handlers are there before the lifespan begins, and are called here.
        """
        handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

        def handle(number: int, frame: FrameType | None) -> None:
            self.preemption.preempt(f"the server got {signal.Signals(number).name}")
            handler = handlers[signal.Signals(number)]
            if callable(handler):
                handler(number, frame)

        for each in handlers:
            signal.signal(each, handle)
        try:
            yield
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)


def make_app(trainer: Trainer) -> FastAPI:
    group: TaskGroup

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal group
        with trainer.ends_at_signals():
            async with anyio.create_task_group() as group:
                yield
                trainer.preemption.preempt("the server shuts down")

    app = FastAPI(lifespan=lifespan)

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return PAGE

    @app.post("/start")
    async def start() -> dict[str, Any]:
        if not await trainer.start(group):
            raise HTTPException(409, "a training is open already; stop or cancel it first")
        return trainer.session.status().as_dict()

    @app.get("/status")
    async def status() -> dict[str, Any]:
        return trainer.session.status().as_dict()

    @app.get("/history")
    async def history() -> list[dict[str, Any]]:  # steps stay integers
        return trainer.rows()

    @app.get("/events")
    async def events() -> StreamingResponse:
        return StreamingResponse(trainer.events(), media_type="text/event-stream")

    @app.post("/stop")
    async def stop() -> dict[str, Any]:
        trainer.session.request_stop("POST /stop")
        return trainer.session.status().as_dict()

    @app.post("/cancel")
    async def cancel() -> dict[str, Any]:
        if trainer.scope is not None:
            trainer.scope.cancel()
        return trainer.session.status().as_dict()

    return app


def leave(number: int, frame: FrameType | None) -> None:
    """Has blocks end as usual: a signal's own way would leave the temporary directory behind."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, leave)  # uvicorn raises the signal again when the server has ended
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="for checkpoints; a temporary one by default")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as temporary:
        app = make_app(Trainer(arguments.directory or temporary))
        # a client that does not read any more is cut off after that time
        uvicorn.run(app, port=arguments.port, timeout_graceful_shutdown=30)
