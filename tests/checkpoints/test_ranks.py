"""Several ranks save and resume together, and others of another number after them."""

import os
from collections import Counter
from pathlib import Path

import pytest

from .ranks import run_ranks
from .stores import names_in

pytest.importorskip("torch")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

PROGRAM = """
from torch.nn.parallel import DistributedDataParallel
from asynchooks.data import batch, prefetch, repeat, shuffle

path, life, backend = args
logging.basicConfig(format="LOG %(message)s", stream=sys.stdout)

async def train(path, last_step, breaks=False):
    torch.manual_seed(0)
    module = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    seen = {"items": torch.zeros(100)}

    def step(item):
        seen["items"][item] += 1
        optimizer.zero_grad()
        loss = module(torch.full((4, 3), float(item) / 50)).square().mean()
        loss.backward()
        optimizer.step()
        return {"loss": loss.item()}

    saver = DistributedCheckpointSaver(module=module, optimizer=optimizer, seen=seen)
    if breaks:
        write = saver._others.save
        def save(path):
            if rank == 1 and seen["items"].sum() > 6:
                raise OSError("no space on rank 1")
            write(path)
        saver._others.save = save
        saver = type("Plain", (), {"save": saver.save, "restore": saver.restore,
                                   "ranks": saver.ranks})()
    hook = CheckpointSaverHook(path, save_steps=3, saver=saver, background=not breaks,
                               retention=Retention(max_to_keep=2))
    source = FeedHook(shuffle(range(rank * 50, rank * 50 + 50), 16, seed=rank), "item")
    hooks = [source, hook, StopAtStepHook(last_step=last_step)]
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        first = session.global_step.value
        while not session.should_stop():
            await session.run("loss")
    total = module.module.weight.double().sum().item().hex()
    items = seen["items"].nonzero().flatten().tolist()
    print(first, total, max(seen["items"].tolist()), items)

if life == "0":
    anyio.run(train, path + "/whole", 12)
    anyio.run(train, path + "/parts", 7)
    anyio.run(train, path + "/parts", 12)
    try:
        anyio.run(train, path + "/breaks", 12, True)
    except Exception as error:
        print(type(error).__name__, error)

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
    saving = CheckpointSaverHook(f"{path}/{kind}", save_steps=2, saver=saver)
    counts = Counts()
    async with MonitoredSession([hook, counts, saving], FunctionSessionCreator(step)) as session:
        first = session.global_step.value
        batches = session.batches(source) if kind == "loop" else None
        for _ in range(num_steps):
            await session.run([], None if batches is None else {"x": await anext(batches)})
    print("RESULT", kind, first, counts.runs)

for kind in KINDS:
    num_steps = 4 if life > "0" else 3 if kind != "begun" else 0
    try:
        anyio.run(live, kind, num_steps, backend=backend)
    except Exception as error:
        print("RESULT", kind, type(error).__name__, error)
"""
SIZES = [2, 1, 2]
"""Of the groups that live one after the other, each on the checkpoints of the one before."""
POSITIONS = ["list", "range", "stages", "epochs", "DataLoader", "feed_fn", "loop"]


def test_ranks_resume_together_and_another_number_of_them_what_reads_no_part_of_the_data(
    tmp_path: Path,
) -> None:
    lives = []
    for life, (size, backend) in enumerate(zip(SIZES, ["asyncio", "trio", "trio"], strict=True)):
        lives.append(run_ranks(PROGRAM, size, tmp_path, life, backend))
    for lines in lives[0]:
        whole, part, resumed, failed = [each for each in lines if each[:3] not in ("LOG", "RES")][
            :4
        ]
        assert [each.split()[0] for each in (whole, part, resumed)] == ["0", "0", "7"]
        assert resumed.split()[1:] == whole.split()[1:]
        assert failed.startswith("CheckpointError")
        assert "rank 1: " in failed
        assert "no space on rank 1" in failed
    files = os.listdir(tmp_path / "parts" / "model.ckpt-12")
    assert {"hooks.json", "model.ckpt-12.rank1.hooks.json", "manifest.json"} <= set(files)
    assert names_in(tmp_path / "breaks") == ["model.ckpt-3", "model.ckpt-6"], "saved on none"
    for life, refused, kinds in (
        (1, POSITIONS, {"begun 0 4", "no position 3 7"}),  # of "begun" nothing was trained yet
        (2, ["begun"], {"no position 7 11", *(f"{kind} 3 7" for kind in POSITIONS)}),
    ):
        before, here = SIZES[life - 1 : life + 1]
        for lines in lives[life]:
            said = [each.removeprefix("RESULT ") for each in lines if each.startswith("RESULT")]
            assert kinds <= {*said}, "with the state of the hook that counts"
            for kind in refused:
                [line] = [each for each in said if each.startswith(f"{kind} ")]
                assert f"was saved by {before} rank" in line
                assert f"there are {here}: the position of " in line
                assert "divide it by asynchooks.data.shard(source, num_shards, index)" in line
                assert f"call restore('{tmp_path}/{kind}/model.ckpt-" in line
            [loader] = [each for each in said if each.startswith("in the saver ")]
            assert (f"there are {here}: loader would go on" in loader) == (life == 1)
            [log] = [each for each in lines if each.startswith("LOG") and "/no pos" in each]
            assert f"was saved by {before} rank" in log


DIVIDED = """
from asynchooks.data import batch, map_concurrent, prefetch, repeat, rollouts, shard, shuffle

path, num_steps, backend = args

def passes(epoch):
    return [(epoch, number) for number in range(24)]

async def same(item):
    for _ in range(item[1] * 7 % 5):
        await anyio.lowlevel.checkpoint()
    return item

def part(source=passes):
    return shard(source, size, rank)

KINDS = {  # ranks take batches of different sizes, so that they are in different passes
    "batches": lambda: prefetch(repeat(batch(shuffle(part(), 5, 1), 1 + rank), 3), 2),
    "stream": lambda: batch(map_concurrent(same, part(shuffle(repeat(passes, 3), 5, 1)), 3), 2),
    "generated": lambda: rollouts(
        same, repeat(part(), 3), 1 + rank, concurrency=5, max_staleness=9
    ),
}

async def live(kind, reads):
    used, ends, source = [], [], KINDS[kind]()
    losses = [PreemptionError("lost")] if size == 3 else []  # before the ranks have saved
    if kind == "generated":
        items = lambda group: [each.item for each in group]
    else:
        items = lambda group: list(zip(*group))

    def step(x):
        if losses and used:
            used.clear()
            raise losses.pop()
        used.extend("%d:%d" % each for each in items(x))
        return {}

    def after_epoch(session, epoch):
        ends.append(epoch)

    if reads == "in a loop":
        hook = InputPositionHook(source)
    else:
        hook = FeedHook(source, "x", after_epoch=after_epoch if kind == "batches" else None)
    saver = DistributedCheckpointSaver(module=torch.nn.Linear(1, 1))
    saving = CheckpointSaverHook(f"{path}/{kind} {reads}", save_steps=4, saver=saver)
    stop = StopAtStepHook(num_steps=int(num_steps))
    async with MonitoredSession([hook, saving, stop], FunctionSessionCreator(step)) as session:
        if reads == "in a loop":
            async for x in session.batches(source):
                await session.run([], {"x": x})
        else:
            while not session.should_stop():
                await session.run([])
    print("USED", kind, reads, *used)
    print("ENDS", kind, reads, *ends)

for kind in KINDS:
    for reads in ("by a hook", "in a loop"):
        anyio.run(live, kind, reads, backend=backend)
"""


def test_what_a_divided_source_has_left_is_divided_among_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    used, ends = Counter[tuple[str, ...]](), list[str]()
    for size, num_steps, backend in ((2, 5, "asyncio"), (3, 3, "trio"), (1, 999, "asyncio")):
        for lines in run_ranks(DIVIDED, size, tmp_path, num_steps, backend):
            for kind, *words in (each.split(" ") for each in lines):
                if kind == "USED":
                    name, how, items = words[0], " ".join(words[1:4]), words[4:]
                    used.update((name, how, each) for each in items)
                elif words[:4] == ["batches", "by", "a", "hook"]:
                    ends = words[4:]
    assert used == Counter(
        (name, how, f"{epoch}:{number}")
        for name in ("batches", "stream", "generated")
        for how in ("by a hook", "in a loop")
        for epoch in range(3)
        for number in range(24)
    )
    assert ends == ["0", "1", "2"], "as of the rank that was in the first pass"
