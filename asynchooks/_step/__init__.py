"""The awaitable count of training steps, and the gate that admits them."""
