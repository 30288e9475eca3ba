"""Benchmarks: what waiting, running and many workers cost. No figure here decides an exit code."""

import os

# before TensorFlow and Keras are imported, in this process and in those that it starts
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
