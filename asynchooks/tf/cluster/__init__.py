"""Parameter-server clusters of TensorFlow processes."""
