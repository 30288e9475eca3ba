"""Streams of random numbers: one for each seed, worker and purpose.

The draws of a stream depend on nothing else: not on how workers interleave, on other streams or
on the process. Nothing here is shared between simulations, nor safe to use from two threads.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.random import Generator, Philox

from ._arguments import checked_count
from ._light_tails import Delay, checked_delay

_FIRST_BLOCK = 16
_DOUBLINGS = 4
"""Blocks grow up to 256 draws: these are 8 KB, much for the single draw of each of many workers.

The sizes are part of the meaning of a seed: other sizes give other draws for the same seed.
"""
_LOW_64_BITS = (1 << 64) - 1


class Streams:
    """The streams of one simulation, which makes and owns it; there is nothing to close.

    Args:
        seed: a whole number >= 0, of any size.
        branch: streams of another branch share no draw with these, for the same seed.

    Raises:
        TypeError, ValueError: the seed is no whole number >= 0.

    Example:
        streams = Streams(seed=1)
        compute = streams.delays(3, "compute", Exponential(1.0))
        noise = streams.generator(3, "noise")
        print(compute.next(), noise.normal())
    """

    __slots__ = ("_counter", "_hash", "_key", "_nothing", "_philox", "_rng", "_state")

    def __init__(self, seed: int, *, branch: str = "") -> None:
        # hexadecimal, as Python refuses to write very long numbers in decimal
        root = b"%x/" % checked_count("seed", seed)
        self._hash = blake2b(root + branch.encode(), digest_size=16)
        # one for all streams, set to the key and the block before each block: a generator for
        # each would take 600 bytes, a stream without a block takes 116
        self._philox = Philox(key=0)
        self._rng = Generator(self._philox)
        self._key = [0, 0]
        self._counter = [0, 0, 0, 0]
        self._state = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": self._key},
            "buffer": [0, 0, 0, 0],
            "buffer_pos": 4,  # nothing is left of the block before
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._nothing: list[float] = []  # of all streams without a block; it stays empty

    def delays(self, worker: int, purpose: str, delay: Delay) -> DelayStream:
        """The worker's draws for this purpose, from the first one on.

        The same worker and purpose again give the same draws again; another delay is then drawn
        with the same chance.

        Args:
            worker: >= 0.
            purpose: any name, as "compute".
            delay: what is drawn, by `delay.for_worker(worker)`.

        Raises:
            TypeError, ValueError: an argument does not fit, or the delay has none for the worker.
        """
        key = self._key_of("delays", worker, purpose)
        return DelayStream(self, key, checked_delay("delay", delay).for_worker(worker))

    def generator(self, worker: int, purpose: str) -> Generator:
        """A generator for the user's program, from its beginning; it shares nothing with delays.

        Unlike a stream of delays it takes about 600 bytes, and is the caller's own.

        Args:
            worker: >= 0.
            purpose: any name, as "noise".

        Raises:
            TypeError, ValueError: an argument does not fit.
        """
        return Generator(Philox(key=self._key_of("generator", worker, purpose)))

    def _key_of(self, kind: str, worker: int, purpose: str) -> int:
        number = checked_count("worker", worker)
        if not isinstance(purpose, str):
            raise TypeError(f'purpose is {purpose!r}; give a string, as "compute"')
        if not purpose:
            raise ValueError('purpose is empty; give a name for these draws, as "compute"')
        hasher = self._hash.copy()
        hasher.update(b"%s/%x/%s" % (kind.encode(), number, purpose.encode(errors="surrogatepass")))
        return int.from_bytes(hasher.digest(), "little")

    def _draw(self, key: int, block: int, delay: Delay) -> list[float]:
        """The draws of a block, the first one last."""
        size = _FIRST_BLOCK << min(block, _DOUBLINGS)
        self._key[:] = key & _LOW_64_BITS, key >> 64
        self._counter[1] = block  # the counter's low word counts within a block
        # numpy's types say arrays; it copies lists 2.5 times as fast
        self._philox.state = self._state  # type: ignore[assignment]
        draws = np.asarray(delay.sample(self._rng, size), np.float64)
        if draws.shape != (size,):
            raise ValueError(f"{delay} drew shape {draws.shape}; let its sample give ({size},)")
        # a NaN among the times would silently break their order; min and max show it
        if not (draws.min() >= 0 and draws.max() < np.inf):
            wrong = draws[~((draws >= 0) & (draws < np.inf))][0]
            raise ValueError(f"{delay} drew {wrong}; let its sample give seconds, finite and >= 0")
        reverse: list[float] = draws[::-1].tolist()
        return reverse


class DelayStream:
    """One worker's draws for one purpose. `Streams.delays` makes it; there is nothing to close.

    Example:
        compute = Streams(seed=1).delays(0, "compute", Constant(2.0))
        assert compute.next() == 2.0
        assert compute.delay.stretch(0.0, 2.0) == 2.0
    """

    __slots__ = ("_block", "_draws", "_key", "_streams", "delay")

    def __init__(self, streams: Streams, key: int, delay: Delay) -> None:
        self.delay = delay
        """What is drawn: the worker's own."""
        self._streams = streams
        self._key = key
        self._block = 0  # the number of the next one
        self._draws = streams._nothing

    def next(self) -> float:
        """The next draw, in seconds.

        Raises:
            ValueError: a delay of the program's own drew no finite number >= 0.
        """
        try:
            return self._draws.pop()
        except IndexError:  # 7 ns less than asking first
            pass
        draws = self._streams._draw(self._key, self._block, self.delay)
        self._block += 1
        self._draws = draws
        return draws.pop()
