"""`asynchooks plan`: its table, JSON and plot, and what is refused in one line."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asynchooks.cli import main
from asynchooks.planning import Trace, record
from asynchooks.simulation import Simulation

from . import program_of_sleeps
from .program_of_sleeps import SECS

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
PROGRAM = f"{program_of_sleeps.__file__}:main"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run in virtual time, which no load of the machine changes."""
    path = tmp_path_factory.mktemp("plan") / "run.pftrace"
    settings = {"concurrency": 4, "max_staleness": 2}

    async def main() -> None:
        async with record(path, settings=settings):
            await program_of_sleeps.main(**settings)

    Simulation().run(main)
    return str(path)


def run(
    capsys: pytest.CaptureFixture[str], *arguments: str, program: str = PROGRAM, code: int = 0
) -> tuple[str, str]:
    """What it prints, and its errors."""
    try:
        found = main(["plan", *arguments, "--program", program, "--processes", "1"])
    except SystemExit as left:
        found = int(str(left.code))
    assert found == code
    return capsys.readouterr()


def changed(path: Path, old: str, new: str) -> str:
    """The program, with other text in one place."""
    text = Path(program_of_sleeps.__file__).read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return f"{path}:main"


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, **options: Any) -> dict[str, Any]:
    printed, _ = run(capsys, *arguments, "--allow-mismatch", "--json", **options)
    found: dict[str, Any] = json.loads(printed)
    return found


def test_the_table_has_what_was_recorded_measured_and_predicted(
    recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plan.png"
    printed, errors = run(
        capsys, recorded, "--set", "concurrency=2,4,8", "--allow-mismatch", "--plot", str(plot)
    )
    assert errors == ""
    for each in ("rollout", "learn", "concurrency=4, max_staleness=2", "measured"):
        assert each in printed
    rows = [line for line in printed.splitlines() if line.startswith(("2 ", "4 ", "8 "))]
    assert len(rows) == 3
    assert "EXTRAPOLATED" in rows[2]
    assert "Best: concurrency=" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_json_has_intervals_that_grow_with_concurrency_and_a_target_chooses(
    recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(
        capsys, recorded, "--set", "concurrency=2,4", "--updates", "500", "--price", "3600",
        "--target", "staleness <= 1.5",
    )  # fmt: skip
    slow, fast = found["settings"]
    assert [each["settings"] for each in (slow, fast)] == [{"concurrency": 2}, {"concurrency": 4}]
    assert slow["rate"]["value"] < fast["rate"]["value"]
    for each in (slow, fast):
        assert each["rate"]["low"] <= each["rate"]["value"] <= each["rate"]["high"]
        for name, of in (("value", "value"), ("low", "high"), ("high", "low")):
            assert each["secs"][name] == pytest.approx(500 / each["rate"][of])
        assert each["cost"] == pytest.approx(each["secs"])
    (of_rollouts,) = (each for each in found["services"] if each["name"] == "rollout")
    assert min(SECS) <= of_rollouts["mean_secs"] <= of_rollouts["max_secs"]
    (check,) = found["recorded"]
    assert check["measured"]["rate"] == Trace.read(recorded).figures().rate
    assert slow["staleness"]["high"] <= 1.5 < fast["staleness"]["high"]
    assert found["best"] == {"concurrency": 2}


def test_a_setting_that_fails_or_whose_process_dies_is_a_row_and_the_others_go_on(
    recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dies = "import os; batch_size == 3 and os._exit(7)"
    program = changed(tmp_path / "dies.py", '"""Sixty steps."""', dies)
    arguments = [recorded, "--set", "batch_size=2,3,8", "--target", "staleness<=0.01"]
    found = as_json(capsys, *arguments, program=program)
    ok, died, failed = found["settings"]
    assert "rate" in ok
    assert "the process of the plan has died (exit code 7): " in died["error"]
    assert "give an integer >= batch_size, which is 8" in failed["error"]
    assert found["best"] is None
    printed, _ = run(capsys, *arguments, "--allow-mismatch", program=program)
    *_, number = re.findall(r"failed \[(\d)\]", printed)
    assert re.search(rf"^\[{number}\] .*give an integer >= batch_size", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "program", "says"),
    [
        (["--set", "concurrency"], PROGRAM, "give NAME=VALUES"),
        (["--set", f"a=1..{'9' * 400}"], PROGRAM, "give two numbers"),
        (["--set", "a=1", "--set", "a=2"], PROGRAM, "gives 'a' twice"),
        (["--target", "speed<=3"], PROGRAM, "give one of staleness, max_staleness, idle_share"),
        ([], "nothing.py:main", "there is no file 'nothing.py'"),
        ([], f"{program_of_sleeps.__file__}:other", "The async functions of .*: learn, main, roll"),
        (["--runs", "1"], PROGRAM, "a whole number >= 2"),
        (["no such trace"], PROGRAM, "No such file"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    recorded: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    program: str,
    says: str,
) -> None:
    _, errors = run(capsys, recorded, *arguments, program=program, code=2)
    assert re.fullmatch(f"asynchooks plan: error: .*{says}.*\n", errors)


def test_what_a_program_prints_as_it_is_imported_and_run_is_not_in_the_json(
    recorded: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = 'print("run")\n        return await learn()'
    path = tmp_path / "random.py"  # as another module
    program = changed(path, "return await learn()", text)
    path.write_text(f"{path.read_text()}\nprint('imported')\n")
    arguments = [recorded, "--set", "concurrency=4", "--allow-mismatch", "--json"]
    printed, errors = run(capfd, *arguments, program=program)
    assert [each["settings"] for each in json.loads(printed)["settings"]] == [{"concurrency": 4}]
    assert set(errors.splitlines()) == {"imported", "run"}
    path.write_text("raise SystemExit(3)\n")
    _, errors = run(capfd, recorded, program=program, code=2)
    assert "ends with exit code 3" in errors


def test_no_table_is_printed_where_the_recorded_setting_is_missed(
    recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = "[await learn() for _ in range(6)]; return {}"
    program = changed(tmp_path / "doubled.py", "return await learn()", slow)
    printed, errors = run(capsys, recorded, "--set", "concurrency=2,4", program=program, code=1)
    assert "missed by more than 10 %" in errors
    assert "concurrency=4, max_staleness=2" in printed
    assert "s to 1,000" not in printed


@pytest.mark.faults
def test_without_scipy_the_extra_is_named(recorded: str) -> None:
    code = (
        "import sys; sys.modules['scipy'] = None; from asynchooks.cli import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "plan", recorded, "--program", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("asynchooks plan: error: plans need SciPy")
    assert "asynchooks[plan]" in done.stderr


@pytest.mark.faults
def test_ctrl_c_ends_all_processes_at_once(recorded: str, tmp_path: Path) -> None:
    steps = "StopAtStepHook(60 if concurrency == 4 else 10**7)"
    program = changed(tmp_path / "long.py", "StopAtStepHook(steps)", steps)
    command = [
        sys.executable, "-m", "asynchooks", "plan", recorded, "--program", program,
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


def test_values_of_a_setting(
    recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = "steps: int = 60, a: Any = 0\n) -> None:\n    assert a == 0"
    program = changed(tmp_path / "fails.py", "steps: int = 60\n) -> None:", fails)
    values = "a=8..64,3..10,0.1..0.4,1,true,none,x,1.0,1"
    found = as_json(capsys, recorded, "--set", values, program=program, code=1)
    given = [each["settings"]["a"] for each in found["settings"]]
    assert given == [8, 16, 32, 64, 3, 6, 10, 0.1, 0.2, 0.4, 1, True, None, "x", 1.0]
