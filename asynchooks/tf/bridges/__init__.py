"""asynchooks under TensorFlow's and Keras's own loops."""
