"""A cluster of processes on this machine, for `asynchooks launch`. It trains nothing itself.

_cluster     which processes there are: their commands, environments and ports
_process     one process and its process group: start, signals, end, output
_guard       a program of its own: no process outlives the launcher, however that ends
_output      the merged lines on stdout, and the line of progress on stderr
_launcher    the order of it all: start, wait, end, exit code
"""

from __future__ import annotations
