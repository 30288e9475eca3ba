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
    ScheduleError,
    SimulationError,
)
from .._later import listing
from ._determinism import check_determinism
from ._explore import Exploration, explore
from ._simulation import Simulation, at_step, current_simulation
from ._sweep import Sweep, sweep
from .cluster._cluster import Cluster, Failure, Worker
from .cluster._failures import Crashes, Partition, Preemption, Slowdown
from .cluster._network import Network, Queue
from .delays._delay import Delay, PerWorker, Stragglers
from .delays._distributions import (
    Constant,
    Empirical,
    Exponential,
    LogNormal,
    Pareto,
    ShiftedExponential,
    Uniform,
    Weibull,
    parse_delay,
)
from .output._plots import plot_losses, plot_reports
from .output._report import Report, WorkerReport
from .output._trace import write_trace

__all__ = [
    "Cluster",
    "Constant",
    "Crashes",
    "DeadlockError",
    "Delay",
    "DeterminismError",
    "Empirical",
    "Exploration",
    "Exponential",
    "Failure",
    "ForeignAwaitError",
    "LivelockError",
    "LogNormal",
    "Network",
    "OutsideWorkError",
    "Pareto",
    "Partition",
    "PerWorker",
    "Preemption",
    "Queue",
    "Report",
    "ScheduleError",
    "ShiftedExponential",
    "Simulation",
    "SimulationError",
    "Slowdown",
    "Stragglers",
    "Sweep",
    "Uniform",
    "Weibull",
    "Worker",
    "WorkerReport",
    "at_step",
    "check_determinism",
    "current_simulation",
    "explore",
    "parse_delay",
    "plot_losses",
    "plot_reports",
    "sweep",
    "write_trace",
]

__dir__ = listing(__name__)
