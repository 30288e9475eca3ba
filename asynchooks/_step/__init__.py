"""The awaitable count of training steps, and who may run the next one."""
