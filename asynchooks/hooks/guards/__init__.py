"""Hooks that watch a training and end it: signals, time, stalls, NaN, other ranks."""
