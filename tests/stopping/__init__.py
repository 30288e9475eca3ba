"""Tests of asynchooks._stopping."""
