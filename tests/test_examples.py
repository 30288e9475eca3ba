"""The examples, run as a reader runs them."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parent.parent
NUM_WORKERS, LAST_STEP, K = 8, 4000, 200


def run_example(name: str, *args: str, launcher: Sequence[str] = ()) -> str:
    """What the example prints; its log goes to stderr."""
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / name), *args],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.tensorflow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_quickstart_starts_gradually_stops_exactly_and_learns(backend: str) -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("sklearn")

    printed = run_example("quickstart.py", "--backend", backend)

    workers = re.findall(r"worker (\d) started at step +(\d+), ran +(\d+) steps", printed)
    assert [int(number) for number, _, _ in workers] == list(range(NUM_WORKERS))
    starts = [int(start) for _, start, _ in workers]
    thresholds = [int(K * math.log(i + 1)) for i in range(NUM_WORKERS)]
    assert all(start >= due for start, due in zip(starts, thresholds, strict=True)), starts
    assert starts == sorted(starts)
    assert sum(int(steps) for _, _, steps in workers) == LAST_STEP

    end = re.search(r"final step (\d+), (\d+) steps per second\ntest accuracy ([\d.]+)", printed)
    assert end is not None, printed
    assert int(end[1]) == LAST_STEP
    assert int(end[2]) > 0
    assert float(end[3]) >= 0.95


@pytest.mark.tensorflow
def test_the_script_prints_the_same_before_and_after_its_move() -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("sklearn")

    before, after = run_example("tensorflow1_before.py"), run_example("tensorflow1_after.py")

    assert after == before
    result = re.match(r"step 600, loss [\d.]+, accuracy ([\d.]+)\n", before)
    assert result is not None, before
    assert float(result[1]) >= 0.95
    assert before.endswith("model.ckpt-600.index\n")


@pytest.mark.tensorflow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_keras_feeds_the_dashboard_and_stops_exactly(backend: str) -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("sklearn")

    printed = run_example("keras_hooks.py", "--backend", backend)

    assert f"received the steps {list(range(1, 1000, 100))}\n" in printed
    end = re.search(r"stopped at step 1000, test accuracy ([\d.]+)", printed)
    assert end is not None, printed
    assert float(end[1]) >= 0.95


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_durable_example_resumes_and_ends_as_an_uninterrupted_one(
    backend: str, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn")
    options = ("--backend", backend)

    whole = run_example("durable.py", str(tmp_path / "whole"), *options)
    first = run_example("durable.py", str(tmp_path / "parts"), "--last-step", "250", *options)
    rest = run_example("durable.py", str(tmp_path / "parts"), *options)

    assert "interrupt it, and start it again\ntraining begins at step 0\nstep  100: " in whole
    assert "stopped by the limit: global_step is at 250 of 250\n" in first
    assert "\ntraining begins at step 250\nstep  300: " in rest
    # evaluations of the first part come before; from there on both print the same
    assert rest.splitlines()[2:] == whole.splitlines()[4:]
    assert "\nstopped by EarlyStoppingHook: no better than " in whole
    assert float(whole.rpartition(" ")[2]) >= 0.95


def test_every_example_is_in_the_readme_of_the_examples_and_on_the_site() -> None:
    readme = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    names = [path.name for path in sorted((ROOT / "examples").glob("*.py"))]
    assert [name for name in names if f"`{name}`" not in readme] == []
    assert [name for name in names if f"{{literalinclude}} ../examples/{name}\n" not in page] == []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_four_workers_train_one_pytorch_module_and_stop_early(backend: str, tmp_path: Path) -> None:
    for module in ("torch", "sklearn"):
        pytest.importorskip(module)
    directory, options = str(tmp_path / "digits"), ("--backend", backend)

    first = run_example("pytorch_digits.py", directory, "--last-step", "120", *options)
    rest = run_example("pytorch_digits.py", directory, *options)

    assert re.search(r"\ntraining begins at step 0\nstep   [5-9]\d: loss ", first), first
    assert "\nstopped by the limit: global_step is at 120 of 120\n" in first
    assert "\ntraining begins at step 120\n" in rest
    assert "\nstopped by EarlyStoppingHook: no better than " in rest
    counts = re.search(r"^the workers ran \[(.*)\] steps$", first, re.MULTILINE)
    assert counts is not None, first
    assert sum(int(each) for each in counts[1].split(", ")) == 120
    assert all(int(each) > 0 for each in counts[1].split(", "))
    assert "were restored" not in first
    assert re.search(r"^the weights of step \d+ were restored$", rest, re.MULTILINE), rest
    end = re.search(r"^test accuracy ([\d.]+)$", rest, re.MULTILINE)
    assert end is not None, rest
    assert float(end[1]) >= 0.95


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_jax_learns_digits_and_resumes_with_the_same_bits(backend: str, tmp_path: Path) -> None:
    for module in ("jax", "sklearn"):
        pytest.importorskip(module)
    options = ("--backend", backend)

    whole = run_example("jax_digits.py", str(tmp_path / "whole"), *options)
    first = run_example("jax_digits.py", str(tmp_path / "parts"), "--last-step", "250", *options)
    rest = run_example("jax_digits.py", str(tmp_path / "parts"), *options)

    assert "\ntraining begins at step 0\nstep  100: " in first
    assert "\ntraining begins at step 250\n" in rest
    assert rest.splitlines()[2:] == whole.splitlines()[4:]
    end = re.search(r"^test accuracy ([\d.]+) after 1000 steps$", whole, re.MULTILINE)
    assert end is not None, whole
    assert float(end[1]) >= 0.95


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_successive_halving_finds_a_good_setting_with_few_steps(backend: str) -> None:
    pytest.importorskip("sklearn")

    printed = run_example("successive_halving.py", "--backend", backend)

    rungs = re.findall(r"^at step +(\d+) (\d+) of (\d+) go on; the best: ", printed, re.MULTILINE)
    assert rungs == [("50", "9", "27"), ("150", "3", "9")]
    end = re.search(
        r"^the winner: .*, accuracy ([\d.]+)\n(\d+) steps, instead", printed, re.MULTILINE
    )
    assert end is not None, printed
    assert float(end[1]) >= 0.95
    assert int(end[2]) == 18 * 50 + 6 * 150 + 3 * 450
    rows = re.findall(
        r"^ +(\d) +(waits|goes on) +([\d.]+) +([\d.]+) +(\d+) ", printed, re.MULTILINE
    )
    assert [(int(eta), rule) for eta, rule, *_ in rows] == [
        (eta, rule) for eta in (2, 3, 9) for rule in ("waits", "goes on")
    ]
    hours = [float(row[2]) for row in rows]
    steps = [int(row[4]) for row in rows]
    for k in (0, 2, 4):  # what does not wait ends sooner, or makes more steps
        assert hours[k + 1] <= hours[k]
        assert steps[k + 1] >= steps[k]


@pytest.mark.tensorflow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_shards_over_http_are_fetched_again_and_train_a_model(backend: str) -> None:
    for module in ("tensorflow", "sklearn", "httpx"):
        pytest.importorskip(module)

    printed = run_example("http_shards.py", "--epochs", "8", "--backend", backend)

    # every row of every epoch, although the server refused and cut: 8 * 1797 = 224 * 64 + 40
    assert re.search(r"^prefetch +225 +7,475,520 +\d+%", printed, re.M), printed
    end = re.search(r"225 steps, training accuracy ([\d.]+) over the last 20", printed)
    assert end is not None, printed
    assert float(end[1]) >= 0.9


@pytest.mark.tensorflow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_tf_data_pipeline_feeds_a_graph_and_resumes(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    pytest.importorskip("sklearn")
    options = ("--directory", str(tmp_path), "--backend", backend)

    first = run_example("tf_data.py", "--steps", "300", *options)
    rest = run_example("tf_data.py", "--steps", "600", *options)

    assert first.endswith("after 300 steps\n")
    end = re.search(r"test accuracy ([\d.]+) after 600 steps", rest)
    assert end is not None, rest
    assert float(end[1]) >= 0.9


def test_a_planned_run_is_as_it_is_measured() -> None:
    printed = run_example("plan_rollouts.py", "--secs", "2")
    plans = re.findall(r"^concurrency=(\d+), secs=2.0: ([\d.]+) ", printed, re.M)
    assert [num for num, _ in plans] == ["4", "16", "32", "64"]
    assert float(plans[0][1]) < float(plans[1][1])
    end = re.search(r"measured: ([\d.]+) updates/s, planned: ([\d.]+) ", printed)
    assert end is not None, printed
    assert float(end[2]) == pytest.approx(float(end[1]), rel=0.3)  # tests run beside it


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_rollouts_teach_the_policy_and_a_crash_of_an_actor_leaves_at_once(backend: str) -> None:
    printed = run_example("rollouts.py", "--backend", backend)
    end = re.search(r"after 300 steps: ([\d.]+) moves of at least 9", printed)
    assert end is not None, printed
    assert float(end[1]) < 15

    crashed = subprocess.run(
        [sys.executable, str(ROOT / "examples/rollouts.py"), "--crash", "--backend", backend],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert crashed.returncode == 1
    assert "ConnectionError: actor 3 has lost its game server" in crashed.stderr
    assert "moves of at least" not in crashed.stdout


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_remote_trainer_makes_a_step_a_cycle_and_goes_on_where_it_was(
    backend: str, tmp_path: Path
) -> None:
    line = re.compile(r"depth (\d), from step (\d+): (\d+) steps, ([\d.]+) s each, loss (.*)")
    options = (str(tmp_path / "training"), "--backend", backend)

    first = line.findall(run_example("remote_trainer.py", *options, "--last-step", "30"))
    rest = line.findall(run_example("remote_trainer.py", *options))

    for one, two, _ in (first, rest):
        assert [each[:3] for each in (one, two)] == [("1", "0", "20"), ("2", "0", "20")]
        assert float(one[3]) >= 0.19  # two cycles a step
        assert float(two[3]) < 0.75 * float(one[3])  # one, but for a machine that is busy
        assert one[4] == two[4]
    assert first[2][:3] == ("2", "0", "30")
    assert rest[2][:3] == ("2", "30", "30")
    assert float(rest[2][4]) < 1.0  # the weights of step 30, not new ones


@pytest.mark.parametrize("backend", ["asyncio", "trio", "turbo"])
def test_a_gradual_start_keeps_the_loss_from_rising(backend: str) -> None:
    printed = run_example("gradual_start.py", "--backend", backend)
    rows = re.findall(r"^ *(\d+) +([\d.]+) s +([\d.]+) +([\d.]+) +([\d.]+)$", printed, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [0, 20, 80, 160]
    starts, highest, secs = ([float(row[i]) for row in rows] for i in (1, 2, 4))
    assert starts == sorted(starts)
    assert secs == sorted(secs)
    assert highest[0] > 2 * highest[1] == 2 * highest[2]  # that of the start
    assert "overshooting" in printed


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_gradients_of_jax_make_updates_by_each_protocol(backend: str) -> None:
    for module in ("jax", "sklearn"):
        pytest.importorskip(module)
    printed = run_example("jax_parameter_server.py", "--updates", "600", "--backend", backend)
    rows = re.findall(
        r"^(\w+)\(.*\): (\d+) updates of (\d+) gradients, mean staleness ([\d.]+), accuracy (\S+)$",
        printed, re.MULTILINE,
    )  # fmt: skip
    assert [each[:3] for each in rows] == [
        ("Asynchronous", "600", "600"),
        ("StaleSynchronous", "600", "600"),
        ("KBatchSync", "600", "1200"),
    ]
    stale, bounded, whole = (float(each[3]) for each in rows)
    assert stale > bounded > whole == 0.0
    assert all(float(each[4]) > 0.9 for each in rows), printed


def test_stale_gradients_move_as_momentum_says() -> None:
    printed = run_example("stale_gradients.py")
    rows = re.findall(r"^ +(\d) +[\d.]+  (asynchronous|momentum) +(.*)$", printed, re.MULTILINE)
    assert len(rows) == 6
    for (workers, _, simulated), (_, _, expected) in zip(rows[::2], rows[1::2], strict=True):
        pairs = zip(simulated.split(), expected.split(), strict=True)
        # four standard errors of the mean of the runs; one worker has no chance in it
        bound = 0.001 if workers == "1" else 0.06
        assert all(abs(float(a) - float(b)) <= bound for a, b in pairs), printed


def test_a_thousand_workers_learn_digits_under_every_protocol(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    options = ["--secs", "6"]
    if importlib.util.find_spec("matplotlib"):
        options += ["--plot", str(tmp_path / "losses.png")]
    printed = run_example("thousand_workers.py", *options)
    rows = re.findall(r"^(\S+) +(\d+) +[\d.]+ +([\d.]+) +(\d+)% +([\d.]+)$", printed, re.MULTILINE)
    found = {
        name: (int(updates), float(stale), float(loss)) for name, updates, stale, _, loss in rows
    }
    assert found.keys() == {"async", "ssp:3", "ksync:900", "kasync:100"}
    assert all(loss < math.log(10) for _, _, loss in found.values())
    assert found["async"][0] > found["ssp:3"][0] > found["kasync:100"][0] > found["ksync:900"][0]
    assert found["ksync:900"][1] == 0.0
    if len(options) > 2:
        assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_digits_are_learnt_by_sessions_in_several_dask_processes() -> None:
    for module in ("distributed", "sklearn"):
        pytest.importorskip(module)
    printed = run_example("distributed_digits_dask.py")
    rows = re.findall(r"^process (\d): its sessions ran \[(.*)\] steps$", printed, re.MULTILINE)
    assert [int(number) for number, _ in rows] == [0, 1, 2]
    steps = [int(each) for _, row in rows for each in row.split(", ")]
    assert len(steps) == 12
    # a gradient that came when the last update was made counts for a step, and for no update
    assert 2000 <= sum(steps) <= 2000 + 12
    end = re.search(r"final step (\d+), test accuracy ([\d.]+)", printed)
    assert end is not None, printed
    assert int(end[1]) == 2000
    assert float(end[2]) >= 0.95


@pytest.mark.parametrize("options", [[], ["--shard"]], ids=["ddp", "fsdp"])
def test_ranks_train_validate_and_resume_together(tmp_path: Path, options: list[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")

    def run_ranks(num_epochs: int) -> str:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        args = [str(tmp_path / "ddp"), *options, "--epochs", str(num_epochs)]
        return run_example("torch_ddp.py", *args, launcher=launcher)

    # 719 rows a rank, in batches of 32
    assert run_ranks(3).startswith("2 ranks, steps 0 to 66, test accuracy ")
    printed = run_ranks(10)
    assert printed.startswith("2 ranks, steps 66 to 220, test accuracy ")
    assert float(printed.split()[-1]) >= 0.9


@pytest.mark.timeout(300)
def test_the_program_to_copy_is_interrupted_resumes_and_learns(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    pytest.importorskip("tensorboard")
    program = [sys.executable, str(ROOT / "examples" / "torch_program.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def saved_steps() -> list[int]:
        return [int(path.name.split("-")[-1]) for path in tmp_path.glob("digits/model.ckpt-*")]

    with subprocess.Popen(program, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL) as first:
        while max(saved_steps(), default=0) < 40:
            assert first.poll() is None
            time.sleep(0.01)
        first.send_signal(signal.SIGINT)
    interrupted_at = max(saved_steps())
    assert 40 <= interrupted_at < 400

    rest = subprocess.run(
        program, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    evaluated = [int(step) for step in re.findall(r"eval at step (\d+): accuracy", rest.stderr)]
    assert min(evaluated) > interrupted_at
    assert all(step % 20 == 0 for step in evaluated)
    accuracy = re.fullmatch(r"test accuracy of the best weights: ([\d.]+)\n", rest.stdout)
    assert accuracy is not None, rest.stdout
    assert float(accuracy[1]) >= 0.9
    assert [*tmp_path.glob("digits/logs/events.*")]
