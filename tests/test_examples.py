"""The examples, run with a reader's arguments; those that start processes, in their own."""

import math
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from .support.examples import EXAMPLES, ROOT, ended, found, number, run_here, start_example

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

both = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@pytest.fixture(autouse=True)
def _has_what_it_needs(request: pytest.FixtureRequest) -> None:
    """Skip a test whose mark `tensorflow`, or name, tells of what is not installed."""
    names = {
        "jax": "jax", "pytorch": "torch", "ranks": "torch", "dask": "distributed", "HTTP": "httpx"
    }  # fmt: skip
    needs = [module for name, module in names.items() if name in request.node.name]
    if request.node.get_closest_marker("tensorflow"):
        needs.append("tensorflow")
    for module in ("sklearn", *needs):
        pytest.importorskip(module)


@pytest.mark.tensorflow
@both
def test_quickstart_starts_gradually_stops_exactly_and_learns(backend: str) -> None:
    printed = run_here("quickstart.py", "--backend", backend)
    workers = re.findall(r"worker (\d) started at step +(\d+), ran +(\d+) steps", printed)
    assert [int(place) for place, _, _ in workers] == list(range(8))
    starts = [int(start) for _, start, _ in workers]
    assert all(start >= int(200 * math.log(i + 1)) for i, start in enumerate(starts)), starts
    assert starts == sorted(starts)
    assert sum(int(steps) for _, _, steps in workers) == 4000
    assert number(r"^final step (\d+), [1-9]", printed) == 4000
    assert number(r"^test accuracy ([\d.]+)", printed) >= 0.95


@pytest.mark.tensorflow
def test_the_script_prints_the_same_before_and_after_its_move() -> None:
    before, after = run_here("tensorflow1_before.py"), run_here("tensorflow1_after.py")
    assert after == before
    assert number(r"^step 600, loss [\d.]+, accuracy ([\d.]+)$", before) >= 0.95
    assert before.endswith("model.ckpt-600.index\n")


@both
@pytest.mark.parametrize(
    ("name", "shown", "accuracy", "least"),
    [
        pytest.param(
            "keras_hooks.py", rf"received the steps \[{', '.join(map(str, range(1, 1000, 100)))}\]",
            "stopped at step 1000, test accuracy", 0.95, marks=pytest.mark.tensorflow,
        ),
        pytest.param(
            # every row of 8 epochs, although the server refused and cut: 8 * 1797 = 224 * 64 + 40
            "http_shards.py", r"^prefetch +225 +7,475,520 +\d+%",
            "225 steps, training accuracy", 0.9, marks=pytest.mark.tensorflow,
        ),
        (
            # 18 * 50 + 6 * 150 + 3 * 450 steps
            "successive_halving.py", r"^at step +150 3 of 9 go on; .*\n(.*\n)*3150 steps, instead",
            "^the winner: .*, accuracy", 0.95,
        ),
    ],
    ids=["keras", "shards over HTTP", "halving"],
)  # fmt: skip
def test_an_example_shows_what_it_is_about_and_learns(
    name: str, shown: str, accuracy: str, least: float, backend: str
) -> None:
    printed = run_here(name, "--backend", backend)
    found(shown, printed)
    assert number(rf"{accuracy} ([\d.]+)", printed) >= least


@pytest.mark.parametrize("name", ["durable.py", "jax_digits.py"])
def test_an_example_that_resumes_ends_as_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    """Also if each part runs on another event loop."""
    whole = run_here(name, tmp_path / "whole", "--backend", "asyncio")
    parts = (name, tmp_path / "parts", "--backend")
    first, rest = run_here(*parts, "trio", "--last-step", 250), run_here(*parts, "asyncio")
    assert "\ntraining begins at step 0\nstep  100: " in first
    assert "\ntraining begins at step 250\n" in rest
    # evaluations of the first part come before; from there on both print the same
    assert rest.splitlines()[2:] == whole.splitlines()[4:]
    assert number(r"^test accuracy ([\d.]+)", whole) >= 0.95
    if name == "durable.py":
        assert "stopped by the limit: global_step is at 250 of 250\n" in first
        assert "\nstopped by EarlyStoppingHook: no better than " in whole


def test_every_example_is_in_the_readme_of_the_examples_and_on_the_site() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f"`{path.name}`" in readme
        assert f"{{literalinclude}} ../examples/{path.name}\n" in page


def test_four_workers_train_one_pytorch_module_and_stop_early(tmp_path: Path) -> None:
    example = ("pytorch_digits.py", tmp_path, "--backend")
    first, rest = run_here(*example, "asyncio", "--last-step", 120), run_here(*example, "trio")
    assert "\nstopped by the limit: global_step is at 120 of 120\n" in first
    assert "\ntraining begins at step 120\n" in rest
    assert "\nstopped by EarlyStoppingHook: no better than " in rest
    counts = [int(each) for each in found(r"^the workers ran \[(.*)\] steps$", first)[1].split(",")]
    assert sum(counts) == 120
    assert min(counts) > 0
    assert "were restored" not in first
    found(r"^the weights of step \d+ were restored$", rest)
    assert number(r"^test accuracy ([\d.]+)$", rest) >= 0.95


@pytest.mark.tensorflow
def test_a_tf_data_pipeline_feeds_a_graph_and_resumes(tmp_path: Path) -> None:
    example = ("tf_data.py", "--directory", tmp_path, "--steps")
    assert run_here(*example, 300, "--backend", "trio").endswith("after 300 steps\n")
    rest = run_here(*example, 600, "--backend", "asyncio")
    assert "training begins at step 300\n" in rest
    assert number(r"test accuracy ([\d.]+) after 600 steps", rest) >= 0.9


def test_a_planned_run_is_as_it_is_measured() -> None:
    printed = ended(start_example("plan_rollouts.py", "--secs", 2))
    plans = re.findall(r"^concurrency=(\d+), secs=2.0: ([\d.]+) ", printed, re.MULTILINE)
    assert [num for num, _ in plans] == ["4", "16", "32", "64"]
    assert float(plans[0][1]) < float(plans[1][1])
    end = found(r"measured: ([\d.]+) updates/s, planned: ([\d.]+) ", printed)
    assert float(end[2]) == pytest.approx(float(end[1]), rel=0.3)  # tests run beside it


@both
def test_rollouts_teach_the_policy_and_a_crash_of_an_actor_leaves_at_once(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run_here("rollouts.py", "--backend", backend)
    assert number(r"after 300 steps: ([\d.]+) moves of at least 9", printed) < 15
    with pytest.raises(ConnectionError, match="actor 3 has lost its game server"):
        run_here("rollouts.py", "--crash", "--backend", backend)


def test_a_remote_trainer_makes_a_step_a_cycle_and_goes_on_where_it_was(tmp_path: Path) -> None:
    line = re.compile(r"depth (\d), from step (\d+): (\d+) steps, ([\d.]+) s each, loss (.*)")
    example = ("remote_trainer.py", tmp_path, "--last-step")
    first = line.findall(run_here(*example, 30, "--backend", "trio"))
    rest = line.findall(run_here(*example, 40, "--backend", "asyncio"))
    one, two, begun = first
    assert [each[:3] for each in first] == [("1", "0", "20"), ("2", "0", "20"), ("2", "0", "30")]
    assert float(one[3]) >= 0.19  # two cycles a step
    assert float(two[3]) < 0.75 * float(one[3])  # one, but for a machine that is busy
    assert one[4] == two[4]
    assert rest[2][:3] == ("2", "30", "10")
    assert float(rest[2][4]) < float(begun[4])  # from the weights of step 30, not new ones


def test_a_gradual_start_keeps_the_loss_from_rising() -> None:
    printed = run_here("gradual_start.py")
    row = re.compile(r"^ *(\d+) +([\d.]+) s +([\d.]+) +[\d.]+ +([\d.]+)$", re.MULTILINE)
    gaps, starts, highest, secs = zip(*row.findall(printed), strict=True)
    assert gaps == ("0", "20", "80", "160")
    for each in (starts, secs):
        assert sorted(each, key=float) == list(each)
    # that of the start
    assert float(highest[0]) > 2 * float(highest[1]) == 2 * float(highest[2])


@both
def test_gradients_of_jax_make_updates_by_each_protocol(backend: str) -> None:
    printed = run_here("jax_parameter_server.py", "--updates", 300, "--backend", backend)
    rows = re.findall(
        r"^(\w+)\(.*\): (\d+) updates of (\d+) gradients, mean staleness ([\d.]+), accuracy (\S+)$",
        printed, re.MULTILINE,
    )  # fmt: skip
    assert [each[:3] for each in rows] == [
        ("Asynchronous", "300", "300"),
        ("StaleSynchronous", "300", "300"),
        ("KBatchSync", "300", "600"),
    ]
    stale, bounded, whole = (float(each[3]) for each in rows)
    assert stale > bounded > whole == 0.0
    assert all(float(each[4]) > 0.8 for each in rows), printed


def test_stale_gradients_move_as_momentum_says() -> None:
    printed = run_here("stale_gradients.py")
    rows = re.findall(r"^ +(\d) +[\d.]+  (?:asynchronous|momentum) +(.*)$", printed, re.MULTILINE)
    assert len(rows) == 6
    for (workers, simulated), (_, expected) in zip(rows[::2], rows[1::2], strict=True):
        pairs = zip(simulated.split(), expected.split(), strict=True)
        # four standard errors of the mean of the runs; one worker has no chance in it
        bound = 0.001 if workers == "1" else 0.06
        assert all(abs(float(a) - float(b)) <= bound for a, b in pairs), printed


def test_a_thousand_workers_learn_digits_under_every_protocol(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "losses.png"
    printed = run_here("thousand_workers.py", "--secs", 6, "--plot", plot)
    rows = re.findall(r"^(\S+) +(\d+) +[\d.]+ +([\d.]+) +\d+% +([\d.]+)$", printed, re.MULTILINE)
    updates = {name: int(num) for name, num, _, _ in rows}
    assert sorted(updates, key=updates.__getitem__) == ["ksync:900", "kasync:100", "ssp:3", "async"]
    assert all(float(loss) < math.log(10) for *_, loss in rows)
    assert {name: float(stale) for name, _, stale, _ in rows}["ksync:900"] == 0.0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options", [[], ["--shard"]], ids=["ddp", "fsdp"])
def test_ranks_train_validate_and_resume_together(tmp_path: Path, options: list[str]) -> None:
    def run_ranks(num_epochs: int) -> str:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        args = [tmp_path / "ddp", *options, "--epochs", num_epochs]
        return ended(start_example("torch_ddp.py", *args, launcher=launcher))

    # 719 rows a rank, in batches of 32
    assert run_ranks(3).startswith("2 ranks, steps 0 to 66, test accuracy ")
    printed = run_ranks(10)
    assert printed.startswith("2 ranks, steps 66 to 220, test accuracy ")
    assert float(printed.split()[-1]) >= 0.9


def test_the_pytorch_program_to_copy_is_interrupted_resumes_and_learns(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options: Any = {"cwd": tmp_path, "stderr": subprocess.STDOUT}
    with start_example("torch_program.py", **options) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if "eval at step 40:" in line:
                first.send_signal(signal.SIGINT)
    interrupted_at = max(
        int(path.name.split("-")[-1]) for path in tmp_path.glob("digits/model.ckpt-*")
    )
    assert 40 <= interrupted_at < 400

    printed = ended(start_example("torch_program.py", **options))
    evaluated = [int(step) for step in re.findall(r"eval at step (\d+): accuracy", printed)]
    assert min(evaluated) > interrupted_at
    assert all(step % 20 == 0 for step in evaluated)
    assert number(r"^test accuracy of the best weights: ([\d.]+)$", printed) >= 0.9
    assert [*tmp_path.glob("digits/logs/events.*")]


@pytest.mark.tensorflow
def test_digits_are_learnt_by_workers_in_several_processes_around_a_ps() -> None:
    printed = ended(start_example("distributed_digits.py"))
    row = re.compile(r"^worker:(\d) began by the steps \[(.*)\], ran \[(.*)\] steps$", re.MULTILINE)
    rows = sorted(row.findall(printed))
    assert [process for process, _, _ in rows] == ["0", "1", "2"], printed
    for process, starts, _ in rows:
        for i, start in enumerate(starts.split(", ")):  # None: training ended before it could begin
            assert start == "None" or int(start) > int(100 * math.log(3 * i + int(process) + 1))
    assert sum(int(each) for _, _, steps in rows for each in steps.split(", ")) == 2000
    assert number(r"^worker:0: final step 2000, test accuracy ([\d.]+)$", printed) >= 0.95


def test_digits_are_learnt_by_sessions_in_several_dask_processes() -> None:
    printed = ended(start_example("distributed_digits_dask.py"))
    rows = re.findall(r"^process (\d): its sessions ran \[(.*)\] steps$", printed, re.MULTILINE)
    assert [process for process, _ in rows] == ["0", "1", "2"]
    steps = [int(each) for _, row in rows for each in row.split(", ")]
    assert len(steps) == 12
    # a gradient that came when the last update was made counts for a step, and for no update
    assert 2000 <= sum(steps) <= 2000 + 12
    assert number(r"^final step 2000, test accuracy ([\d.]+)$", printed) >= 0.95


def descendants(pid: int) -> set[int]:
    """Processes below this one that run a script or a task of its own."""
    below = set[int]()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            below |= {child} | descendants(child)
    return below


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="it looks into /proc")
@pytest.mark.parametrize(
    ("script", "num_processes", "sent"),
    [
        pytest.param("distributed_digits.py", 4, signal.SIGKILL, marks=pytest.mark.tensorflow),
        ("distributed_digits_dask.py", 3, signal.SIGINT),
        ("distributed_digits_dask.py", 3, signal.SIGKILL),
    ],
)
def test_no_process_outlives_the_script(
    script: str, num_processes: int, sent: signal.Signals
) -> None:
    process, below = start_example(script), set[int]()
    try:
        while len(below) < num_processes:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
            below = descendants(process.pid)
        process.send_signal(sent)
        process.communicate(timeout=100)
        while any(map(is_running, below)):  # until the test's own timeout
            time.sleep(0.1)
    finally:
        process.kill()
        for pid in filter(is_running, below):
            os.kill(pid, signal.SIGKILL)
