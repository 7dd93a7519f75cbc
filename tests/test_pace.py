"""Long work says how far it is, now and again."""

import re

import pytest
import torch
from click.testing import CliRunner

from lowtide.commands.main import cli
from lowtide.pace import Pace

SMALL = "gpt2:batch=8,layers=2,width=16,heads=2,length=64,vocab=16"


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    torch._dynamo.reset()


def test_a_word_now_and_again(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("lowtide.pace.time.monotonic", lambda: now[0])
    pace = Pace(5.0)
    said = []
    for second in range(12):
        now[0] = 10.0 + second
        said.append(pace.due())
    assert [second for second, due in enumerate(said) if due] == [5, 10]


def test_every_stage_of_a_long_run_says_how_far_it_is(monkeypatch):
    monkeypatch.setattr(Pace, "due", lambda self: True)
    monkeypatch.setattr("lowtide.commands.stages._EVERY", 0.01)
    result = CliRunner().invoke(
        cli, ["run", SMALL, "--budget", "70%", "--only", "recompute", "--repeats", "2"]
    )
    assert result.exit_code == 0, result.output
    said = result.stderr.splitlines()
    assert said[0] == "capturing, measuring operators, planning …"
    measured = [line for line in said if re.fullmatch(r"measured \d+ of \d+ operators …", line)]
    assert len(measured) > 10
    doing = "capturing, measuring operators, planning"
    assert any(re.fullmatch(doing + r": \d+ s, best .* more, bound .*, gap [\d.]+% …", line) for line in said)
    assert {f"timing both: {k} of 3 times …" for k in (1, 2, 3)} <= set(said)
    assert all(line.endswith(" …") for line in said)


def test_tiles_say_what_is_tried(monkeypatch):
    monkeypatch.setattr(Pace, "due", lambda self: True)
    arguments = ["run", "convpool:size=32", "--budget", "70%", "--only", "recompute,tile", "--repeats", "1"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert re.search(r"^trying \d+ tiles: (nothing fits yet|best .*s) …$", result.stderr, re.MULTILINE)


def test_nothing_is_said_beside_json(monkeypatch):
    monkeypatch.setattr(Pace, "due", lambda self: True)
    arguments = ["run", SMALL, "--budget", "70%", "--only", "recompute", "--repeats", "1", "--json"]
    monkeypatch.setattr("lowtide.commands.stages._EVERY", 0.01)
    assert CliRunner().invoke(cli, arguments).stderr == ""
