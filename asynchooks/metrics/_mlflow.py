"""MlflowSink: metrics in a run of MLflow, by its client."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import _check
from ._names import Names
from ._sink import Point, Resume, Sink
from ._tracking import StoredSteps, need, position_of, summary

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

_MOST = 1000
"""Metrics in one call: what MLflow's servers take."""
_LONGEST = 250
"""Characters of a name: more than that, and MLflow refuses all of the call."""
_REFUSED = re.compile(r"[^\w\-. :/]")
"""The characters that names of MLflow's metrics must not have."""


def _name_of(name: str) -> str:
    return _REFUSED.sub("_", name)


class MlflowSink(Sink):
    """Metrics in a run of MLflow, in a database or on a tracking server.

    A new session makes a run. A session that is restored continues the run of its checkpoint: what
    MLflow has already is left out, because it cannot remove points. At the end the run is set to
    `FINISHED`, also where the session ends by an error; a run that is killed stays `RUNNING`.

    MLflow has no histograms: of one it gets `<name>/min`, `<name>/mean` and `<name>/max`. In names,
    the characters that MLflow refuses become `_`, and no more than 250 characters stay; where that
    makes two names one, the second gets a number, and a warning says so. Infinities become the
    greatest float.

    Points are sent when the queue is empty, or 1,000 numbers at once. The extra `mlflow` brings the
    client for tracking servers; for a database of your own install the whole `mlflow`.

    Args:
        experiment_name: the experiment, made if there is none of this name.
        tracking_uri: a server's address or a database, such as "sqlite:///mlflow.db"; None for
            what MLflow is set to.
        run_name: of a new run; None for one that MLflow finds.
        run_id: a run that goes on, such as one of `mlflow.start_run()`; it stays open at the end.
        tags: of a new run, by name.
        params: parameters of a new run, by name.

    Raises:
        TypeError: an argument is of another type.
        ValueError: `run_name`, `tags` or `params` are given for the run of a `run_id`.

    Example:
        sink = MlflowSink("digits", tracking_uri="sqlite:///mlflow.db", params={"rate": 0.1})
        hooks = [MetricsHook(sink, ["loss"], every_n_steps=100)]
    """

    def __init__(
        self,
        experiment_name: str = "Default",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self._experiment_name = _check.instance(
            "experiment_name", experiment_name, str, "the name of an experiment"
        )
        if run_id is not None and (run_name is not None or tags or params):
            raise ValueError(
                f"run_name, tags and params are of a new run, and run_id is {run_id!r}; leave "
                "out either"
            )
        self._tracking_uri = tracking_uri
        self._store = _absolute(tracking_uri) if isinstance(tracking_uri, str) else tracking_uri
        self._run_name, self._given_id = run_name, run_id
        self._tags, self._params = dict(tags or {}), dict(params or {})
        self._waiting: list[Metric] = []
        self._client: MlflowClient | None = None
        self._run_id = ""

    def __repr__(self) -> str:
        return f"MlflowSink({self._experiment_name!r}, tracking_uri={self._tracking_uri!r})"

    def check(self) -> None:
        need("MlflowSink", "mlflow", "mlflow")

    def open(self, resume: Resume) -> None:
        from mlflow import MlflowClient

        self._waiting.clear()
        self._client = MlflowClient(self._store)
        continued = self._given_id or position_of(resume.position, "run_id").get("run_id")
        self._names = Names(repr(self), _name_of, longest=_LONGEST)
        if continued is None:
            self._run_id = self._create_run(self._client)
            self._steps = StoredSteps(lambda name: ())
        else:
            self._client.update_run(continued, status="RUNNING")
            self._run_id = continued
            self._steps = StoredSteps(self._find_steps)

    def _create_run(self, client: MlflowClient) -> str:
        from mlflow.entities import Param

        experiment = client.get_experiment_by_name(self._experiment_name)
        experiment_id = (
            client.create_experiment(self._experiment_name)
            if experiment is None
            else experiment.experiment_id
        )
        run = client.create_run(experiment_id, tags=self._tags, run_name=self._run_name)
        run_id: str = run.info.run_id
        if self._params:
            params = [Param(name, str(value)) for name, value in self._params.items()]
            client.log_batch(run_id, params=params)
        return run_id

    def _find_steps(self, name: str) -> set[int]:
        assert self._client is not None
        history = self._client.get_metric_history(self._run_id, name)
        return {metric.step for metric in history}

    def write(self, point: Point) -> None:
        if len(self._waiting) + 3 * len(point.values) > _MOST:
            self._send()
        from mlflow.entities import Metric

        numbers = Point(point.step, point.time, self._names.numbers(point.values, summary))
        for name, number in self._steps.new(numbers).items():
            self._waiting.append(Metric(name, number, int(1000 * point.time), point.step))

    def flush(self) -> Any:
        try:
            self._send()
        finally:
            self._waiting.clear()  # what could not be sent counts as dropped
        return {"run_id": self._run_id}

    def _send(self) -> None:
        assert self._client is not None
        while self._waiting:
            # not in MLflow's own thread, which would keep errors to itself
            batch = self._waiting[:_MOST]
            self._client.log_batch(self._run_id, metrics=batch, synchronous=True)
            del self._waiting[:_MOST]

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._run_id and self._given_id is None:
            client.set_terminated(self._run_id)


def _absolute(uri: str) -> str:
    """The address; of a database or a directory on this machine one that `chdir` does not move."""
    scheme, is_database, path = uri.partition("sqlite:///")
    if is_database and not scheme:
        return uri if path in ("", ":memory:") else f"sqlite:///{os.path.abspath(path)}"
    is_path = uri not in ("", "databricks") and ":" not in uri
    return os.path.abspath(uri) if is_path else uri
