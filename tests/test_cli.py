"""The command line: what `simulate` prints, and what is refused in one line."""

from __future__ import annotations

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
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
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


def run(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert main(["simulate", *line.split()]) == 0
    printed, errors = capsys.readouterr()
    assert errors == "", "no progress where stderr is no terminal"
    return printed


def reports(capsys: pytest.CaptureFixture[str], line: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(capsys, f"{line} --json"))["reports"]
    return found


def refusal(capfd: pytest.CaptureFixture[str], command: str, *arguments: str) -> str:
    """The one line, after the program's name."""
    try:
        code = main([command, *arguments])
    except SystemExit as left:
        assert isinstance(left.code, int)
        code = left.code
    printed, errors = capfd.readouterr()
    assert (code, printed) == (2, "")
    (line,) = errors.splitlines()
    return str(line.removeprefix(f"asynchooks {command}: error: "))


def test_the_table_has_a_row_for_each_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--workers 4 --compare async,sync,ksync:3,ssp:3+discard:5 --updates 200"
    title, _, *rows = run(capsys, line).splitlines()
    assert title.split()[:4] == ["protocol", "rate", "virtual", "s"]
    assert [row.split()[0] for row in rows] == ["async", "sync", "ksync:3", "ssp:3+discard:5"]
    assert {row.split()[3] for row in rows} == {"200"}
    assert "idle" not in title, "no worker spent time on it"


def test_the_numbers_are_those_of_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--workers 6 --protocol ssp:2 --delay exponential:0.5 --updates 300 --seed 9"
    line += " --pull constant:0.1 --push constant:0.2 --service constant:0.3"
    (row,) = reports(capsys, line)
    cluster = Simulation(9).cluster(
        6,
        protocol=StaleSynchronous(2),
        compute=Exponential(0.5),
        pull=Constant(0.1),
        push=Constant(0.2),
        service=Constant(0.3),
    )
    report = cluster.run(updates=300)
    expected = report.summary_row() | {"protocol": "ssp:2", "loss": row["loss"]}
    assert {key: row[key] for key in expected} == expected
    assert row["staleness"] == {str(key): count for key, count in report.staleness.items()}


def test_names_may_have_spaces_between_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--updates", "5", "--compare", "async, sync", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["reports"]
    assert [each["protocol"] for each in rows] == ["async", "sync"]


def test_protocols_of_both_options_are_compared_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = reports(capsys, "--protocol sync --compare ssp:1,async --updates 5 --workers 2")
    assert [each["protocol"] for each in rows] == ["sync", "ssp:1", "async"]


def test_losses_fall_and_one_that_overflows_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    (start,) = reports(capsys, "--updates 1 --learning-rates 0")
    (good,) = reports(capsys, "--updates 2000")
    assert good["loss"] < 0.01 < 1 < start["loss"]
    (bad,) = reports(capsys, "--updates 2000 --learning-rates 9")
    assert bad["loss"] is None
    assert re.search("(nan|inf)$", run(capsys, "--updates 2000 --learning-rates 9").strip())


def test_each_protocol_may_have_a_learning_rate_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rest = "--workers 8 --until 20"
    compared = reports(capsys, f"--compare async@0.01,sync@0.3,ksync:6,sync@0.1 {rest}")
    alone = [
        *reports(capsys, f"--protocol async --learning-rates 0.01 {rest}"),
        *reports(capsys, f"--protocol sync --learning-rates 0.3 {rest}"),
        *reports(capsys, f"--protocol ksync:6 --learning-rates 0.2 {rest}"),
        *reports(capsys, f"--protocol sync@0.1 {rest}"),
    ]
    assert compared == alone
    assert [row["protocol"] for row in compared] == ["async", "sync", "ksync:6", "sync"]
    assert [row["learning_rate"] for row in compared] == [0.01, 0.3, 0.2, 0.1]
    table = run(capsys, f"--compare ssp:2+discard:9@0.125,sync {rest}").splitlines()
    assert table[2].split()[:2] == ["ssp:2+discard:9", "0.125"]


def test_of_several_learning_rates_each_protocol_has_its_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rest = "--workers 16 --until 15"
    best = reports(
        capsys, f"--compare async,sync,ksync:12@0.3 --learning-rates 0.001,0.03,0.5,9 {rest}"
    )
    for row in best[:2]:
        losses = {}
        for rate in (0.001, 0.03, 0.5, 9.0):
            name = f"{row['protocol']}@{rate}"
            (losses[str(rate)],) = [
                each["loss"] for each in reports(capsys, f"--protocol {name} {rest}")
            ]
        assert row["loss_by_learning_rate"] == losses
        finite = {rate: loss for rate, loss in losses.items() if loss is not None}
        assert losses["9.0"] is None or losses["9.0"] > 1, "it diverges"
        assert row["learning_rate"] == float(min(finite, key=lambda rate: finite[rate]))
        assert row["loss"] == min(finite.values())
    assert best[0]["learning_rate"] < best[1]["learning_rate"], "stale gradients take less"
    assert best[2]["loss_by_learning_rate"] == {"0.3": best[2]["loss"]}


def test_the_learning_rate_by_default_is_one_that_converges(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = "async,ssp:3,kasync:16,kbatch-async:16,ksync:48,kbatch-sync:48,sync"
    rows = reports(capsys, f"--workers 64 --compare {names} --until 300")
    assert max(row["loss"] for row in rows) < 0.006
    rates = [row["learning_rate"] for row in rows]
    assert rates == [0.5 / 64] * 2 + [0.05] * 2 + [0.2] * 3


def test_training_that_makes_no_update_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--workers 3 --delay constant:10 --mtbf constant:3 --repair constant:0.5"
    assert main(["simulate", *line.split(), "--max-secs-without-update", "100"]) == 1
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert "no update came from virtual time 0.0 to 100.0, " in errors
    assert "worker 2" in errors


@pytest.mark.faults
def test_of_several_seeds_the_one_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--seed 2 --seeds 2 --workers 2 --updates 300 --delay pareto:1,1.1"
    assert main(["simulate", *line.split(), "--max-secs-without-update", "120"]) == 1
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert "{'protocol': 'async', 'rate': 0.05} with seed 3 failed: LivelockError" in errors


def test_a_run_ends_at_its_time_or_its_updates(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = reports(capsys, "--workers 2 --delay constant:1 --until 10.5")
    assert (row["secs"], row["updates"]) == (10.5, 20)
    (row,) = reports(capsys, "--workers 2 --delay constant:1 --until 10.5 --updates 4")
    assert (row["secs"], row["updates"]) == (2.0, 4)
    (row,) = reports(capsys, "--until 0")
    assert row["updates"] == 0
    (row,) = reports(capsys, "--workers 2")
    assert row["updates"] == 10_000


def test_the_loss_is_that_of_the_last_of_few_updates(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--workers 4 --protocol sync --delay constant:1"
    (row,) = reports(capsys, f"{line} --until 10.5")
    (same,) = reports(capsys, f"{line} --updates 10")
    assert row["updates"] == 10
    assert row["loss"] == same["loss"]


@pytest.mark.faults
def test_several_seeds_have_means_with_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--workers 4 --compare async,sync --updates 100 --seed 3"
    alone = [reports(capsys, f"{line} --seed {seed}")[0] for seed in (3, 4, 5)]
    first, second = reports(capsys, f"{line} --seeds 3")
    rates = [each["updates_per_second"] for each in alone]
    assert first["num_seeds"] == second["num_seeds"] == 3
    means = first["means"]["updates_per_second"]
    assert means["mean"] == pytest.approx(sum(rates) / 3)
    assert means["low"] < means["mean"] < means["high"]
    assert first["updates_per_second"] == rates[0]
    assert f"({means['low']:.4g} to {means['high']:.4g})" in run(capsys, f"{line} --seeds 3")


def test_crashes_cost_time(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--workers 4 --updates 400 --mtbf exponential:10 --repair constant:2"
    (row,) = reports(capsys, line)
    assert row["share_down"] > 0.05


def test_trace_and_plot_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, plot = tmp_path / "out.pftrace", tmp_path / "out.png"
    run(capsys, f"--workers 3 --updates 20 --trace {trace} --plot {plot}")
    lines = trace.read_text().removesuffix(",\n")
    names = {each["name"] for each in json.loads(f"{lines}]")}
    assert {"compute", "global step", "applied"} <= names
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("--protocol fastest", "'fastest' is no protocol: .* Allowed: async, sync, ksync:K"),
        ("--workers 8 --protocol ksync:9", "give k from 1 to 8"),
        ("--protocol ssp", "'ssp' is no protocol: .*ssp:S with S >= 0"),
        ("--delay exponential:-1", "argument --delay: .*mean is -1.0; give seconds, > 0"),
        ("--push constant:nan", "argument --push: .*secs is nan; give seconds"),
        ("--service fast", "argument --service: .* give one of constant:SECS"),
        ("--delay empirical:/missing", "argument --delay: .*No such file"),
        ("--mtbf exponential:9", "--mtbf and --repair go together"),
        ("--mtbf constant:0 --repair constant:1", "mtbf is .*; give seconds > 0"),
        ("--workers 0", "argument --workers: '0'; give a whole number >= 1"),
        ("--updates 2.5", "argument --updates: '2.5'; give a whole number >= 1"),
        ("--seed -1", "argument --seed: '-1'; give a whole number >= 0"),
        ("--until nan", "argument --until: 'nan'; give virtual seconds >= 0"),
        ("--learning-rates inf", "argument --learning-rates: 'inf'; give a learning rate"),
        ("--protocol sync@x", "argument --protocol/--compare: 'x'; give a learning rate, a finite"),
        ("--compare sync@-1,async", "argument --protocol/--compare: '-1'; give a learning rate"),
        ("--protocol @0.1", "'' is no protocol"),
        ("--learning-rates 0.1,,1", "argument --learning-rates: ''; give a learning rate"),
        ("--max-secs-without-update 0", "argument --max-secs-without-update: '0'; give virtual"),
        ("--compare async,sync --trace out.pftrace", "--trace takes one protocol"),
        ("--protocol async --protocol sync --trace out.pftrace", "--trace takes one protocol"),
        ("--trace /missing/a.pftrace", "argument --trace: '/missing/a.pftrace': cannot be written"),
        ("--plot /missing/out.png", "argument --plot: .*there is no directory '/missing'; make it"),
        ("--plot out.txt", "argument --plot: 'out.txt' is no plot; end it with .png, .svg, .pdf"),
        ("--trace a.png --plot a.png", "--trace and --plot are both 'a.png'; give two paths"),
        ("--nonsense", "--nonsense"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_what_is_allowed(
    capsys: pytest.CaptureFixture[str], line: str, what: str
) -> None:
    assert re.search(what, refusal(capsys, "simulate", *line.split()))


@pytest.mark.parametrize(
    ("module", "line", "what"),
    [
        ("rich", "--updates 5", r"asynchooks\[cli\]"),
        ("matplotlib", "--plot out.png", r"asynchooks\[plot\]"),
    ],
)
def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    line: str,
    what: str,
) -> None:
    """JSON needs none."""
    monkeypatch.setitem(sys.modules, module, None)
    assert reports(capsys, "--updates 5")[0]["updates"] == 5
    assert re.search(what, refusal(capsys, "simulate", *line.split()))


def test_a_disk_that_is_full_at_the_end_exits_with_1_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        code = main(["simulate", "--updates", "50", "--trace", str(tmp_path / "out.pftrace")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 1
    assert line.startswith("asynchooks simulate: error: ")
    assert "File too large" in line
    assert os.listdir(tmp_path) == []


@pytest.fixture
def help_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """What `asynchooks COMMAND --help` prints, with each paragraph on one line."""

    def of(command: str) -> str:
        monkeypatch.setenv("COLUMNS", "5000")
        with pytest.raises(SystemExit) as left:
            main([*command.split(), "--help"])
        assert left.value.code == 0
        printed, errors = capsys.readouterr()
        assert errors == ""
        return printed

    return of


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("", "Run `asynchooks COMMAND --help` for the options of a command"),
        ("simulate", "least-squares\nproblem"),
    ],
)
def test_help_says_what_is_trained_and_how_on_several_machines(
    help_of: Callable[[str], str], command: str, text: str
) -> None:
    assert text in help_of(command)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_consists_of_whole_sentences_and_examples(
    help_of: Callable[[str], str], command: str
) -> None:
    usage, *lines = help_of(command).splitlines()
    assert usage.startswith(f"usage: asynchooks {command}")
    entries, paragraphs = [], [""]
    for line in lines:
        # an option, or the line below
        about = re.match(r" +(?:\S+(?: \S+)*  +| {10,})(\S.*)", line)
        if about is not None:
            entries.append(about[1])
        if line and not line.startswith(" "):
            paragraphs[-1] += f" {line}"
        if not line or line.startswith(" ") or line.endswith(":"):
            paragraphs.append("")
    assert len(entries) > 2
    assert [each for each in entries if not re.fullmatch(r"[A-Z].*\.", each)] == []
    headings = [each.strip() for each in paragraphs if each and not each.endswith(".")]
    assert [each for each in headings if not each.endswith(":")] == []
    assert "examples:" in headings


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_example_of_the_help_is_accepted(
    help_of: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
) -> None:
    """They are checked as those of a user, and not run."""
    pytest.importorskip("distributed")

    def only_checked(module: ModuleType) -> SimpleNamespace:
        def checked(options: Namespace) -> Callable[[], int]:
            assert callable(module.checked(options))
            return lambda: 0

        return SimpleNamespace(**{**vars(module), "checked": checked})

    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("learner.py").write_text("async def main(concurrency, max_staleness): ...\n")
    with record("run.pftrace"), span("anything"):
        pass
    examples = re.findall(r"^  asynchooks (.*)$", help_of(command), flags=re.MULTILINE)
    monkeypatch.setattr(cli, "COMMANDS", {k: only_checked(v) for k, v in COMMANDS.items()})
    assert len(examples) >= 2
    assert [line for line in examples if main(shlex.split(line)) != 0] == []


def test_without_a_command_it_prints_its_help_on_stderr_and_exits_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As uv and ruff do: a script that has lost its arguments must not seem to succeed."""
    assert main([]) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert errors.startswith("usage: asynchooks [-h] [--version] COMMAND ...\n")
    assert all(name in errors for name in COMMANDS)


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("simulat", "asynchooks: error: argument COMMAND: invalid choice: 'simulat' "
         "(choose from 'simulate', 'plan')"),
        ("--verson", "asynchooks: error: '--verson' is no option; did you mean '--version'?"),
        ("simulate --wrokers 4", "asynchooks simulate: error: '--wrokers' is no option; did you "
         "mean '--workers'?"),
        ("simulate --learning-rat=0.1", "asynchooks simulate: error: '--learning-rat=0.1' is no "
         "option; did you mean '--learning-rates'?"),
        ("simulate --nonsense", "asynchooks simulate: error: '--nonsense' is no option; see "
         "asynchooks simulate --help"),
        ("simulate 4 5", "asynchooks simulate: error: '4' is no option; see asynchooks simulate "
         "--help"),
        ("simulate -- --extra", "asynchooks simulate: error: '--extra' is no option; see "
         "asynchooks simulate --help"),
        ("plan run.pftrace --program learner.py:main --proceses 4", "asynchooks plan: error: "
         "'--proceses' is no option; did you mean '--processes'?"),
        ("plan run.pftrace --progam learner.py:main", "asynchooks plan: error: '--progam' is no "
         "option; did you mean '--program'?"),
    ],
)  # fmt: skip
def test_a_misspelt_command_or_option_is_refused_with_what_there_is(
    capsys: pytest.CaptureFixture[str], line: str, refused: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main(line.split())
    assert left.value.code == 2
    assert capsys.readouterr() == ("", f"{refused}\n")


def test_a_prefix_of_an_option_is_not_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "'--work' is no option; did you mean '--workers'?"
    assert refusal(capsys, "simulate", "--work", "3") == expected


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
        printed, _ = process.communicate(timeout=20)
    assert process.returncode == 130, shown
    assert printed == b""
    assert b"async" in shown
    assert shown.endswith(b"asynchooks simulate: interrupted\r\n")
    assert b"Traceback" not in shown


@pytest.mark.faults
def test_a_narrow_terminal_cuts_no_number() -> None:
    line = "simulate --workers 4 --updates 50 --compare async,sync --seeds 2"
    with on_a_terminal(line) as (process, terminal):
        shown = read_to_the_end(terminal).decode()
        assert process.wait(20) == 0
    assert "\u2026" not in shown
    assert "per s" in shown


@pytest.mark.faults
@pytest.mark.parametrize(
    ("redirection", "code", "errors"),
    [
        (">&-", 0, ""),
        (">/dev/full", 1, "asynchooks simulate: error: 'the output': No space left on device\n"),
    ],
)
@pytest.mark.parametrize("form", ["", "--json"])
def test_an_output_that_is_closed_or_full_ends_without_a_traceback(
    redirection: str, code: int, errors: str, form: str
) -> None:
    command = f"{sys.executable} -m asynchooks simulate --workers 2 --updates 5 {form}"
    done = subprocess.run(
        f"{command} {redirection}", shell=True, stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, errors)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"asynchooks {asynchooks.__version__}\n"
