"""Names that would command a terminal, forge lines or break out of a page: every command shows them harmless."""

import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import msgspec
import pytest

import lowtide
from lowtide.commands.main import main
from lowtide.cost.step import Note, NoteKind, Step
from lowtide.documents import write_document
from lowtide.errors import FileError, FormatError, InfeasibleError
from lowtide.formats import dot, native
from lowtide.graph import Source
from lowtide.plan.budget import parse_budget
from lowtide.plan.program.costs import Costs
from lowtide.printable import printable
from lowtide.report.page.html import html_page
from lowtide.report.page.make import Given, report_of
from tests.fuzz_commands import document
from tests.planning import plan_for

HOSTILE = (
    "\x1b]0;title\x07\x1b[2J\x1b[8mhidden\x9b31m\x00\x7f\x08\r\t\u202eoverride\u2066\u200f\u2028\u2029\x85"
    "\nFORGED [bold]m[/] [link=http://x]l[/link] :fire: '\"><img src=x onerror=alert(1)></script>&amp;"
)
FORBIDDEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029]"
)
OURS = re.compile(r"\x1b\[(?:0|1|2|31|32|36)?m|\r(?= *[0-9.]+ s  )")
"""What is written to a terminal on purpose: bold, dim, red, green and cyan, and progress on one line."""


class Terminal(io.StringIO):
    """Standard output or error of somebody who looks at it."""

    def isatty(self):
        return True


def hostile_step(kinds=False):
    """A captured step in which everything that has a name has a hostile one."""
    step = native.read(document("chain"))
    graph, source = step.graph, Source(f"/{HOSTILE}.py", 1)
    tensors = [
        msgspec.structs.replace(t, id=f"{HOSTILE}{k}", name=f"{HOSTILE}{k}", device=HOSTILE, source=source)
        for k, t in enumerate(graph.tensors)
    ]
    ops = [
        msgspec.structs.replace(
            op,
            id=f"{HOSTILE}{k}",
            name=HOSTILE,
            kind=f"{op.kind}{HOSTILE}" if kinds else op.kind,
            device=HOSTILE,
            source=source,
            attributes=op.attributes | {HOSTILE: HOSTILE},
        )
        for k, op in enumerate(graph.ops)
    ]
    named = msgspec.structs.replace(graph, tensors=tuple(tensors), ops=tuple(ops), name=HOSTILE)
    notes = [Note(kind, HOSTILE, 1, HOSTILE, HOSTILE) for kind in NoteKind]
    return Step(named, HOSTILE, step.costs, step.spans, tuple(notes))


def planned(step, budget):
    costs = Costs(tuple(float(cost.seconds.value) for cost in step.costs))
    return plan_for(step.graph, costs, parse_budget(budget), time_limit=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("hostile")
    step = hostile_step()
    lowtide.write(step, "native", made / "step.json")
    lowtide.write(hostile_step(kinds=True), "native", made / "kinds.json")
    lowtide.write(native.read(document("chain")), "native", made / "plain.json")
    plan = planned(step, "100%")
    write_document(made / "plan.json", plan)
    write_document(made / "promise.json", msgspec.structs.replace(plan, budget_bytes=1))
    lines = plan.program.forward
    program = msgspec.structs.replace(plan.program, forward=lines[1:])
    write_document(made / "reads.json", msgspec.structs.replace(plan, program=program))
    damaged = (made / "step.json").read_bytes()
    (made / "damaged.json").write_bytes(damaged.replace(b'"role":"input"', b'"role":"\\u001b[2J"', 1))
    return made


LINES = [
    (["show", "step.json"], 0),
    (["show", "kinds.json"], 0),
    (["show", "damaged.json"], 2),
    (["show", "plan.json"], 0),
    (["show", HOSTILE.replace("\0", "").replace("/", "")], 2),
    (["top", "step.json"], 0),
    (["top", "kinds.json", "--by", "type"], 0),
    (["top", "step.json", "--type", HOSTILE], 2),
    (["top", "step.json", "--filter", f"({HOSTILE}"], 2),
    (["top", "step.json", f"--{HOSTILE}"], 2),
    (["diff", "step.json", "plain.json", "--limit", "0"], 0),
    (["convert", "step.json", "--to", "dot", "-o", "\x1b]0;t\x07.dot"], 0),
    (["convert", "step.json", "--to", HOSTILE, "-o", "out"], 2),
    (["convert", "step.json", "--to", "csv", "-o", f"no\x1b[2J/{HOSTILE[:20]}"], 2),
    (["plan", "step.json", "--budget", "100%", "--explain"], 0),
    (["plan", "step.json", "--budget", "100%", "--explain", "-o", "\u202e.json"], 0),
    (["plan", "step.json", "--budget", "5%", "--time-limit", "0.5"], 3),
    (["plan", "step.json", "--budget", HOSTILE], 2),
    (["plan", HOSTILE, "--budget", "50%"], 2),
    (["plan", "step.json", "--budget", "100%", "--cost", HOSTILE], 2),
    (["check", "plan.json"], 0),
    (["check", "promise.json"], 2),
    (["check", "reads.json"], 2),
    (["check", "step.json"], 2),
    (["address", "step.json", "--csv", "places\x1b.csv", "--svg", "places\x9b.svg"], 0),
    (["address", "plan.json"], 0),
    (["address", "reads.json"], 2),
    (["address", HOSTILE], 2),
    (["tile", "step.json", "--grid", "2x2"], 0),
    (["tile", "step.json", "--grid", "2x2", "--own", "input", "--svg", "tiles\x9b.svg"], 0),
    (["tile", "step.json", "--grid", "2x2", "--until", HOSTILE], 2),
    (["tile", "step.json", "--grid", "9x9"], 2),
    (["tile", "kinds.json", "--grid", "2x2"], 2),
    (["run", f"{HOSTILE[:20]}.py:step"], 2),
    (["run", "convpool", "--program", "damaged.json"], 2),
    (["profile", HOSTILE, "-o", "out.json"], 2),
    (["demo", HOSTILE, "-o", "out.html"], 2),
    (["formats"], 0),
    ([HOSTILE], 2),
]


@pytest.mark.parametrize("looked_at", [False, True], ids=["piped", "terminal"])
@pytest.mark.parametrize(
    ("arguments", "code"), LINES, ids=lambda v: printable(" ".join(v))[:60] if isinstance(v, list) else str(v)
)
def test_nothing_of_a_file_commands_the_terminal(arguments, code, looked_at, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "400")
    out, err = (Terminal() if looked_at else io.StringIO() for _ in range(2))
    if looked_at:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = out.getvalue() + err.getvalue()
    assert ended.value.code == code, shown
    assert shown
    plain = OURS.sub("", shown) if looked_at else shown
    assert not FORBIDDEN.search(plain), repr(plain)
    assert not re.search("^FORGED", plain, re.MULTILINE), plain


def test_markup_is_text(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("lowtide.commands.common._PIPE_WIDTH", 2000)
    with pytest.raises(SystemExit):
        main(["show", "step.json"])
    shown = capsys.readouterr().out
    assert "\\nFORGED [bold]m[/] [link=http://x]l[/link] :fire:" in shown
    assert "\\x1b]0;title\\x07\\x1b[2J" in shown
    assert "\\u202eoverride\\u2066" in shown


@pytest.mark.parametrize(
    "arguments",
    [["show", "step.json"], ["top", "step.json"], ["diff", "step.json", "plain.json"],
     ["tile", "step.json", "--grid", "2x2"], ["plan", "step.json", "--budget", "100%"]],
    ids=lambda a: a[0],
)  # fmt: skip
def test_json_keeps_names_as_they_are(arguments, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert not FORBIDDEN.search(shown)
    if arguments[0] != "plan":
        assert HOSTILE in str(_strings(json.loads(shown)))


def _strings(value):
    if isinstance(value, dict):
        return "".join(map(_strings, [*value, *value.values()]))
    return "".join(map(_strings, value)) if isinstance(value, list) else str(value)


def test_a_plan_in_words_and_errors_are_safe_to_print():
    step = hostile_step()
    said = planned(step, "100%").explain()
    assert "hidden" in said
    assert not FORBIDDEN.search(said)
    with pytest.raises(InfeasibleError) as caught:
        planned(step, "5%")
    assert "hidden" in str(caught.value)
    assert not FORBIDDEN.search(str(caught.value))
    for error in (FileError(HOSTILE), FormatError(HOSTILE, expected=HOSTILE, line=1, path=HOSTILE)):
        assert not FORBIDDEN.search(str(error))


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)


def test_a_page_holds_names_as_text():
    """What Chromium makes of it is seen in tests/report/page/test_browser.py."""
    given = [Given(HOSTILE, hostile_step(kinds=True), HOSTILE)]
    named = {"title": HOSTILE, "about": HOSTILE, "target": HOSTILE, "made_by": HOSTILE}
    found = _Tags()
    found.feed(html_page(report_of(given, **named)).decode())
    assert "script" in found.tags
    assert not found.tags & {"img", "a", "svg", "b"}


def test_a_picture_of_tiles_holds_names_as_text(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit):
        main(["tile", "step.json", "--grid", "2x2", "--svg", "picture.svg"])
    text = (folder / "picture.svg").read_text()
    root = ElementTree.fromstring(text)  # control characters are no XML
    assert {element.tag.rpartition("}")[2] for element in root.iter()} == {
        "svg", "title", "style", "rect", "text", "g", "line",
    }  # fmt: skip
    assert "<img" not in text


def test_a_graphviz_file_holds_names_as_text():
    step = hostile_step(kinds=True)
    data = dot.write(step).data
    assert dot.read(data).graph == step.graph
    text = data.decode()
    assert len(text.splitlines()) == 5 + len(step.graph.tensors) + len(step.graph.ops) + sum(
        len(op.inputs) + len(op.outputs) for op in step.graph.ops
    )
    assert not re.search(r"label=<", text)
