"""`asynchooks launch` refuses in one line what is wrong, before anything starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from asynchooks._cli import launch as _launch_command
from asynchooks.cli import main


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text("import os; print(os.environ['TF_CONFIG'])")
    return str(path)


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line, after the program's name."""
    try:
        code = main(["launch", *arguments])
    except SystemExit as left:
        assert isinstance(left.code, int)
        code = left.code
    printed, errors = capfd.readouterr()
    assert (code, printed) == (2, "")
    (line,) = errors.splitlines()
    return str(line.removeprefix("asynchooks launch: error: "))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("--ps 0", "argument --ps: '0'; give a whole number >= 1"),
        ("--workers 0", "argument --workers: '0'; give a whole number >= 1"),
        ("--workers-per-process x", "--workers-per-process: 'x'; give a whole number >= 1"),
        ("--engine ray", r"argument --engine: invalid choice: 'ray' \(choose from .*dask"),
        ("--engine dask --ps 1", "--ps is for TensorFlow only, Dask has a scheduler; leave it out"),
        ("--grace -1", "argument --grace: '-1'; give seconds >= 0"),
        ("--grace nan", "argument --grace: 'nan'; give seconds >= 0"),
        ("--port-base 0", "argument --port-base: '0'; give a port from 1 to 65535"),
        ("--port-base 65536", "argument --port-base: '65536'; give a port from 1 to 65535"),
        ("--port-base 65535", "--port-base 65535 leaves too few ports for 2 tasks; give one <= 65"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(
    capfd: pytest.CaptureFixture[str], script: str, line: str, what: str
) -> None:
    with pytest.raises(AssertionError, match=what):
        raise AssertionError(refusal(capfd, *line.split(), script))


def test_a_script_that_cannot_run_is_refused(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing, directory = str(tmp_path / "missing.py"), str(tmp_path)
    assert refusal(capfd, missing) == (
        f"there is no script {missing!r}; give the path of a Python file"
    )
    assert refusal(capfd, directory) == (
        f"script {directory!r} is no file; give the path of a Python file"
    )
    assert refusal(capfd) == "the following arguments are required: script, ..."


@pytest.mark.faults
def test_ports_follow_the_first_and_a_taken_one_is_refused(
    capfd: pytest.CaptureFixture[str], script: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(
            AssertionError,
            match=rf"^worker:0 cannot listen on 127\.0\.0\.1:{taken} \(Address already in "
            r"use\); give another --port-base",
        ):
            raise AssertionError(refusal(capfd, "--port-base", str(taken - 1), script))
    assert main(["launch", "--port-base", str(taken - 1), script]) == 0
    (config, _) = [json.loads(each.split(" | ")[1]) for each in capfd.readouterr().out.splitlines()]
    assert config["cluster"] == {
        "ps": [f"127.0.0.1:{taken - 1}"],
        "worker": [f"127.0.0.1:{taken}"],
    }


def test_without_dask_the_extra_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert refusal(capfd, "--engine", "dask", script) == (
        "--engine dask needs distributed; pip install 'asynchooks[dask]'"
    )


def test_help_says_how_the_script_runs_on_several_machines(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["launch", "--help"])
    assert left.value.code == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "TF_CONFIG" in text
    assert "DASK_SCHEDULER_ADDRESS" in text
    assert "ASYNCHOOKS_NUM_WORKERS" in text
    assert "Set by hand, these make the same script run on several machines" in text


DASK = """
import os
from distributed import Client

def main():
    with Client() as client:
        client.wait_for_workers(2, timeout=20)
        workers = client.scheduler_info(n_workers=-1)["workers"]
        print("expected", os.environ["ASYNCHOOKS_NUM_WORKERS"])
        print("threads", sorted(each["nthreads"] for each in workers.values()))
        print("pids", *client.run(os.getpid).values())
        print("sum", client.submit(sum, [1, 2]).result())

if __name__ == "__main__":
    main()
"""


@pytest.mark.faults
def test_a_script_for_dask_finds_its_scheduler_and_the_cluster_ends_with_it(
    tmp_path: Path,
) -> None:
    pytest.importorskip("distributed")
    script = tmp_path / "script.py"
    script.write_text(DASK)
    line = "-m asynchooks launch --engine dask --workers 2 --workers-per-process 3"
    done = subprocess.run(
        [sys.executable, *line.split(), str(script)],
        env={**os.environ, "DASK_LOGGING__DISTRIBUTED": "info"},  # else they say little
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split(" | ", 1) for line in done.stdout.splitlines()]
    printed = [text for name, text in lines if name == "script   "]
    assert printed[:2] == ["expected 2", "threads [3, 3]"]
    assert printed[3] == "sum 3"
    pids = [int(pid) for pid in printed[2].split()[1:]]
    assert len(pids) == 2
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert {name.strip() for name, _ in lines} == {"scheduler", "worker:0", "worker:1", "script"}
    assert not [text for _, text in lines if ":8787" in text], "no web server on a fixed port"
    assert "scheduler" in lines[-1][0], "it is the last to end"


def test_on_windows_it_says_at_once_what_is_missing_and_what_to_do(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(_launch_command, "os", SimpleNamespace(name="nt"))
    said = refusal(capfd, script)
    assert said.startswith("launch does not work on Windows, which lacks the process groups and ")
    assert "run it on Linux, macOS or in WSL, or start each process yourself" in said
