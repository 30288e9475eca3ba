"""torch's DataLoader as the input: its own settings hold, and what is dangerous is said once."""

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
from asynchooks.data import Stage, batch, prefetch, repeat

# private: what is said once in a process is said in each test that looks for it
from asynchooks.data._readings import _DataLoader

from ..data.sources import on_asyncio, read_all
from ..hooks.inputs import trained_in_lives, trained_with
from ..support.threads import threads_left

torch = pytest.importorskip("torch")
utils = torch.utils.data
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|multiprocessing).*"),
    pytest.mark.filterwarnings("ignore:Got pickle error"),  # torch says it, too
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),  # by torchdata
]
forks = pytest.mark.skipif(multiprocessing.get_all_start_methods()[0] != "fork", reason="of Linux")


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


@pytest.fixture
def log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> pytest.LogCaptureFixture:
    """What the log says once in a process, it says once in this test."""
    monkeypatch.setattr(_DataLoader, "has_warned", False)
    caplog.set_level(logging.INFO, "asynchooks")
    return caplog


def loader(**options: Any) -> Any:
    return utils.DataLoader(Numbers(), **{"batch_size": 2, **options})


async def test_batches_of_a_loader_without_workers_are_tensors(
    log: pytest.LogCaptureFixture,
) -> None:
    seen = await read_all(prefetch(loader(), 2))
    assert all(torch.is_tensor(each) and each.shape == (2,) for each in seen)
    assert (await trained_with(loader())).items == list(range(20))
    assert not threads_left()
    assert "workers of" not in log.text


SAID = "are forked out of a process with an event loop and threads"


@pytest.mark.faults
@on_asyncio  # a thread starts them, on whichever event loop
@pytest.mark.parametrize(
    ("method", "kind", "is_persistent"),
    [
        pytest.param(None, "Process", True, marks=forks),
        pytest.param("fork", "ForkProcess", False, marks=forks),
        ("forkserver", "ForkServerProcess", True),
    ],
)
async def test_workers_are_started_as_the_loader_says_and_forking_has_a_warning(
    method: str | None, kind: str, is_persistent: bool, log: pytest.LogCaptureFixture
) -> None:
    source = utils.DataLoader(
        Numbers(gives_process=True),
        batch_size=None,
        num_workers=1,
        multiprocessing_context=method,
        persistent_workers=is_persistent,
    )
    made_by = await read_all(prefetch(repeat(source, 2), 4))
    assert len(made_by) == 40
    kinds, pids, parents = (set(each) for each in zip(*made_by, strict=True))
    assert kinds == {kind}
    assert len(pids) == (1 if is_persistent else 2)
    if method == "forkserver":
        assert os.getpid() not in pids | parents
        assert source.multiprocessing_context.get_start_method() == method
        assert "workers" not in log.text, "it has no danger to name"
    else:
        assert parents == {os.getpid()}
        assert log.text.count(SAID) == 1
        persistent = "" if is_persistent else " and persistent_workers=True"
        assert f'multiprocessing_context="forkserver"{persistent};' in log.text
    if is_persistent:
        # unwatched: now and then a worker aborts while its interpreter ends, and torch's signal
        # handler would raise that in whatever the main thread does
        torch._C._remove_worker_pids(id(source._iterator))
        source._iterator._worker_pids_set = False
        source._iterator._shutdown_workers()


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


def stateful(**options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(Numbers(), **{"batch_size": 2, **options})


@pytest.mark.parametrize("make", [loader, stateful, lambda: batch(stateful(), 2)])
async def test_a_loader_resumes_and_goes_back_with_the_model(make: Any, tmp_path: Path) -> None:
    lives = await trained_in_lives(lambda size: prefetch(make(), size), tmp_path / "a", 3, 3, 7, 99)
    assert lives.items == list(range(20))
    for call in (4, 5):
        errors = {call: PreemptionError("lost")}
        diary = await trained_with(prefetch(make(), 2), tmp_path / str(call), errors=errors)
        assert diary.items == list(range(20))
    source = prefetch(make(), 2)
    await trained_with(source, last=3)
    assert ("'state'" in repr(source.state_dict())) == (make is not loader), "it is not counted"


@pytest.mark.parametrize("count", [0, 9, 10, 11])
async def test_a_shuffling_stateful_loader_resumes_also_where_a_pass_begins(count: int) -> None:
    def passes(seed: int) -> Stage[Any]:
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
    rest = [each.tolist() for each in await read_all(again)]
    first, expected = rest[:num_of_pass], whole[count : count + num_of_pass]
    if num_of_pass == 10 and count:  # a whole pass, which the loader orders anew
        first, expected = sorted(chain(*first)), sorted(chain(*expected))
    assert first == expected
    assert len(rest) == len(whole) - count


SCRIPT = """
    import asyncio, multiprocessing, torch
    from asynchooks import FeedHook, FunctionSessionCreator, MonitoredSession
    from asynchooks.data import prefetch

    async def main():
        async with prefetch(torch.utils.data.DataLoader([1, 2, 3]), 1) as items:
            assert len([each async for each in items]) == 3
        print("has a start method:", multiprocessing.get_start_method(True))
        loader = torch.utils.data.DataLoader(
            range(6), num_workers=1, batch_size=2, multiprocessing_context="forkserver"
        )
        creator = FunctionSessionCreator(lambda x: {})
        async with MonitoredSession([FeedHook(loader, "x")], creator) as session:
            await session.run([])

    asyncio.run(main())
"""


@pytest.mark.faults
def test_a_script_has_no_start_method_chosen_and_the_lack_of_a_main_guard_is_named(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment,
    )
    assert done.returncode != 0
    assert "has a start method: None" in done.stdout
    assert done.stderr.count("its workers import the main module: start training") == 1
