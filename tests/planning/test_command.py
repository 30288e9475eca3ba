"""`asynchooks plan`: its table, JSON and plot, and what is refused in one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks._cli.plan_settings import parse_setting, parse_target
from asynchooks.cli import main
from asynchooks.planning import Trace, plot_plan, record

from . import program_of_sleeps
from .program_of_sleeps import SECS

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
PROGRAM = f"{program_of_sleeps.__file__}:main"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real run, of 0.5 s."""
    path = tmp_path_factory.mktemp("plan") / "run.pftrace"
    settings = {"concurrency": 4, "max_staleness": 2}
    with record(path, settings=settings):
        anyio.run(lambda: program_of_sleeps.main(**settings))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments, "--processes", "1"]) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    return printed


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, *arguments, "--json"))
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    try:
        found = main(["plan", *arguments])
    except SystemExit as left:
        found = int(str(left.code))
    assert found == code
    errors = capsys.readouterr().err
    assert errors.startswith("asynchooks plan: error: ")
    assert len(errors.splitlines()) == 1
    return errors


def test_the_table_has_what_was_recorded_measured_and_predicted(
    recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run(
        capsys, recorded, "--program", PROGRAM, "--set", "concurrency=2,4,8", "--price", "3600",
        "--allow-mismatch",
    )  # fmt: skip
    assert "rollout" in printed
    assert "learn" in printed
    assert "concurrency=4, max_staleness=2" in printed
    assert "measured" in printed
    rows = [line for line in printed.splitlines() if line.startswith(("2 ", "4 ", "8 "))]
    assert len(rows) == 3
    assert "EXTRAPOLATED" in rows[2]
    assert "Best: concurrency=8" in printed


def test_the_json_has_intervals_that_grow_with_concurrency(
    recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(
        capsys, recorded, "--program", PROGRAM, "--set", "concurrency=2,4", "--updates", "500",
        "--allow-mismatch", "--price", "3600",
    )  # fmt: skip
    slow, fast = found["settings"]
    assert [each["settings"] for each in (slow, fast)] == [{"concurrency": 2}, {"concurrency": 4}]
    assert slow["rate"]["value"] < fast["rate"]["value"]
    for each in (slow, fast):
        assert each["rate"]["low"] <= each["rate"]["value"] <= each["rate"]["high"]
        assert each["secs"]["value"] == pytest.approx(500 / each["rate"]["value"])
        assert each["cost"] == pytest.approx(each["secs"])
    of_rollouts = {each["name"]: each for each in found["services"]}["rollout"]
    assert of_rollouts["num"] + of_rollouts["num_cut"] >= 120
    assert min(SECS) <= of_rollouts["mean_secs"] <= of_rollouts["max_secs"]
    (check,) = found["recorded"]
    measured = Trace.read(recorded).figures()
    assert check["measured"]["rate"] == measured.rate
    assert found["best"] == {"concurrency": 4}


def test_a_setting_that_fails_is_a_row_and_the_others_go_on(
    recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [recorded, "--program", PROGRAM, "--set", "batch_size=2,8", "--allow-mismatch"]
    ok, failed = as_json(capsys, *arguments)["settings"]
    assert "rate" in ok
    assert "give an integer >= batch_size, which is 8" in failed["error"]
    printed = run(capsys, *arguments)
    (number,) = re.findall(r"failed \[(\d)\]", printed)
    assert re.search(rf"^\[{number}\] .*give an integer >= batch_size", printed, re.MULTILINE)


def test_a_target_chooses_the_fastest_that_keeps_it(
    recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [recorded, "--program", PROGRAM, "--set", "concurrency=2,4", "--allow-mismatch"]
    kept = as_json(capsys, *arguments, "--target", "staleness<=1.5")
    bounds = {
        each["settings"]["concurrency"]: each["staleness"]["high"] for each in kept["settings"]
    }
    assert bounds[2] <= 1.5 < bounds[4]
    assert kept["best"] == {"concurrency": 2}
    none = as_json(capsys, *arguments, "--target", "staleness<=0.01")
    assert none["best"] is None


def test_the_plot_is_written(
    recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.png"
    run(
        capsys, recorded, "--program", PROGRAM, "--set", "concurrency=2,4", "--plot", str(path),
        "--allow-mismatch",
    )  # fmt: skip
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "concurrency"], "give NAME=VALUES"),
        (["--set", "a=8..2"], "the smaller one first"),
        (["--set", "a=0..4"], "give two numbers > 0"),
        (["--set", "a=1..9..2"], "or all values with commas"),
        (["--set", f"a=1..{'9' * 400}"], "give two numbers"),
        (["--set", "a=1", "--set", "a=2"], "gives 'a' twice"),
        (["--target", "speed<=3"], "give one of staleness, max_staleness, idle_share"),
        (["--program", "nothing.py:main"], "there is no file 'nothing.py'"),
        (["--program", "main"], "give FILE:NAME or MODULE:NAME"),
        (
            ["--program", f"{program_of_sleeps.__file__}:other"],
            "The async functions of .*: learn, main, rollout",
        ),
        (["--program", f"{program_of_sleeps.__file__}:plain"], "give the async function"),
        (["--program", "no_such_module:main"], "cannot be imported"),
        (["--plot", "plan.txt"], "is no plot"),
        (["--runs", "1"], "a whole number >= 2"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    recorded: str, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    program = [] if "--program" in arguments else ["--program", PROGRAM]
    assert re.search(says, refused(capsys, recorded, *program, *arguments))


def test_wrong_traces_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--program" in refused(capsys, str(tmp_path / "none"))
    program = ("--program", PROGRAM)
    assert "No such file" in refused(capsys, str(tmp_path / "none"), *program)
    (tmp_path / "text").write_text("{}")
    assert "no trace" in refused(capsys, str(tmp_path / "text"), *program)
    (tmp_path / "empty").write_text("")
    assert "is empty" in refused(capsys, str(tmp_path / "empty"), *program)


def test_an_argument_that_the_program_lacks_is_refused(
    recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, recorded, "--program", PROGRAM, "--set", "speed=1", code=1)
    assert "speed" in error
    assert "concurrency" in error


def test_a_module_that_exits_as_it_is_imported_is_refused(
    recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "exits.py"
    program.write_text("raise SystemExit(3)\n")
    assert "ends with exit code 3" in refused(capsys, recorded, "--program", f"{program}:main")


def test_what_a_program_prints_as_it_is_imported_is_not_in_the_json(
    recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "random.py"  # whose name is that of another module
    program.write_text(f"{Path(program_of_sleeps.__file__).read_text()}\nprint('imported')\n")
    arguments = [recorded, "--program", f"{program}:main", "--set", "concurrency=4"]
    assert main(["plan", *arguments, "--allow-mismatch", "--json", "--processes", "1"]) == 0
    printed, errors = capsys.readouterr()
    assert [each["settings"] for each in json.loads(printed)["settings"]] == [{"concurrency": 4}]
    assert errors == "imported\n"


QUEUE = """\
import asyncio
from asynchooks import FeedHook, FunctionSessionCreator, MonitoredSession, StopAtStepHook
from asynchooks.planning import timed

rollout = timed("rollout", returns=0)(asyncio.sleep)

async def act(session, queue):
    while True:
        await session.or_stop(queue.put, await rollout(0.01))

async def main(concurrency=4):
    queue = asyncio.Queue(maxsize=2)
    hooks = [FeedHook(queue, "x"), StopAtStepHook(40)]
    async with MonitoredSession(hooks, FunctionSessionCreator(lambda x: {})) as session:
        for _ in range(concurrency):
            session.start_soon(act, session, queue)
        while not session.should_stop():
            await session.run([])
    print("at step", session.global_step.value)
"""


def test_what_the_program_prints_and_a_staleness_that_it_lacks_spoil_no_output(
    recorded: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "of_a_queue.py"
    program.write_text(QUEUE)
    arguments = ["plan", recorded, "--program", f"{program}:main", "--set", "concurrency=2,4",
                 "--allow-mismatch", "--processes", "1"]  # fmt: skip
    assert main([*arguments, "--json"]) == 0
    printed, errors = capfd.readouterr()
    assert [each["staleness"]["value"] for each in json.loads(printed)["settings"]] == [None] * 2
    assert set(errors.splitlines()) == {"at step 40"}
    assert main([*arguments, "--target", "staleness<=2"]) == 0
    table, _, last = capfd.readouterr().out.strip().rpartition("\n")
    assert "staleness" not in table.rpartition("concurrency ")[2]
    assert "staleness is not known of this program" in last


def test_no_table_is_printed_where_the_recorded_setting_is_missed(
    recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "doubled.py"
    text = Path(program_of_sleeps.__file__).read_text()
    program.write_text(
        text.replace("return await learn()", "[await learn() for _ in range(6)]; return {}")
    )
    arguments = [recorded, "--program", f"{program}:main", "--set", "concurrency=2,4"]
    assert main(["plan", *arguments, "--processes", "1"]) == 1
    printed, errors = capsys.readouterr()
    assert "missed by more than 10 %" in errors
    assert "concurrency=4, max_staleness=2" in printed
    assert "s to 1,000" not in printed


@pytest.mark.faults
def test_without_scipy_the_extra_is_named(recorded: str) -> None:
    code = "import sys; sys.modules['scipy'] = None; from asynchooks.cli import main; "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(main(sys.argv[1:]))", "plan", recorded,
         "--program", PROGRAM], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("asynchooks plan: error: plans need SciPy")
    assert "asynchooks[plan]" in done.stderr


@pytest.mark.faults
def test_a_process_that_dies_is_the_row_of_its_setting(recorded: str, tmp_path: Path) -> None:
    program = tmp_path / "dies.py"
    text = Path(program_of_sleeps.__file__).read_text()
    program.write_text(
        text.replace('"""Sixty steps."""', "import os; concurrency == 8 and os._exit(7)")
    )
    arguments = ["--set", "concurrency=4,8", "--processes", "2", "--allow-mismatch"]
    command = [sys.executable, "-m", "asynchooks", "plan", recorded, "--program", f"{program}:main"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "failed [" in done.stdout
    assert "the process of the plan has died (exit code 7): " in done.stdout


@pytest.mark.faults
def test_ctrl_c_ends_all_processes_at_once(recorded: str, tmp_path: Path) -> None:
    program = tmp_path / "long.py"
    text = Path(program_of_sleeps.__file__).read_text()
    program.write_text(
        text.replace("StopAtStepHook(60)", "StopAtStepHook(60 if concurrency == 4 else 10**7)")
    )
    command = [
        sys.executable, "-m", "asynchooks", "plan", recorded, "--program", f"{program}:main",
        "--set", "concurrency=6,7,8", "--processes", "2", "--allow-mismatch",
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert any(b"recorded settings" in line for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"Traceback" not in errors


@pytest.mark.faults
def test_the_result_does_not_depend_on_the_number_of_processes(recorded: str) -> None:
    found = []
    for num in ("1", "2"):
        command = [
            sys.executable, "-m", "asynchooks", "plan", recorded, "--program", PROGRAM, "--set",
            "concurrency=2..8", "--json", "--processes", num, "--allow-mismatch",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert len(found[0]["settings"]) == 3


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=8..64", [8, 16, 32, 64]),
        ("a=3..10", [3, 6, 10]),
        ("a=0.1..0.3", pytest.approx([0.1, 0.2, 0.3])),
        ("a=1,true,none,x,1.0,1", [1, True, None, "x", 1.0]),
        ("a=ssp:1", ["ssp:1"]),
        ("a=4..4", [4]),
    ],
)
def test_values_of_a_setting(text: str, values: list[Any]) -> None:
    assert parse_setting(text) == ("a", values)


def test_a_target_is_read_with_spaces_in_it() -> None:
    assert str(parse_target(" idle_share <= 0.5")) == "idle_share <= 0.5"


def test_a_plot_of_no_list_is_refused(tmp_path: Path) -> None:
    for predictions in (3, None):
        with pytest.raises(TypeError, match="predictions is .*; give a list of what Plan.predict"):
            plot_plan(tmp_path / "plan.png", predictions)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="predictions is empty"):
        plot_plan(tmp_path / "plan.png", [])
    assert not (tmp_path / "plan.png").exists()
