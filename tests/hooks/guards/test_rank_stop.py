"""A stop, an error or the end of one rank ends training on all ranks, each a real process."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from asynchooks import MonitoredSession, RankStopHook, StopAtStepHook

from ...checkpoints.ranks import run_ranks, start_ranks

pytest.importorskip("torch")

TRAINING = """
import json, os, random, re, signal
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)

class At(SessionRunHook):
    def __init__(self, step, **acts):
        self.step, self.acts = step, acts
    def act(self, moment, step):
        if step == self.step and moment in self.acts:
            self.acts[moment](self)
    async def before_run(self, run_context):
        self.act("before_run", run_context.global_step.value)
    async def after_run(self, run_context, run_values):
        self.run_context = run_context
        self.act("after_run", run_context.step)

def trainer(path, hooks, given=lambda step, loss: {"loss": loss}):
    module = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    made = iter(range(1, 100))
    def step(x):
        optimizer.zero_grad()
        loss = module(torch.full((4, 3), float(x) / 50)).square().mean()
        outputs = given(next(made), loss.item())
        loss.backward()
        optimizer.step()
        return outputs
    saver = DistributedCheckpointSaver(module=module, optimizer=optimizer)
    return MonitoredSession([*hooks, CheckpointSaverHook(path, save_steps=2, saver=saver)], step)

async def end_of(session, after_each=lambda step: True):
    try:
        async with session:
            while not session.should_stop():
                await session.run("loss")
                if not after_each(session.global_step.value):
                    break
    except (Exception, SystemExit) as raised:
        return raised
"""

STOPS = """
path, num, seed, backend, every = args[0], int(args[1]), args[2], args[3], int(args[4])
KINDS = ["request_stop", "signal", "time", "hook", "early", "nan", "nan error", "side task"]
if every == 1:
    KINDS += ["data", "loop"]

async def fails():
    raise ValueError("in a side task")

async def train(number):
    draw = random.Random(f"{seed} {number}")
    chosen, drawn, at = draw.randrange(size), KINDS[number % len(KINDS)], draw.randrange(1, 8)
    kind = drawn if rank == chosen else "none"
    acts = {
        "request_stop": lambda hook: session.request_stop("asked for"),
        "signal": lambda hook: signal.raise_signal(signal.SIGTERM),
        "hook": lambda hook: hook.run_context.request_stop("a hook"),
        "side task": lambda hook: session.start_soon(fails),
    }
    def given(step, loss):
        if step == at and kind in ("nan", "nan error"):
            loss = float("nan")
        return {"loss": loss, "score": -step if step >= at and kind == "early" else step}
    hooks = [
        RankStopHook(every, timeout_secs=60),
        PreemptionHook(),
        At(at, after_run=acts.get(kind, lambda hook: None)),
        FeedHook(range(at if kind == "data" else 60), "x"),
        NanTensorHook("loss", fail_on_nan_loss=drawn == "nan error"),
        EarlyStoppingHook("score", 1, mode="max"),
        TimeLimitHook(0.02 * at if kind == "time" else 100),
    ]
    random.Random(f"{seed} {number} {rank}").shuffle(hooks)
    session = trainer(f"{path}/{number}", hooks, given)
    error = await end_of(session, lambda step: kind != "loop" or step < at)
    found = [re.fullmatch("model.ckpt-([0-9]+)", name) for name in os.listdir(f"{path}/{number}")]
    print(json.dumps({
        "chosen": chosen, "kind": drawn, "at": at, "rank": rank,
        "saved": max(int(each[1]) for each in found if each),
        "step": session.global_step.value, "reason": str(session.stop_reason), "error": repr(error),
    }))

for number in range(num):
    anyio.run(train, number, backend=backend)
"""

ERRORS = {
    "none": "None",
    "signal": "SystemExit(143)",
    "nan error": "NanLossDuringTrainingError",
    "side task": "ValueError",
}
"""What leaves the rank that stops, by the kind of its stop."""


def check_stops(size: int, num: int, path: Path, seed: int, backend: str, every: int) -> None:
    """So many random stops of random ranks: each ends all at one step, which is saved."""
    outputs = run_ranks(TRAINING + STOPS, size, path, num, seed, backend, every)
    trainings: list[list[dict[str, Any]]] = [
        [json.loads(line) for line in lines]
        for lines in zip(
            *([line for line in out if line[0] == "{"] for out in outputs), strict=True
        )
    ]
    assert len(trainings) == num
    for ends in trainings:
        first = ends[0]
        chosen, kind, step = first["chosen"], first["kind"], first["step"]
        assert [each["step"] for each in ends] == [step] * size, ends
        if kind in ("request_stop", "hook", "data", "loop", "nan", "nan error"):
            assert first["at"] <= step < first["at"] + every, ends
        for end in ends:
            is_chosen = end["rank"] == chosen
            assert end["reason"].startswith(f"rank {chosen}: ") is not is_chosen, ends
            if "nan" in kind:
                assert end["saved"] < first["at"], ends
            else:
                assert end["saved"] == step, ends
            error = ERRORS.get(kind, "None")
            if not is_chosen:
                error = "RankError" if kind in ("nan error", "side task") else "None"
            assert end["error"].startswith(error), ends


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "every", "num"), [("asyncio", 1, 20), ("trio", 3, 16)])
def test_all_ranks_stop_at_one_step_and_save_it_whichever_of_them_stops(
    tmp_path: Path, backend: str, every: int, num: int
) -> None:
    check_stops(2, num, tmp_path, 5, backend, every)  # twice by each kind of stop


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_fifty_random_stops_of_four_ranks_each_end_all_at_one_step(
    tmp_path: Path, backend: str
) -> None:
    check_stops(4, 50, tmp_path, 2, backend, 1)


FAILURES = """
path, kind, backend = args

def fail(hook):
    raise ValueError("on this rank")

def kill(hook):
    os.kill(os.getpid(), signal.SIGKILL)

def stop(hook):
    os.kill(os.getpid(), signal.SIGSTOP)

BETWEEN = {"hook": {"before_run": fail}, "stopped": {"after_run": stop}}
IN_STEP = {"step": fail, "killed in the step": kill, "stopped in the step": stop}

def given(step, loss):
    if rank == size - 1 and step == 4 and kind in IN_STEP:
        IN_STEP[kind](None)
    return {"loss": loss}

async def train():
    acts = BETWEEN.get(kind, {}) if rank == size - 1 else {}
    stopping = RankStopHook(timeout_secs=4 + rank if "stopped" in kind else 90)
    session = trainer(path, [stopping, FeedHook(range(60), "x"), At(3, **acts)], given)
    error = await end_of(session)
    print(json.dumps({"step": session.global_step.value, "error": repr(error),
                      "reason": str(session.stop_reason)}), flush=True)

anyio.run(train, backend=backend)
if "stopped" in kind:
    os._exit(0)
if rank == size - 1:
    stop(None)  # it keeps what it has open until the others have ended
"""
FAULTS = {
    "step": r"rank 2: ValueError\('on this rank'\)",
    "hook": r"rank 2: ValueError\('on this rank'\)",
    "killed in the step": "a rank is gone",
    # the first one that has waited too long closes its connections to the others
    "stopped": "(no agreement for [456] s: a rank hangs|a rank is gone)",
    "stopped in the step": "(no agreement for [456] s: a rank hangs|a rank is gone)",
}
"""How the third rank fails at its fourth step, and what the others say of it."""
RARE = ("hook", "stopped")
"""Those much like another one."""


@pytest.mark.faults
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param(kind, ("asyncio", "trio")[n % 2], marks=[pytest.mark.slow] * (kind in RARE))
        for n, kind in enumerate(FAULTS)
    ],
)
def test_ranks_end_with_an_error_that_names_the_rank_which_failed_or_is_gone_or_hangs(
    tmp_path: Path, kind: str, backend: str
) -> None:
    processes = start_ranks(TRAINING + FAILURES, 3, tmp_path / "saved", kind, backend)
    try:
        for each in processes[:2]:
            output, errors = each.communicate(timeout=80)
            assert each.returncode == 0, errors
            end = json.loads(output)
            assert end["step"] == 3
            assert end["error"].startswith("RankError(")
            assert re.search(f"here at step 3: {FAULTS[kind]}", end["error"])
            assert re.match(f"RankStopHook: {FAULTS[kind]}", end["reason"])
        os.kill(processes[2].pid, signal.SIGCONT)
        output, errors = processes[2].communicate(timeout=80)
        if "killed" in kind:
            assert processes[2].returncode == -signal.SIGKILL
        elif "stopped" in kind:  # it goes on, and finds that the others have ended
            assert json.loads(output)["error"].startswith("RankError"), errors
        else:
            assert json.loads(output)["error"] == "ValueError('on this rank')", errors
    finally:
        for each in processes:
            each.kill()


BESIDE = """
from torch.distributed.distributed_c10d import _get_default_store

(backend,) = args

async def train(beside):
    async with MonitoredSession([RankStopHook(timeout_secs=60), StopAtStepHook(3)],
                                lambda: {"loss": 1.0}) as session:
        while not session.should_stop():
            await beside(session)
            await session.run("loss")
    print(session.global_step.value, session.stop_reason)

async def say():
    _get_default_store().set("said", "")

async def beside(session):
    if session.global_step.value == 1 and rank == 0:
        session.start_soon(say)  # it first runs when this task waits: for the other rank
    if session.global_step.value == 1 and rank == 1:
        await anyio.to_thread.run_sync(_get_default_store().wait, ["said"])

anyio.run(train, beside, backend=backend)

async def shared():
    creator = SharedSessionCreator(lambda: {"loss": 1.0}, num_workers=2)
    async with MonitoredSession([RankStopHook()], creator):
        raise AssertionError("it opened")

try:
    anyio.run(shared, backend=backend)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.faults
@pytest.mark.timeout(200)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_other_tasks_go_on_while_ranks_agree_and_workers_that_share_a_model_are_refused(
    backend: str,
) -> None:
    for lines in run_ranks(BESIDE, 2, backend):
        assert lines[0] == "3 the limit: global_step is at 3 of 3"
        assert "one of several that share a model in this process" in lines[1]


async def test_a_process_without_a_group_trains_as_without_the_hook() -> None:
    hook = RankStopHook(every_n_steps=2)
    async with MonitoredSession([hook, StopAtStepHook(3)], lambda: {"loss": 1.0}) as session:
        while not session.should_stop():
            await session.run("loss")
            if session.global_step.value == 2:
                session.request_stop("enough")
                assert session.should_stop()
    assert session.global_step.value == 2
    assert str(session.stop_reason) == "session.request_stop: enough"
