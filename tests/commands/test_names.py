"""Files that cannot be: names too long, with bytes that no file has, folders, loops, and outputs that are inputs."""

import os

import msgspec
import pytest

from lowtide.commands.main import main
from lowtide.documents import write_document
from lowtide.errors import FileError
from lowtide.files import check_outputs, is_file, read_bytes, write_atomically
from tests.commands.refusal import refused
from tests.conftest import document_path
from tests.fuzz_commands import document
from tests.steps import families_plan

GRAPH = str(document_path("000"))
NAMES = {
    "long": "x" * 300,
    "deep": "/".join(["d" * 200] * 30),
    "nul": "a\0b",
    "folder": ".",
    "loop": "loop",
    "nowhere": "no/such/file",
    "below a file": f"{GRAPH}/x",
    "long code": "x" * 300 + ".py:step",
    "nul code": "a\0b.py:step",
}
READS = {
    "show": ["show", "NAME"],
    "top": ["top", "NAME"],
    "diff": ["diff", GRAPH, "NAME"],
    "convert": ["convert", "NAME", "--to", "native", "-o", "out"],
    "check": ["check", "NAME"],
    "plan": ["plan", "NAME", "--cost", "unit", "--budget", "90%"],
    "plan --cost": ["plan", GRAPH, "--cost", "NAME", "--budget", "90%"],
    "tile": ["tile", "NAME", "--grid", "2x2"],
    "run": ["run", "NAME"],
    "run --program": ["run", "convpool", "--program", "NAME"],
    "profile": ["profile", "NAME", "-o", "out"],
    "demo": ["demo", "NAME", "-o", "out"],
}
WRITES = {
    "convert": ["convert", GRAPH, "--to", "native", "-o", "NAME"],
    "plan": ["plan", GRAPH, "--cost", "unit", "--budget", "90%", "-o", "NAME"],
    "tile": ["tile", "step.json", "--grid", "2x2", "--svg", "NAME"],
    "run --save-program": ["run", "convpool", "--save-program", "NAME"],
    "run --timeline": ["run", "convpool", "--timeline", "NAME"],
    "profile": ["profile", "convpool", "-o", "NAME"],
}
"""``demo`` makes the folder of its page."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "step.json").write_bytes(document("chain"))
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", READS)
def test_what_cannot_be_read_is_refused(command, name, here, capsys):
    before = sorted(here.iterdir())
    assert refused(*(NAMES[name] if a == "NAME" else a for a in READS[command]), capsys=capsys)
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("name", [name for name in NAMES if "code" not in name])
@pytest.mark.parametrize("command", WRITES)
def test_what_cannot_be_written_is_refused_before_anything_runs(command, name, here, capsys):
    before = sorted(here.iterdir())
    said = refused(*(NAMES[name] if a == "NAME" else a for a in WRITES[command]), capsys=capsys)
    assert "cannot be written" in said or "not a regular file" in said
    assert sorted(here.iterdir()) == before


CODE = """
import torch
def step():
    return torch.nn.Linear(2, 2), (torch.ones(1, 2),), lambda model, x: model(x).sum()
"""


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["convert", "step.json", "--to", "dot", "-o", "./step.json"], "step.json"),
        (["plan", "step.json", "--budget", "90%", "-o", "step.json"], "step.json"),
        (["plan", GRAPH, "--cost", "step.json", "--budget", "90%", "-o", "step.json"], "step.json"),
        (["tile", "step.json", "--grid", "2x2", "--svg", "link.json"], "step.json"),
        (["profile", "code.py:step", "-o", "code.py"], "code.py"),
        (["run", "code.py:step", "--save-program", "code.py"], "code.py"),
        (["run", "convpool", "--program", "step.json", "--timeline", "step.json"], "step.json"),
        (["demo", "code.py:step", "-o", "code.py"], "code.py"),
        (["plan", "code.py:step", "--budget", "90%", "-o", "code.py"], "code.py"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_what_is_read_is_not_written_over(arguments, file, here, capsys):
    (here / "code.py").write_text(CODE)
    (here / "link.json").symlink_to("step.json")
    before = (here / file).read_bytes()
    assert "the file that is read" in refused(*arguments, capsys=capsys)
    assert (here / file).read_bytes() == before


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", ".", "loop", f"{GRAPH}/x"])
def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(name, capsys):
    refused("demo", "convpool", "-o", name, capsys=capsys)


def test_names_that_are_no_text_are_written_and_shown(here, capsys):
    name = os.fsdecode(b"caf\xe9.json")
    with pytest.raises(SystemExit) as ended:
        main(["convert", "step.json", "--to", "native", "-o", name])
    assert ended.value.code == 0
    assert "Wrote caf\\udce9.json" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["show", name])
    assert ended.value.code == 0
    assert "caf\\udce9.json: Lowtide step" in capsys.readouterr().out


def test_half_a_character_in_a_step_is_refused(here, capsys):
    record = document_path("001").read_text().replace('"name": "', '"name": "\\ud800', 1)
    (here / "half.json").write_text(record)
    assert "half a character" in refused("convert", "half.json", "--to", "native", "-o", "out", capsys=capsys)
    assert not (here / "out").exists()


def test_a_name_that_no_file_can_have_is_no_file():
    assert not any(map(is_file, ("x" * 300, "a\0b", "", ".", "loop")))
    assert is_file(GRAPH)
    for name in ("x" * 300, "a\0b"):
        for use in (read_bytes, check_outputs, lambda path: write_atomically(path, b"")):
            with pytest.raises(FileError):
                use(name)


def test_a_name_in_a_plan_that_is_half_a_character_is_refused(here):
    plan = families_plan()
    with pytest.raises(FileError, match="half a character"):
        write_document(here / "plan.json", msgspec.structs.replace(plan, method="\ud800"))
    assert not (here / "plan.json").exists()
