"""Tests of asynchooks._engine."""
