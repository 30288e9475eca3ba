"""TensorFlow graphs: sessions, creators, compiled callables."""
