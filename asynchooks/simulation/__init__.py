"""Virtual time: the same sessions, hooks and workers, thousands in one process, reproducibly."""

from ._simulation import Simulation, at_step, current_simulation

__all__ = ["Simulation", "at_step", "current_simulation"]
