"""Tests of asynchooks._running."""
