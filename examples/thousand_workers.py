"""1,000 workers in virtual time train softmax regression on handwritten digits, under protocols.

Each worker computes real gradients, in about a second of virtual time each; now and then one
straggles. All protocols are given the same virtual time.

It prints a row for each protocol as soon as it has run: updates, staleness, the share of time that
workers waited, and the loss. With --plot it draws the losses.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from asynchooks.protocols import parse_protocol
from asynchooks.simulation import Report, ShiftedExponential, Simulation, Stragglers, Worker

NUM_WORKERS, NUM_TRAIN, BATCH = 1000, 1500, 32
# and learning rates: larger ones where many gradients make one update
PROTOCOLS = [("async", 0.004), ("ssp:3", 0.004), ("ksync:900", 0.5), ("kasync:100", 0.1)]
images, digits = load_digits(return_X_y=True)
X, Y = images / 16.0, np.eye(10)[digits]


def softmax(scores: Any) -> Any:
    return np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)


def gradient(parameters: Any, worker: Worker) -> Any:
    rows = worker.rng.integers(0, NUM_TRAIN, BATCH)
    return X[rows].T @ (softmax(X[rows] @ parameters) - Y[rows]) / BATCH


def loss(parameters: Any) -> float:
    """Cross entropy on images that are not trained on."""
    return float(-np.mean(np.log(softmax(X[NUM_TRAIN:] @ parameters)[Y[NUM_TRAIN:] == 1])))


def train(protocol: str, rate: float, secs: float, seed: int) -> Report:
    compute = Stragglers(ShiftedExponential(0.5, 0.5), 0.01, 10.0)
    cluster = Simulation(seed, "turbo").cluster(
        NUM_WORKERS, protocol=parse_protocol(protocol, NUM_WORKERS), compute=compute,
        parameters=np.zeros((64, 10)), learning_rate=rate,
    )  # fmt: skip
    every = NUM_WORKERS // 10 if protocol.startswith(("async", "ssp")) else 1
    return cluster.run(gradient=gradient, until=secs, loss=loss, loss_every=every)


def draw(reports: dict[str, Report], path: str) -> None:
    from matplotlib.figure import Figure  # of the extra "plot"

    axes = (figure := Figure(layout="constrained")).subplots()
    for name, report in reports.items():
        axes.plot(*np.transpose(report.losses)[[0, 2]], label=name)
    axes.set(xlabel="virtual seconds", ylabel="loss", yscale="log")
    axes.legend()
    figure.savefig(path)


def main(secs: float, seed: int, plot: str | None) -> None:
    print(f"{NUM_WORKERS} workers, {secs:g} virtual seconds for each protocol", flush=True)
    print("protocol     updates  updates/s  mean staleness  waited   loss", flush=True)
    reports = {}
    for name, rate in PROTOCOLS:
        report = reports[name] = train(name, rate, secs, seed)
        row = report.summary_row()
        shown = f"{name:10s} {report.updates:9d} {report.updates_per_second:10.1f}"
        shown += f" {report.mean_staleness:15.1f} {row['share_waited']:7.0%} {row['loss']:6.3f}"
        print(shown, flush=True)
    print("Waiting for the slowest of many means few updates; never waiting, stale gradients.")
    if plot is not None:
        draw(reports, plot)
        print(f"the losses are drawn in {plot}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--secs", type=float, default=15.0, help="virtual seconds")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--plot", help="file for the losses over virtual time")
    options = parser.parse_args()
    main(options.secs, options.seed, options.plot)
