"""Tests of asynchooks.backends."""
