"""Checkpoints of TensorFlow models."""
