"""torch's DataLoader as the input: its workers are not forked, and what cannot be is explained."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

from asynchooks import FeedHook, InputError, MonitoredSession, PreemptionError
from asynchooks.data import batch, prefetch, repeat

from ..hooks.inputs import Diary, saving, until_stopped
from ..hooks.savers import threads_left

torch = pytest.importorskip("torch")
utils = torch.utils.data
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|multiprocessing).*"),
    pytest.mark.filterwarnings("ignore:Got pickle error"),  # torch says it, too
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),  # by torchdata
]


class Numbers:
    """Its items are numbers, or whoever makes them."""

    def __init__(self, tells_process: bool = False) -> None:
        self._tells_process = tells_process

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if self._tells_process:
            return type(multiprocessing.current_process()).__name__, os.getpid(), os.getppid()
        return index


def loader(**options: Any) -> Any:
    options = {"batch_size": 2, **options}
    return utils.DataLoader(Numbers(), **options)


async def trained_with(source: Any) -> Diary:
    diary = Diary()
    async with MonitoredSession([FeedHook(source, "x")], diary.creator) as session:
        await until_stopped(session)
    return diary


async def test_batches_of_a_loader_without_workers_are_tensors() -> None:
    seen: list[Any] = []
    async with prefetch(loader(), 2) as batches:
        seen += [each async for each in batches]
    assert all(torch.is_tensor(each) and each.shape == (2,) for each in seen)
    assert (await trained_with(loader())).items == list(range(20))
    assert not threads_left()


async def test_workers_come_from_a_fork_server_and_the_loader_is_left_as_it_was() -> None:
    source = utils.DataLoader(Numbers(tells_process=True), batch_size=None, num_workers=2)
    made_by: set[Any] = set()
    async with prefetch(source, 4) as items:
        made_by = {tuple(each) async for each in items}
    kinds, pids, parents = (set(each) for each in zip(*made_by, strict=True))
    assert kinds == {"ForkServerProcess"}
    assert len(pids) == 2
    assert os.getpid() not in pids | parents
    assert source.multiprocessing_context is None
    assert not [each for each in multiprocessing.active_children() if each.pid in pids]


async def test_workers_keep_the_order() -> None:
    assert (await trained_with(loader(num_workers=2))).items == list(range(20))


def shut_down(iterator: Any) -> None:
    """End a loader's workers, unwatched: now and then one aborts while its interpreter ends, and
    torch's signal handler would raise that in whatever the main thread does."""
    torch._C._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    iterator._shutdown_workers()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_start_method_that_was_chosen_stays(method: str) -> None:
    from asynchooks.data._openers import opener_of

    source = loader(num_workers=1, multiprocessing_context=method)
    opened = opener_of(source).open(0, None)
    assert int(next(opened.iterator)[0]) == 0
    assert source.multiprocessing_context.get_start_method() == method
    shut_down(opened.iterator)


async def test_workers_that_are_to_be_forked_are_refused() -> None:
    source = loader(num_workers=2, multiprocessing_context="fork")
    message = r'forks its workers, .* Got: multiprocessing_context="fork"; write: .*"forkserver"'
    with pytest.raises(InputError, match=message):
        await trained_with(source)
    assert source.multiprocessing_context.get_start_method() == "fork"


async def test_a_dataset_that_cannot_be_pickled_is_explained() -> None:
    class Local(Numbers):
        """Only this function knows it."""

    source = utils.DataLoader(Local(), num_workers=2)
    with pytest.raises(InputError, match="cannot be pickled; define its dataset and its functions"):
        await trained_with(source)
    assert source.multiprocessing_context is None


def collate(items: Any) -> Any:
    return items


module_collate = collate
del collate  # as a lambda, or what a decorator hides: its name leads nowhere


async def test_a_function_that_cannot_be_pickled_is_explained() -> None:
    with pytest.raises(InputError, match="cannot be pickled"):
        await trained_with(loader(num_workers=1, collate_fn=module_collate))


async def test_a_resumed_training_goes_on_behind_the_last_item(tmp_path: Path) -> None:
    for last in (3, 3, 7, 99):
        diary, source = Diary(), prefetch(loader(), last % 4 + 1)
        hooks = [FeedHook(source, "x"), saving(tmp_path, diary)]
        async with MonitoredSession(hooks, diary.creator) as session:
            while session.global_step.value < last:
                await session.run([])
    assert diary.items == list(range(20))


async def test_it_goes_back_with_the_model(tmp_path: Path) -> None:
    diary = Diary({7: PreemptionError("lost")})
    hooks = [FeedHook(prefetch(loader(), 2), "x"), saving(tmp_path, diary)]
    async with MonitoredSession(hooks, diary.creator) as session:
        await until_stopped(session)
    assert diary.items == list(range(20))


def stateful(**options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    options = {"batch_size": 2, **options}
    return module.StatefulDataLoader(Numbers(), **options)


@pytest.mark.parametrize("by_items", [True, False])
async def test_a_stateful_loader_resumes_from_its_own_state(by_items: bool, tmp_path: Path) -> None:
    for last in (3, 3, 7, 99):
        diary = Diary()
        source = prefetch(batch(stateful(), 2) if by_items else stateful(), last % 4 + 1)
        hook = FeedHook(source, "x")
        async with MonitoredSession([hook, saving(tmp_path, diary)], diary.creator) as session:
            while session.global_step.value < last:
                await session.run([])
            state = hook.state_dict()
            assert "state" in (state["source"] if by_items else state), "it is not counted"
    assert diary.items == list(range(20))


async def test_a_shuffling_stateful_loader_resumes_in_its_own_order(tmp_path: Path) -> None:
    for last in (3, 7, 99):
        diary = Diary()
        source = stateful(shuffle=True, generator=torch.Generator().manual_seed(last))
        hooks = [FeedHook(source, "x"), saving(tmp_path, diary)]
        async with MonitoredSession(hooks, diary.creator) as session:
            while session.global_step.value < last:
                await session.run([])
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
    assert rest[:num_of_pass] == whole[count : count + num_of_pass]
    assert len(rest) == len(whole) - count


@pytest.mark.parametrize("call", [4, 7])
async def test_a_stateful_loader_goes_back_with_the_model(call: int, tmp_path: Path) -> None:
    diary = Diary({call: PreemptionError("lost")})
    hooks = [FeedHook(prefetch(stateful(), 2), "x"), saving(tmp_path, diary)]
    async with MonitoredSession(hooks, diary.creator) as session:
        await until_stopped(session)
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


def test_a_loader_without_workers_fixes_no_start_method() -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
