"""The command line: what `simulate` prints, and what is refused in one line."""

import json
import os
import pty
import re
import resource
import select
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import asynchooks
from asynchooks import cli
from asynchooks.cli import COMMANDS, main
from asynchooks.planning import record, span
from asynchooks.protocols import StaleSynchronous
from asynchooks.simulation import Constant, Exponential, Simulation

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

Run = Callable[..., tuple[int | None, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """What a command line comes to: exit code, stdout, stderr."""

    def call(line: str) -> tuple[int | None, str, str]:
        code: Any
        try:
            code = main(shlex.split(line))
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def reports(run: Run) -> Callable[[str], list[dict[str, Any]]]:
    """The reports of `simulate`, with these options."""

    def call(line: str) -> list[dict[str, Any]]:
        code, printed, errors = run(f"simulate --json {line}")
        assert (code, errors) == (0, ""), "no progress where stderr is no terminal"
        found: list[dict[str, Any]] = json.loads(printed)["reports"]
        return found

    return call


Reports = Callable[[str], list[dict[str, Any]]]


def test_the_table_has_a_row_for_each_protocol(run: Run) -> None:
    line = "simulate --workers 4 --compare async,sync@0.125,ksync:3,ssp:3+discard:5 --updates 200"
    _, printed, _ = run(line)
    title, _, *rows = printed.splitlines()
    assert title.split()[:4] == ["protocol", "rate", "virtual", "s"]
    assert [row.split()[0] for row in rows] == ["async", "sync", "ksync:3", "ssp:3+discard:5"]
    assert {row.split()[3] for row in rows} == {"200"}
    assert rows[1].split()[1] == "0.125"
    assert "idle" not in title, "no worker spent time on it"


def test_the_numbers_are_those_of_the_simulation(reports: Reports) -> None:
    line = "--workers 6 --protocol ssp:2 --delay exponential:0.5 --updates 300 --seed 9"
    line += " --pull constant:0.1 --push constant:0.2 --service constant:0.3"
    (row,) = reports(line)
    cluster = Simulation(9).cluster(
        6, protocol=StaleSynchronous(2), compute=Exponential(0.5), pull=Constant(0.1),
        push=Constant(0.2), service=Constant(0.3),
    )  # fmt: skip
    report = cluster.run(updates=300)
    expected = report.summary_row() | {"protocol": "ssp:2", "loss": row["loss"]}
    assert {key: row[key] for key in expected} == expected
    assert row["staleness"] == {str(key): count for key, count in report.staleness.items()}


def test_protocols_of_both_options_come_in_order_each_with_a_rate_of_its_own(
    reports: Reports,
) -> None:
    rest = "--workers 8 --until 20"
    each = ("async --learning-rates 0.01", "sync --learning-rates 0.3", "ksync:6", "sync@0.1")
    assert reports(f"--protocol async@0.01 --compare 'sync@0.3, ksync:6,sync@0.1' {rest}") == [
        reports(f"--protocol {line} {rest}")[0] for line in each
    ]


def test_of_several_learning_rates_each_protocol_has_its_best(reports: Reports) -> None:
    rest, rates = "--workers 16 --until 15", (0.001, 0.03, 0.5, 9.0)
    best = reports(f"--compare async,sync,ksync:12@0.3 --learning-rates 0.001,0.03,0.5,9 {rest}")
    alone = reports(f"--compare {','.join(f'async@{rate}' for rate in rates)} {rest}")
    losses = {str(rate): row["loss"] for rate, row in zip(rates, alone, strict=True)}
    finite = {rate: loss for rate, loss in losses.items() if loss is not None}
    assert best[0]["loss_by_learning_rate"] == losses
    assert best[0]["learning_rate"] == float(min(finite, key=finite.__getitem__))
    assert best[0]["loss"] == min(finite.values())
    assert best[0]["learning_rate"] < best[1]["learning_rate"], "stale gradients take less"
    assert best[2]["loss_by_learning_rate"] == {"0.3": best[2]["loss"]}


def test_the_learning_rate_by_default_is_one_that_converges(reports: Reports) -> None:
    names = "async,ssp:3,kasync:4,kbatch-async:4,ksync:12,kbatch-sync:12,sync"
    rows = reports(f"--workers 16 --compare {names} --until 300")
    assert max(row["loss"] for row in rows) < 0.006
    rates = [row["learning_rate"] for row in rows]
    assert rates == [0.5 / 16] * 2 + [0.05] * 2 + [0.2] * 3


@pytest.mark.parametrize(
    ("line", "key", "low", "high"),
    [
        ("--workers 2 --until 10.5", "updates", 20, 20),
        ("--workers 2 --until 10.5", "secs", 10.5, 10.5),
        ("--workers 2 --until 9 --updates 4", "secs", 2, 2),
        ("--until 0", "updates", 0, 0),
        ("--workers 2", "updates", 10_000, 10_000),
        ("--updates 400 --mtbf exponential:10 --repair constant:2", "share_down", 0.05, 1),
        ("--updates 2000 --delay exponential:1", "loss", 0, 0.01),
        ("--updates 1 --learning-rates 0", "loss", 1, 1e9),
    ],
)
def test_a_run_has_its_end_its_crashes_and_its_loss(
    reports: Reports, line: str, key: str, low: float, high: float
) -> None:
    (row,) = reports(f"--delay constant:1 {line}")
    assert low <= row[key] <= high, row


def test_the_loss_is_that_of_the_last_update_and_none_if_it_overflows(reports: Reports) -> None:
    line = "--workers 4 --protocol sync --delay constant:1"
    ((row,), (same,)) = reports(f"{line} --until 10.5"), reports(f"{line} --updates 10")
    assert (row["updates"], row["loss"]) == (10, same["loss"])
    (row,) = reports("--updates 2000 --learning-rates 9 --delay exponential:1")
    assert row["loss"] is None


def test_training_that_makes_no_update_exits_with_1(run: Run) -> None:
    line = "simulate --workers 3 --delay constant:10 --mtbf constant:3 --repair constant:0.5"
    code, printed, errors = run(f"{line} --max-secs-without-update 100")
    assert (code, printed) == (1, "")
    assert "no update came from virtual time 0.0 to 100.0, " in errors
    assert "worker 2" in errors


@pytest.mark.faults
def test_several_seeds_have_means_with_intervals_and_one_that_fails_is_named(
    run: Run, reports: Reports
) -> None:
    line = "--workers 4 --compare async,sync --updates 100"
    alone = [reports(f"{line} --seed {seed}")[0]["updates_per_second"] for seed in (3, 4, 5)]
    first, second = reports(f"{line} --seed 3 --seeds 3")
    assert first["num_seeds"] == second["num_seeds"] == 3
    means = first["means"]["updates_per_second"]
    assert means["mean"] == pytest.approx(sum(alone) / 3)
    assert means["low"] < means["mean"] < means["high"]
    assert first["updates_per_second"] == alone[0]
    _, table, _ = run(f"simulate {line} --seed 3 --seeds 3")
    assert f"({means['low']:.4g} to {means['high']:.4g})" in table

    line = "--seed 2 --seeds 2 --workers 2 --updates 300 --delay pareto:1,1.1"
    code, printed, errors = run(f"simulate {line} --max-secs-without-update 120")
    assert (code, printed) == (1, "")
    assert "{'protocol': 'async', 'rate': 0.05} with seed 3 failed: LivelockError" in errors


def test_trace_and_plot_are_written(run: Run, tmp_path: Path) -> None:
    trace, plot = tmp_path / "out.pftrace", tmp_path / "out.png"
    run(f"simulate --workers 3 --updates 20 --trace {trace} --plot {plot}")
    lines = trace.read_text().removesuffix(",\n")
    names = {each["name"] for each in json.loads(f"{lines}]")}
    assert {"compute", "global step", "applied"} <= names
    assert plot.read_bytes().startswith(b"\x89PNG")


NO_OPTION = "is no option; "


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("simulate --protocol fastest", "'fastest' is no protocol: .* Allowed: async, sync, ksync"),
        ("simulate --workers 8 --protocol ksync:9", "give k from 1 to 8"),
        ("simulate --delay exponential:-1", "argument --delay: .*mean is -1.0; give seconds, > 0"),
        ("simulate --service fast", "argument --service: .* give one of constant:SECS"),
        ("simulate --delay empirical:/missing", "argument --delay: .*No such file"),
        ("simulate --mtbf exponential:9", "--mtbf and --repair go together"),
        ("simulate --workers 0", "argument --workers: '0'; give a whole number >= 1"),
        ("simulate --seed -1", "argument --seed: '-1'; give a whole number >= 0"),
        ("simulate --until nan", "argument --until: 'nan'; give virtual seconds >= 0"),
        ("simulate --learning-rates 0.1,,1", "argument --learning-rates: ''; give a learning rate"),
        ("simulate --compare sync@-1,async", "--protocol/--compare: '-1'; give a learning rate"),
        ("simulate --compare async,sync --trace out.pftrace", "--trace takes one protocol"),
        ("simulate --trace /missing/a", "argument --trace: '/missing/a': cannot be written"),
        ("simulate --plot /missing/out.png", "--plot: .*there is no directory '/missing'; make it"),
        ("simulate --plot out.txt", "--plot: 'out.txt' is no plot; end it with .png, .svg, .pdf"),
        ("simulate --trace a.png --plot a.png", "--trace and --plot are both 'a.png'; give two"),
        ("simulate --work 4", f"'--work' {NO_OPTION}did you mean '--workers'"),  # nor a prefix
        ("simulate --nonsense", f"'--nonsense' {NO_OPTION}see asynchooks simulate --help"),
        ("simulate 4 5", f"'4' {NO_OPTION}"),
        ("simulate -- --extra", f"'--extra' {NO_OPTION}"),
        ("simulat", "invalid choice: 'simulat' .choose from .*simulate"),
        ("--verson", f"'--verson' {NO_OPTION}did you mean '--version'"),
        ("plan a --program a.py:main --proceses=4", f"{NO_OPTION}did you mean '--processes'"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line_with_what_is_allowed(
    run: Run, line: str, what: str
) -> None:
    code, printed, errors = run(line)
    assert (code, printed) == (2, "")
    command = " simulate" * line.startswith("simulate ")
    assert re.fullmatch(f"asynchooks{command}.*: error: .*{what}.*\n", errors)


def test_without_a_command_it_prints_its_help_on_stderr_and_exits_with_2(run: Run) -> None:
    """As uv and ruff do: a script that has lost its arguments must not seem to succeed."""
    code, printed, errors = run("")
    assert (code, printed) == (2, "")
    assert errors.startswith("usage: asynchooks [-h] [--version] COMMAND ...\n")
    assert all(name in errors for name in COMMANDS)


@pytest.mark.parametrize(
    ("module", "line", "extra"), [("rich", "", "cli"), ("matplotlib", "--plot out.png", "plot")]
)
def test_a_missing_extra_is_named_and_json_needs_none(
    run: Run, reports: Reports, monkeypatch: pytest.MonkeyPatch,
    module: str, line: str, extra: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, module, None)
    assert reports("--updates 5")[0]["updates"] == 5
    code, printed, errors = run(f"simulate --updates 5 {line}")
    assert (code, printed) == (2, "")
    assert f"asynchooks[{extra}]" in errors


def test_a_disk_that_is_full_at_the_end_exits_with_1_and_leaves_nothing(
    run: Run, tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        code, _, errors = run(f"simulate --updates 50 --trace {tmp_path / 'out.pftrace'}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    assert re.fullmatch("asynchooks simulate: error: .*File too large.*\n", errors)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_consists_of_whole_sentences_and_of_examples_that_are_accepted(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    """The examples are checked as those of a user, and not run."""
    pytest.importorskip("distributed")
    monkeypatch.setenv("COLUMNS", "5000")
    code, printed, _ = run(f"{command} --help")
    assert code == 0
    assert printed.startswith(f"usage: asynchooks {command}")
    # what is said of an option, beside it or in the line below
    said = re.findall(r"^ +(?:\S+(?: \S+)*  +| {10,})(\S.*)$", printed, re.MULTILINE)
    assert said
    assert [each for each in said if not re.fullmatch(r"[A-Z].*\.", each)] == []

    def only_checked(module: Any) -> SimpleNamespace:
        def checked(options: Any) -> Callable[[], int]:
            assert callable(module.checked(options))
            return lambda: 0

        return SimpleNamespace(**{**vars(module), "checked": checked})

    monkeypatch.chdir(tmp_path)
    Path("learner.py").write_text("async def main(concurrency, max_staleness): ...\n")
    with record("run.pftrace"), span("anything"):
        pass
    monkeypatch.setattr(cli, "COMMANDS", {k: only_checked(v) for k, v in COMMANDS.items()})
    examples = re.findall(r"^  asynchooks (.*)$", printed, re.MULTILINE)
    assert len(examples) >= 2
    assert [line for line in examples if run(line)[0] != 0] == []


def test_the_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version") == (0, f"asynchooks {asynchooks.__version__}\n", "")


@contextmanager
def on_a_terminal(line: str, **streams: Any) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command, with stderr and perhaps stdout on a terminal of 80 columns."""
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = subprocess.Popen(
        [sys.executable, "-m", "asynchooks", *line.split()],
        stdout=streams.get("stdout", theirs),
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    try:
        yield process, terminal
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def read_to_the_end(terminal: int) -> bytes:
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # on Linux the end of a terminal
            return shown


@pytest.mark.faults
def test_on_a_terminal_progress_is_shown_and_ctrl_c_ends_it_with_130() -> None:
    line = "simulate --updates 100000000"
    with on_a_terminal(line, stdout=subprocess.PIPE) as (process, terminal):
        shown = b""
        while b"0%" not in shown:
            assert select.select([terminal], [], [], 20)[0], shown
            shown += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        shown += read_to_the_end(terminal)
        printed, _ = process.communicate()
    assert (process.returncode, printed) == (130, b""), shown
    assert b"async" in shown
    assert shown.endswith(b"asynchooks simulate: interrupted\r\n")
    assert b"Traceback" not in shown


@pytest.mark.faults
def test_a_narrow_terminal_cuts_no_number() -> None:
    line = "simulate --workers 4 --updates 50 --compare async,sync --seeds 2"
    with on_a_terminal(line) as (process, terminal):
        shown = read_to_the_end(terminal).decode()
        assert process.wait() == 0
    assert "\u2026" not in shown
    assert "per s" in shown


@pytest.mark.faults
def test_an_output_that_is_closed_or_full_ends_without_a_traceback() -> None:
    full = "asynchooks simulate: error: 'the output': No space left on device\n"
    for redirection, end in (
        (">&-", (0, "")), ("--json >/dev/full", (1, full)), (">/dev/full", (1, full))
    ):  # fmt: skip
        command = f"{sys.executable} -m asynchooks simulate --workers 2 --updates 5 {redirection}"
        done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == end
