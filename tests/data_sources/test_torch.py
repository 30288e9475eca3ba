"""torch's DataLoader as the input: its own settings hold, and what is dangerous is said once."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import textwrap
from itertools import chain
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

from asynchooks import InputError, PreemptionError
from asynchooks.data import Stage, batch, prefetch, repeat, take
from asynchooks.data._readings import _DataLoader

from ..data.sources import read_all
from ..support.threads import threads_left
from .trainings import trained_in_lives, trained_with

torch = pytest.importorskip("torch")
utils = torch.utils.data
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|multiprocessing).*"),
    pytest.mark.filterwarnings("ignore:Got pickle error"),  # torch says it, too
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),  # by torchdata
]


class Numbers:
    """Its items are numbers, or the process that makes them."""

    def __init__(self, gives_process: bool = False) -> None:
        self._gives_process = gives_process

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if self._gives_process:
            return type(multiprocessing.current_process()).__name__, os.getpid(), os.getppid()
        return index


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the log says once in a process, it says once in each test."""
    monkeypatch.setattr(_DataLoader, "has_warned", False)


def loader(**options: Any) -> Any:
    options = {"batch_size": 2, **options}
    return utils.DataLoader(Numbers(), **options)


async def test_batches_of_a_loader_without_workers_are_tensors() -> None:
    seen: list[Any] = []
    async with prefetch(loader(), 2) as batches:
        seen += [each async for each in batches]
    assert all(torch.is_tensor(each) and each.shape == (2,) for each in seen)
    assert (await trained_with(loader())).items == list(range(20))
    assert not threads_left()


async def processes_of(source: Any) -> tuple[set[str], set[int], set[int]]:
    """Kinds and ids of those that made the items of two passes, and the ids of their parents."""
    made_by: list[tuple[str, int, int]] = []
    async with prefetch(repeat(source, 2), 4) as items:
        made_by = [tuple(each) async for each in items]
    assert len(made_by) == 40
    kinds, pids, parents = (set(each) for each in zip(*made_by, strict=True))
    return kinds, pids, parents


@pytest.mark.faults
@pytest.mark.parametrize("method", [None, "fork"])
@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.skipif(multiprocessing.get_all_start_methods()[0] != "fork", reason="of Linux")
async def test_workers_are_forked_where_the_loader_says_so_or_nothing(
    method: str | None, is_persistent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source = utils.DataLoader(
        Numbers(gives_process=True), batch_size=None, num_workers=2,
        multiprocessing_context=method, persistent_workers=is_persistent,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "asynchooks"):
        kinds, pids, parents = await processes_of(source)
    assert kinds == {"Process" if method is None else "ForkProcess"}
    assert len(pids) == (2 if is_persistent else 4)
    assert parents == {os.getpid()}
    assert caplog.text.count("are forked out of a process with an event loop and threads") == 1
    persistent = "" if is_persistent else " and persistent_workers=True"
    assert f'multiprocessing_context="forkserver"{persistent};' in caplog.text
    if is_persistent:
        shut_down(source._iterator)


@pytest.mark.faults
async def test_workers_come_from_a_fork_server_where_the_loader_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = utils.DataLoader(
        Numbers(gives_process=True), batch_size=None, num_workers=2,
        multiprocessing_context="forkserver", persistent_workers=True,
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "asynchooks"):
        kinds, pids, parents = await processes_of(source)
    assert kinds == {"ForkServerProcess"}
    assert len(pids) == 2, "they were started for each pass"
    assert os.getpid() not in pids | parents
    assert "workers" not in caplog.text, "it has no danger to name"
    shut_down(source._iterator)


@pytest.mark.faults
@pytest.mark.skipif(multiprocessing.get_all_start_methods()[0] != "fork", reason="of Linux")
async def test_loaders_that_a_function_makes_for_each_pass_warn_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "asynchooks"):
        diary = await trained_with(repeat(lambda: loader(num_workers=2), 2))
    assert diary.items == 2 * list(range(20)), "workers keep the order"
    assert caplog.text.count("are forked out of a process with an event loop and threads") == 1


async def test_a_loader_without_workers_has_nothing_to_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "asynchooks.data"):
        await trained_with(loader())
    assert "workers of" not in caplog.text


def shut_down(iterator: Any) -> None:
    """End a loader's workers, unwatched: now and then one aborts while its interpreter ends, and
    torch's signal handler would raise that in whatever the main thread does."""
    torch._C._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    iterator._shutdown_workers()


@pytest.mark.faults
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
async def test_a_start_method_that_was_chosen_stays(method: str) -> None:
    source = loader(num_workers=1, multiprocessing_context=method, persistent_workers=True)
    assert int((await read_all(take(source, 1)))[0][0]) == 0
    assert source.multiprocessing_context.get_start_method() == method
    shut_down(source._iterator)


def collate(items: Any) -> Any:
    return items


module_collate = collate
del collate  # as a lambda, or what a decorator hides: its name leads nowhere


@pytest.mark.faults
async def test_a_dataset_or_function_that_cannot_be_pickled_is_explained() -> None:
    class Local(Numbers):
        """Only this function knows it."""

    for source in (
        utils.DataLoader(Local(), num_workers=2, multiprocessing_context="spawn"),
        loader(num_workers=1, collate_fn=module_collate, multiprocessing_context="forkserver"),
    ):
        with pytest.raises(InputError, match="cannot be pickled; define its dataset and its funct"):
            await trained_with(source)


async def test_a_resumed_training_goes_on_behind_the_last_item(tmp_path: Path) -> None:
    diary = await trained_in_lives(lambda size: prefetch(loader(), size), tmp_path, 3, 3, 7, 99)
    assert diary.items == list(range(20))


def stateful(**options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    options = {"batch_size": 2, **options}
    return module.StatefulDataLoader(Numbers(), **options)


@pytest.mark.parametrize("by_items", [True, False])
async def test_a_stateful_loader_resumes_from_its_own_state(by_items: bool, tmp_path: Path) -> None:
    def make(size: int) -> Stage[Any]:
        return prefetch(batch(stateful(), 2) if by_items else stateful(), size)

    assert (await trained_in_lives(make, tmp_path, 3, 3, 7, 99)).items == list(range(20))
    source = make(2)
    await trained_with(source, last=3)
    state = source.state_dict()
    assert "state" in (state["source"] if by_items else state), "it is not counted"


async def test_a_shuffling_stateful_loader_resumes_in_its_own_order(tmp_path: Path) -> None:
    for last in (3, 7, 99):
        source = stateful(shuffle=True, generator=torch.Generator().manual_seed(last))
        diary = await trained_with(source, tmp_path, last)
    assert sorted(diary.items) == list(range(20))
    assert diary.items != list(range(20))


@pytest.mark.parametrize("count", [0, 9, 10, 11, 20])
async def test_a_shuffling_stateful_loader_resumes_also_where_a_pass_begins(count: int) -> None:
    def passes(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return prefetch(repeat(stateful(shuffle=True, generator=generator), 3), 2)

    async with passes(seed=1) as stage:
        whole = [(await anext(stage)).tolist() for _ in range(count)]
        while stage.statistics().num_buffered < 2:
            await anyio.lowlevel.checkpoint()
        state = stage.state_dict()
        whole += [each.tolist() async for each in stage]
    again = passes(seed=2)
    again.load_state_dict(state)
    num_of_pass = 10 - count % 10  # its loader draws other orders for later passes
    async with again:
        rest = [each.tolist() async for each in again]
    first, expected = rest[:num_of_pass], whole[count : count + num_of_pass]
    if num_of_pass == 10 and count:  # a whole pass, which the loader orders anew
        first, expected = sorted(chain(*first)), sorted(chain(*expected))
    assert first == expected
    assert len(rest) == len(whole) - count


@pytest.mark.parametrize(("make", "call"), [(loader, 7), (stateful, 4), (stateful, 7)])
async def test_a_loader_goes_back_with_the_model(make: Any, call: int, tmp_path: Path) -> None:
    errors = {call: PreemptionError("lost")}
    diary = await trained_with(prefetch(make(), 2), tmp_path, errors=errors)
    assert diary.items == list(range(20))


PROGRAM = """
    import asyncio, multiprocessing, torch
    from asynchooks.data import prefetch

    async def main():
        loader = torch.utils.data.DataLoader([1, 2, 3])
        async with prefetch(loader, 1) as items:
            print([int(each) async for each in items])

    asyncio.run(main())
    multiprocessing.set_start_method("spawn")
"""


@pytest.mark.faults
def test_a_loader_without_workers_fixes_no_start_method() -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


SCRIPT = """
    import asyncio, sys, torch
    from asynchooks import FeedHook, FunctionSessionCreator, MonitoredSession

    async def main():
        method = sys.argv[1] if sys.argv[1:] else None
        loader = torch.utils.data.DataLoader(
            range(6), num_workers=2, batch_size=2, multiprocessing_context=method
        )
        creator = FunctionSessionCreator(lambda x: print(x.tolist()) or {})
        async with MonitoredSession([FeedHook(loader, "x")], creator) as session:
            while not session.should_stop():
                await session.run([])

    asyncio.run(main())
"""


def run_script(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), *args]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=environment
    )


@pytest.mark.faults
@pytest.mark.skipif(multiprocessing.get_all_start_methods()[0] != "fork", reason="of Linux")
def test_a_script_without_a_main_guard_trains(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:3] == ["[0, 1]", "[2, 3]", "[4, 5]"]
    assert len(done.stderr.splitlines()) <= 2, done.stderr


@pytest.mark.faults
def test_where_a_main_guard_is_needed_its_lack_is_named(tmp_path: Path) -> None:
    done = run_script(tmp_path, "forkserver")
    assert done.returncode != 0
    assert done.stderr.rstrip().count("its workers import the main module: start training") == 1
