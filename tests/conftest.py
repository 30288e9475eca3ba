"""What all tests share: every async test runs on asyncio and on trio."""

import gc
import multiprocessing.process
import os
import signal
import sys
from collections.abc import Generator, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from asynchooks import planning
from asynchooks.simulation import Simulation

from .simulation.engines import BACKENDS
from .support.eager import make_tasks_eager
from .support.threads import note_threads

# how long an example takes depends on what else the machine does
settings.register_profile("asynchooks", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("asynchooks")

# shells start what runs in the background with SIGINT ignored, and processes of tests inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"}
_started: list[str] = []
"""What has started a process, in the order of their starts."""
_starters: set[tuple[str, str]] = set()
"""The fixtures that start processes: name, and the node below which they are known."""


def _note_start(event: str, args: tuple[Any, ...]) -> None:
    if event in _STARTS and not _is_importing() and not _is_planning():
        _started.append(event)


def _is_planning() -> bool:
    """Whether a plan forks: that child only computes, and takes some 10 ms."""
    return sys._getframe(2).f_code.co_filename.startswith(planning.__path__[0])


def _is_importing() -> bool:
    """Whether a library is being imported: some ask the system about itself meanwhile."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


sys.addaudithook(_note_start)
_start_process = multiprocessing.process.BaseProcess.start


def _start_noted(self: Any) -> None:  # spawn and forkserver raise no audit event
    _started.append("multiprocessing")
    _start_process(self)


multiprocessing.process.BaseProcess.start = _start_noted  # type: ignore[method-assign]


def _do_not_wait_for_the_disk(fd: Any) -> None:
    """Refuse what is not open, as `os.fsync` does.

    Nothing here cuts the power, and processes that are killed use the real one. Tests that look at
    its calls wrap this.
    """
    os.fstat(fd if isinstance(fd, int) else fd.fileno())


os.fsync = _do_not_wait_for_the_disk


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, Any, Any]:
    num_before = len(_started)
    try:
        return (yield)
    finally:
        if len(_started) > num_before:
            _starters.add((fixturedef.argname, fixturedef.baseid))


@pytest.fixture(autouse=True)
def _threads_are_known() -> None:
    """Tests that look for threads look for their own: others may have left some that are stuck."""
    note_threads()


@pytest.fixture(autouse=True)
def _processes_are_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that uses processes and does not say so: quick tests start none."""
    num_before = len(_started)
    yield
    node = request.node
    uses = any(
        name in request.fixturenames and node.nodeid.startswith(base) for name, base in _starters
    )
    if (uses or len(_started) > num_before) and node.get_closest_marker("faults") is None:
        pytest.fail("it starts a process, or uses one that a fixture starts; mark it as faults")


def pytest_collection_finish() -> None:
    """Leave what collection has made out of each later garbage collection.

    These are a million objects of TensorFlow, PyTorch and the tests themselves: a collection by
    hand takes 0.8 s with them, and the quick tests make some 150 of them.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What may take long comes first, so that no process of tests waits for another at the end.

    Dask's tests come last: threads and sockets of its own go on for a while after them. Those of
    the room `tf` have the marker of TensorFlow.
    """

    def order(item: pytest.Item) -> tuple[bool, float]:
        limit = item.get_closest_marker("timeout")
        return "/tests/distributed/" in item.path.as_posix(), -limit.args[0] if limit else 0.0

    items.sort(key=order)
    for item in items:
        if "/tests/tf/" in item.path.as_posix():
            item.add_marker("tensorflow")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    """Tests that take it, or a simulation, run on every engine."""
    return request.param


@pytest.fixture
def simulation(backend: Any) -> Simulation:
    return Simulation(backend=backend)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--eager-tasks"):
        try:
            make_tasks_eager()
        except RuntimeError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--eager-tasks",
        action="store_true",
        help="start tasks at once in every event loop of asyncio (Python 3.12 and later)",
    )
    parser.addoption(
        "--soak-secs", type=float, default=3600.0, help="how long the soaks of clusters go on"
    )


@pytest.fixture
def threads_take_turns_at_once() -> Iterator[None]:
    """Other threads come between a read and what is done with it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@pytest.fixture
def soak_secs(request: pytest.FixtureRequest) -> float:
    secs: float = request.config.getoption("--soak-secs")
    return secs
