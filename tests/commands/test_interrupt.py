"""``lowtide plan`` under signals, in a process of its own: what it says, how it ends, what it leaves behind."""

import json
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from lowtide.commands.main import cli, main
from tests.conftest import document_path

DRIVER = """
import os, signal, sys, threading
from lowtide.commands.main import main
from lowtide.plan.make import make_plan as make
from lowtide.plan.recompute import portfolio
from lowtide.plan.bounds import model as rows
kind, moment, *arguments = sys.argv[1:]

def strike(delay=0.0):
    threading.Timer(delay, os.kill, (os.getpid(), getattr(signal, kind))).start()

def struck(module, name, delay=0.0):
    function = getattr(module, name)
    def call(*args, **kwargs):
        setattr(module, name, function)
        strike(delay)
        return function(*args, **kwargs)
    setattr(module, name, call)

def waiting(*_, **__):
    strike()
    signal.pause()

if moment != "looking for the smallest":
    sys.modules["lowtide.commands.plan"]._SMALLEST_SECONDS = 0.0
if moment == "solving":
    struck(rows, "run_solver", 0.3)
elif moment == "before anything is found":
    portfolio._Search.work = waiting
elif moment == "looking for the smallest":
    struck(make, "smallest_budget", 0.1)
elif moment == "writing":
    os.fsync = waiting
main(["plan", *arguments])
"""


def asked(*arguments):
    return (
        str(document_path("000")),
        "--cost",
        "unit",
        "--only",
        "recompute",
        "--time-limit",
        "60",
        *arguments,
    )


def plan(kind, moment, *arguments):
    command = [sys.executable, "-c", DRIVER, kind, moment, *asked(*arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("moment", "budget"), [("solving", "40%"), ("looking for the smallest", "90%")], ids=lambda text: text
)
def test_ctrl_c_keeps_the_best_plan_so_far_and_says_so(moment, budget, tmp_path):
    path = tmp_path / "plan.json"
    result = plan("SIGINT", moment, "--budget", budget, "-o", str(path), "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == ["Interrupted: this is the best plan that was found so far"]
    view = json.loads(result.stdout)
    assert view["interrupted"]
    assert view["checked"]
    assert view["predicted"]["peak_bytes"] <= view["budget_bytes"]
    assert json.loads(path.read_text())["interrupted"]
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_ends_a_sweep_with_the_budgets_so_far(tmp_path):
    path = tmp_path / "sweep.json"
    result = plan("SIGINT", "solving", "--sweep", "-o", str(path))
    assert result.returncode == 0, result.stderr
    assert "Interrupted: these are the budgets that were planned so far" in result.stderr
    assert "smallest budget with a known plan" in result.stdout
    assert json.loads(path.read_text())["interrupted"]


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("before anything is found", "Interrupted: no plan is ready yet, and nothing was written"),
        ("writing", "Interrupted"),
    ],
)
def test_ctrl_c_without_a_plan_is_said_in_a_line(moment, said, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    result = plan("SIGINT", moment, "--budget", "90%", "-o", str(path))
    assert result.returncode == 130
    assert result.stderr.split("\n") == ["", said, ""]
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"plan.json": "old"}


@pytest.mark.parametrize("kind", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("moment", ["solving", "writing"])
def test_a_kill_leaves_the_old_file_and_a_second_run_works(kind, moment, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")
    budget = "40%" if moment == "solving" else "90%"
    result = plan(kind, moment, "--budget", budget, "-o", str(path))
    assert result.returncode == -getattr(signal, kind)
    assert path.read_text() == "old"
    monkeypatch.setattr(sys.modules["lowtide.commands.plan"], "_SMALLEST_SECONDS", 0.0)
    assert CliRunner().invoke(cli, ["plan", *asked("--budget", "90%", "-o", str(path))]).exit_code == 0
    assert json.loads(path.read_text())["checked"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_host_without_memory_is_said_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr("lowtide.commands.show.load", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(SystemExit) as caught:
        main(["show", str(document_path("000"))])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("Error: the host has no memory left")
