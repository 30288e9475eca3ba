"""Another number of ranks: what reads a part of the data is refused, all else resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from .ranks import run_ranks

pytest.importorskip("torch")
pytestmark = pytest.mark.faults

PROGRAM = """
from asynchooks.data import batch, prefetch, repeat, shuffle

path, num_steps, backend = args
logging.basicConfig(format="LOG %(message)s", stream=sys.stdout)

class Drawing:
    def __init__(self, items):
        self.items, self.position = items, 0
    def __call__(self):
        self.position += 1
        return {"x": self.items[self.position - 1]}
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]
    def __iter__(self):
        return iter(self.items)

class Counts(SessionRunHook):
    runs = 0
    async def after_run(self, run_context, run_values):
        self.runs += 1
    def state_dict(self):
        return {"runs": self.runs}
    def load_state_dict(self, state):
        self.runs = state["runs"]

part = list(range(48))[rank::size]
KINDS = {
    "list": lambda: FeedHook(part, "x"),
    "range": lambda: FeedHook(range(rank, 48, size), "x"),
    "stages": lambda: FeedHook(prefetch(batch(shuffle(part, 8, seed=1), 2), 2), "x"),
    "epochs": lambda: FeedHook(repeat(part, 9), "x"),
    "DataLoader": lambda: FeedHook(torch.utils.data.DataLoader(part, batch_size=2), "x"),
    "feed_fn": lambda: FeedFnHook(Drawing(part)),
    "loop": None,
    "in the saver": lambda: FeedFnHook(lambda: {"x": 1}),
    "begun": lambda: FeedHook(part, "x"),
    "no position": lambda: FeedFnHook(lambda: {"x": 1}),
}

async def live(kind, num_steps):
    seen = []
    def step(x):
        seen.append(x)
        return {}
    source = prefetch(part, 2)
    hook = InputPositionHook(source) if kind == "loop" else KINDS[kind]()
    others = {"loader": Drawing(part)} if kind == "in the saver" else {}
    saver = DistributedCheckpointSaver(module=torch.nn.Linear(1, 1), **others)
    saving = CheckpointSaverHook(path + "/" + kind, save_steps=2, saver=saver)
    counts = Counts()
    async with MonitoredSession([hook, counts, saving], FunctionSessionCreator(step)) as session:
        first = session.global_step.value
        batches = session.batches(source) if kind == "loop" else None
        for _ in range(num_steps):
            await session.run([], None if batches is None else {"x": await anext(batches)})
    print("RESULT", kind, first, counts.runs)

for kind in KINDS:
    try:
        anyio.run(live, kind, 0 if kind == "begun" and num_steps == "3" else int(num_steps),
                  backend=backend)
    except Exception as error:
        print("RESULT", kind, type(error).__name__, error)
"""
POSITIONS = ["list", "range", "stages", "epochs", "DataLoader", "feed_fn", "loop"]


@pytest.mark.parametrize(
    ("before", "others", "backend"), [(1, [2], "asyncio"), (2, [1, 2], "trio")]
)
def test_a_position_of_another_number_of_ranks_is_refused_on_all_and_all_else_resumes(
    tmp_path: Path, before: int, others: list[int], backend: str
) -> None:
    run_ranks(PROGRAM, before, tmp_path, 3, backend)
    for after in others:
        for lines in run_ranks(PROGRAM, after, tmp_path, 4, backend):
            said = [each.removeprefix("RESULT ") for each in lines if each.startswith("RESULT")]
            if after == before:
                kinds = [*POSITIONS, "in the saver"]
                assert {f"{kind} 3 7" for kind in kinds} <= {*said}
                continue
            for kind in POSITIONS:
                [line] = [each for each in said if each.startswith(f"{kind} ")]
                assert f"was saved by {before} rank" in line
                assert f"there are {after}: the position of " in line
                assert f"call restore('{tmp_path}/{kind}/model.ckpt-3/model.ckpt-3')" in line
            [loader] = [each for each in said if each.startswith("in the saver ")]
            assert f"there are {after}: loader would go on" in loader
            if after == others[0]:  # what resumed has gone on since
                assert "begun 0 4" in said, "nothing was trained yet"
                assert "no position 3 7" in said, "with the state of the hook that counts"
                [log] = [each for each in lines if each.startswith("LOG") and "/no pos" in each]
                assert f"was saved by {before} rank" in log
