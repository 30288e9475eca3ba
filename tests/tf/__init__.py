"""Tests of asynchooks on real TensorFlow graphs."""
