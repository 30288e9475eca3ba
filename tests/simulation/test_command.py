"""`asynchooks simulate`: several protocols, and seeds of a training that diverges."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from asynchooks.cli import main


def run(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert main(["simulate", *line.split()]) == 0
    return str(capsys.readouterr().out)


def reports(capsys: pytest.CaptureFixture[str], line: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(capsys, f"{line} --json"))["reports"]
    return found


def test_a_protocol_given_several_times_compares(capsys: pytest.CaptureFixture[str]) -> None:
    rest = "--workers 3 --updates 50"
    compared = run(capsys, f"--compare async@0.01,sync {rest}")
    assert run(capsys, f"--protocol async@0.01 --protocol sync {rest}") == compared
    names = "DiscardStale(KAsync(k=2),3)", "ssp:1"  # a name with a comma
    rows = reports(capsys, f"--protocol {names[0]} --protocol {names[1]} {rest}")
    assert [each["protocol"] for each in rows] == list(names)


@pytest.mark.faults
@pytest.mark.parametrize("rate", [3, 1000])
def test_seeds_of_a_training_that_diverges_have_a_row(
    capsys: pytest.CaptureFixture[str], rate: float
) -> None:
    line = f"--workers 4 --updates 300 --seeds 3 --learning-rates {rate}"
    *_, row = run(capsys, line).splitlines()
    assert re.search(r"e\+\d+ \(.* to .*\)|nan|inf", row)
    (found,) = reports(capsys, line)
    assert found["num_seeds"] == 3
