"""Recorders of runs: a live trace in Perfetto's format, and OpenTelemetry's spans."""
