"""Trainings whose steps are counted at a Dask scheduler."""
