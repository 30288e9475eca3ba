"""Virtual time: the same sessions, hooks and workers, thousands in one process, reproducibly.

    simulation = Simulation(seed=7, backend="turbo")
    cluster = simulation.cluster(64, protocol=StaleSynchronous(3), compute=Exponential(1.0))
    print(cluster.run(updates=20_000).updates_per_second)

Programs that wait through asynchooks only do the same on every backend, for the same seed.
"""

from .._errors import (
    DeadlockError,
    DeterminismError,
    ForeignAwaitError,
    LivelockError,
    OutsideWorkError,
    SimulationError,
)
from ._cluster import Cluster
from ._compound_delays import PerWorker, Stragglers
from ._delays import Constant, Delay, Exponential, ShiftedExponential, Uniform
from ._determinism import check_determinism
from ._empirical import Empirical
from ._failures import Crashes, Failure, Partition, Preemption, Slowdown
from ._heavy_tails import LogNormal, Pareto, Weibull
from ._network import Queue
from ._parse_delay import parse_delay
from ._perfetto import write_trace
from ._phases import Phases
from ._plots import plot_losses, plot_reports, plot_staleness, plot_timeline
from ._report import Report, WorkerReport
from ._simulation import Simulation, at_step, current_simulation
from ._worker import Worker

__all__ = [
    "Cluster",
    "Constant",
    "Crashes",
    "DeadlockError",
    "Delay",
    "DeterminismError",
    "Empirical",
    "Exponential",
    "Failure",
    "ForeignAwaitError",
    "LivelockError",
    "LogNormal",
    "OutsideWorkError",
    "Pareto",
    "Partition",
    "PerWorker",
    "Phases",
    "Preemption",
    "Queue",
    "Report",
    "ShiftedExponential",
    "Simulation",
    "SimulationError",
    "Slowdown",
    "Stragglers",
    "Uniform",
    "Weibull",
    "Worker",
    "WorkerReport",
    "at_step",
    "check_determinism",
    "current_simulation",
    "parse_delay",
    "plot_losses",
    "plot_reports",
    "plot_staleness",
    "plot_timeline",
    "write_trace",
]
