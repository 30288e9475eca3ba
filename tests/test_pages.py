"""The code of the README and of the site's pages, run, with what it prints; their links and words.

All Python blocks of a page run in order, in one namespace, in a directory of their own; a text
block straight after one is its exact output. Comments on lines of their own are a page's options:
`<!-- tests: faults -->` is a marker, `<!-- needs: torch, jax -->` what has to be installed. With
`<!-- shows: stderr -->` the outputs include standard error, as in a terminal, without pytest's
handlers of logs.
"""

import contextlib
import gc
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from asynchooks.cli import main

from .support.examples import ROOT, own_logging
from .tf.processes import free_cluster

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.M | re.S)
COMMAND = re.compile(r"^```sh\n(asynchooks [^\n]*)\n```\n\n```text\n(.*?)^```\n", re.M | re.S)
SCRIPT = re.compile(r"# (\S+\.py)(?:, for (\d+) ps and (\d+) workers, (\d+) in each process)?\n")
OPTION = re.compile(r"^<!-- (tests|needs|shows): (.*) -->$", re.M)
FENCED = re.compile(r"^( *)(```+|:::+).*?^\1\2[`:]*$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?[^)]*\)")
TARGET = re.compile(r"^\[[^\]]+\]: (\S+)$", re.M)
HEADING = re.compile(r"^#{1,6} (.+)$", re.M)
FORBIDDEN = re.compile(r"\b(whoever|nobody|somebody|anew)\b", re.I)
MAX_WORDS = 35

PAGES = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts),
]


README = PAGES[0].read_text(encoding="utf-8")
SET_UP = "python3 -m venv .venv && .venv/bin/pip install"


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def options(text: str) -> dict[str, list[str]]:
    return {key: values.split(", ") for key, values in OPTION.findall(text)}


def pages() -> Iterator[object]:
    for path in PAGES:
        code = "".join(found[1] for found in BLOCK.finditer(read(path)))
        marks = [getattr(pytest.mark, name) for name in options(read(path)).get("tests", [])]
        if "tensorflow" in code:
            marks.append(pytest.mark.tensorflow)
        if code:
            marks.append(pytest.mark.timeout(300))
            yield pytest.param(path, id=name_of(path), marks=marks)


def commands() -> list[object]:
    return [
        pytest.param(*found, id=f"{name_of(path)}-{found[0].split()[1]}")
        for path in PAGES
        for found in COMMAND.findall(read(path))
    ]


def prose(text: str) -> str:
    """The page without blocks of code; pieces of code within a line are one word."""
    text = re.sub(r"<!--.*?-->", "", FENCED.sub("", text), flags=re.S)
    return re.sub(r"`[^`\n]+`", "code", text)


def sentences(text: str) -> Iterator[str]:
    """The sentences of paragraphs and lists, without headings and tables, links as their text."""
    text = re.sub(r"!?\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", TARGET.sub("", prose(text)))
    text = re.sub(r"^(#.*|\|.*)$", "", text, flags=re.M)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        yield from re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))


@cache
def anchors(path: Path) -> frozenset[str]:
    """What links may name after `#`: headings as GitHub and MyST write them."""
    found: list[str] = []
    for heading in HEADING.findall(FENCED.sub("", read(path))):
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.append(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    repeated = {f"{each}-{found[:i].count(each)}" for i, each in enumerate(found)}
    return frozenset(found) | repeated


def broken_links(path: Path) -> Iterator[str]:
    text = prose(read(path))
    for link in LINK.findall(text) + TARGET.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        is_there = target.exists() and target.is_relative_to(ROOT)
        if is_there and anchor and target.suffix == ".md":
            is_there = anchor in anchors(target)
        if not is_there:
            yield link


def run_script(code: str, output: str, script: re.Match[str]) -> None:
    """Run a block as a script, or as each task of a cluster; what the page shows is printed."""
    name, num_ps, num_workers, workers_per_process = script.groups()
    Path(name).write_text(code)
    settings: list[dict[str, str]] = [{}]
    if num_ps is not None:
        cluster = free_cluster(ps=int(num_ps), worker=int(num_workers))
        shared = {"cluster": cluster, "workers_per_process": int(workers_per_process)}
        tasks = [(job, i) for job, addresses in cluster.items() for i in range(len(addresses))]
        settings = [
            {"TF_CONFIG": json.dumps({**shared, "task": {"type": job, "index": index}})}
            for job, index in tasks
        ]
    processes = [
        subprocess.Popen(
            [sys.executable, name], env={**os.environ, "PYTHONPATH": str(ROOT), **more},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for more in settings
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert {process.returncode for process in processes} == {0}, outputs
    printed = {line for each, _ in outputs for line in each.splitlines()}
    assert set(output.splitlines()) <= printed, outputs


@pytest.mark.parametrize("path", [*pages()])
def test_page_prints_what_it_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = read(path)
    for package in options(text).get("needs", []):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    # workers share the loop by time: a collection of what other tests have left, which a reader's
    # process has not, would move the step at which one comes
    gc.collect()
    gc.freeze()  # for good: to unfreeze would make the collections of all later tests slow
    # one stream for all blocks: a handler of logs that one installs serves the later ones, too
    with contextlib.ExitStack() as stack:
        stack.enter_context(own_logging())
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if "stderr" in options(text).get("shows", []):
            logging.getLogger().handlers.clear()  # a reader's process has none
            stack.enter_context(contextlib.redirect_stderr(printed))
        for found in BLOCK.finditer(text):
            code, output = found.groups()
            if (script := SCRIPT.match(code)) is not None:
                run_script(code, output, script)
                continue
            begin, num_before = printed.tell(), text.count("\n", 0, found.start(1))
            # empty lines in front: an error then names the page's own line
            exec(compile("\n" * num_before + code, str(path), "exec"), namespace)
            if output is not None:
                assert printed.getvalue()[begin:] == output, f"line {num_before + 1}"


@pytest.mark.parametrize(("command", "output"), commands())
def test_command_prints_what_the_page_shows(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("rich")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    # the table fills its lines with spaces
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == output.splitlines()


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_a_page_is_in_plain_words_and_its_links_lead_somewhere(path: Path) -> None:
    assert FORBIDDEN.findall(read(path)) == []
    assert list(broken_links(path)) == []
    if path.name == "README.md" or "tutorial" in path.parts:
        assert [each for each in sentences(read(path)) if len(each.split()) > MAX_WORDS] == []


def test_readme_is_short_and_its_first_screen_holds_a_complete_example() -> None:
    assert len(README.split()) <= 1200
    example = BLOCK.search(README)
    assert example is not None
    assert example[2] is not None
    assert README.count("\n", 0, example.end()) <= 60  # to the end of its output


def test_each_link_of_the_readme_has_a_target_in_the_list_at_its_end() -> None:
    text = prose(README)
    used = re.findall(r"\[([^\]]+)\](?:\[([^\]]+)\])?", TARGET.sub("", text))
    defined = re.findall(r"^\[([^\]]+)\]: ", text, re.M)
    assert {" ".join((label or shown).lower().split()) for shown, label in used} == {
        each.lower() for each in defined
    }


def test_the_quickstart_and_the_tests_are_one_line_each_and_ci_runs_that_of_the_tests() -> None:
    tests = f"{SET_UP} -e '.[test]' && .venv/bin/python -m pytest -n 2"
    quickstart = f"{SET_UP} '.[examples]' && .venv/bin/python examples/quickstart.py"
    assert {tests, quickstart} <= set(README.splitlines())
    assert tests in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
