"""Many workers in virtual time: the delays of what they do, and the streams these are drawn from.

Nothing here reads a clock or runs a program.
"""
