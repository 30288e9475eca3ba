"""Recorders of runs: a live trace that Perfetto opens, and OpenTelemetry's spans."""
