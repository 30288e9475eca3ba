"""Tests of asynchooks._step."""
