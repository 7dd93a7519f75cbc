"""Graphviz files: the picture drawn again, and read back whole; and the SVG made from them."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec

import pytest

from lowtide.cost import Cost, Figure, Note, NoteKind, Origin, Step
from lowtide.errors import ConvertError, FormatError, ToolError
from lowtide.formats import dataflow
from lowtide.formats.dot import svg
from lowtide.formats.dot.read import quote, read_dot, recognise_dot
from lowtide.formats.dot.svg import FORMAT, SVG_FORMAT, draw_svg, write_svg
from lowtide.formats.dot.write import write_dot
from lowtide.formats.registry import read_file
from lowtide.graph import Category, Graph, Kernel, Op, Phase, Rect, Role, Source, Tensor, validate
from tests.conftest import document_path
from tests.mutate import mutated

STEP = dataflow.read(document_path("002").read_bytes())
DOT = write_dot(STEP).data
TEXT = DOT.decode()

AWKWARD = [
    'say "hi"', "back\\slash", "\\", "new\nline", "<b>bold</b>", "&amp; &lt;", "tab\tnul\0bell\a", "\\N \\G \\l", "é—§ 漢字",
    "", " ", "->", "a;b]c[d{e}f=g,h", "//", "\u2028\x85\r", "\ud800",
]  # fmt: skip


def everything() -> Step:
    """A step that sets every field there is."""
    graph = Graph(
        name='a "name"',
        attributes={"batch": 8, "list": [1, None, {"x": 1.5}]},
        tensors=(
            Tensor("w", 40, Role.PARAMETER, name="weight", shape=(2, 5), dtype="float32", device="GPU"),
            Tensor("x", 8, Role.INPUT, shape=(), dtype="int64"),
            Tensor("y", 16, source=Source("net.py", 3), address=4096),
            Tensor("v", 16, alias=2, attributes={"layout": "NCHW"}),
            Tensor(
                "g", 40, Role.GRADIENT, gradient_of=0, boxes={"held": Rect((0, 1), (2, 5)), "other": None}
            ),
        ),
        ops=(
            Op(
                "f",
                "conv",
                inputs=(0, 1),
                outputs=(2,),
                name="conv 1",
                device="GPU",
                kernels=(Kernel("k", "GPU"),),
            ),
            Op("t", "transpose", inputs=(2,), outputs=(3,), category=Category.LAYOUT, after=(0,)),
            Op(
                "b",
                "conv.grad",
                Phase.BACKWARD,
                inputs=(3, 0),
                outputs=(4,),
                input_ports=("gradient", ""),
                output_ports=("w.delta",),
                shape_only=(1,),
                boxes={"here": Rect((0,), (2,))},
                source=Source("net.py", 9),
                attributes={"groups": 1},
            ),
            Op("u", "sgd", Phase.UPDATE, inputs=(0, 4), outputs=(0,), after=(2, 1)),
        ),
    )
    figure = Figure(1.0, Origin.MEASURED)
    return Step(graph, format="x", costs=(Cost(seconds=figure),) * 4, notes=(Note(NoteKind.SKIPPED, "why"),))


def test_the_picture_comes_back_whole():
    step = read_dot(DOT)
    assert step.graph == STEP.graph
    assert step.format == "dataflow"
    assert [op.id for op in step.graph.ops] == [op.id for op in STEP.graph.ops]


def test_writing_again_gives_the_same_file():
    assert write_dot(read_dot(DOT)).data == DOT


@pytest.mark.parametrize("number", ["000", "001", "003", "004"])
def test_graphs_of_other_formats_come_back_whole(number):
    step = read_file(document_path(number)).step
    again = read_dot(write_dot(step).data)
    assert again.graph == step.graph
    assert again.format == step.format


def test_every_field_of_a_graph_comes_back():
    step = everything()
    validate(step.graph)
    assert read_dot(write_dot(step).data).graph == step.graph


def test_an_empty_and_an_unordered_graph():
    for graph in (Graph(), Graph(ordered=False, tensors=(Tensor("x", 1),), ops=(Op("a", "k", inputs=(0,)),))):
        assert read_dot(write_dot(Step(graph)).data) == Step(graph)


@pytest.mark.parametrize("name", AWKWARD, ids=range(len(AWKWARD)))
def test_awkward_names(name):
    graph = Graph(
        name=name,
        tensors=(Tensor(name, 1, Role.INPUT, name=name, dtype=name, attributes={name: name}),),
        ops=(Op(name, name or "k", inputs=(0,), input_ports=(name,), name=name),),
    )
    data = write_dot(Step(graph, format=name)).data
    assert read_dot(data) == Step(graph, format=name)
    assert len(data.decode().split("\n")) == 4 + 2 + 1 + 2


def test_labels_are_those_of_the_picture():
    box = "array([0, 0, 0, 0, 0, 0, 0, 0], dtype=int32), array([64, 1, 1, 64, 7, 7, 27, 27], dtype=int32)"
    assert f'label="L1.W\\ndim=[64 1 1 64 7 7 27 27]\\nread_rect=Rect({box})\\nwrite_rect=None"' in TEXT
    operator = next(line for line in TEXT.split("\n") if 'lowtide_id="L1.filter"' in line)
    assert 'label="L1.filter\\nresult_dim=[256 64 27 27]\\ndist_input=Rect(' in operator
    assert operator.index("dist_input") < operator.index("dist_filters") < operator.index("dist_result")
    for label in ("->input", "output->", "->output.delta", "input.delta->", "->gradient", "->params"):
        assert f'label="{label}"' in TEXT


def test_operators_and_variables_have_different_shapes():
    shapes = {kind: set() for kind in ("tensor", "op")}
    for kind, shape in re.findall(r'shape="(\w+)".*lowtide_node="(\w+)"', TEXT):
        shapes[shape].add(kind)
    assert shapes["tensor"]
    assert shapes["op"]
    assert not shapes["tensor"] & shapes["op"]


def test_labels_of_a_step_without_boxes():
    text = write_dot(everything()).data.decode()
    assert 'label="weight\\n2x5 float32\\nparameter, 40 B"' in text
    assert 'label="conv 1"' in text
    assert 'label="u\\nsgd"' in text
    assert 'style="dashed"' in text
    assert 'style="dotted"' in text


def test_what_gets_lost_is_said():
    assert write_dot(STEP).losses == (f"{len(STEP.notes)} notes of the reader",)
    assert write_dot(everything()).losses == ("4 times of operators", "1 notes of the reader")


def test_recognised_by_content(documents):
    assert recognise_dot(DOT)
    assert not dataflow.recognise(DOT)
    assert not any(recognise_dot(data) for data in documents.values())
    assert recognise_dot(b"// mine\n/* a\nb */ strict digraph x { a -> b }")
    assert not recognise_dot(b"digraph")
    assert not recognise_dot(b"\xff\x00")


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("", 1, "digraph"),
        ("graph x {\n}", 1, "digraph"),
        ("digraph x {\n  a -> b;\n}", 2, "attribute"),
        ("digraph x {\n}", 2, "written by lowtide"),
        ("digraph x {\n  graph [a=\"1\"];\n}", 2, "version 2"),
        ("digraph x {\n  graph [lowtide_version=\"3\", lowtide_ordered=\"true\"];\n}", 2, "version 2"),
        ("digraph x {\n  graph [lowtide_version=\"1\"];\n}", 2, "`true` or `false`"),
        ("digraph x {\n  a [label=\"1\"];\n}", 2, "written by lowtide"),
        ("digraph x {\n  graph [lowtide_version=\"1\", lowtide_ordered=\"true\"];\n  a [label=\"1\"];\n}", 3, "lowtide_node"),
        ("digraph x {\n  graph [lowtide_version=\"1\", lowtide_ordered=\"true\"];\n}\n}", 4, "nothing after"),
        ("digraph x {\n  graph [lowtide_version=\"1\", lowtide_ordered=\"true\"];\n", 3, "`}`"),
        ("digraph x {\n  \"unclosed\n}", 2, "a string"),
        ("digraph x {\n  graph [a=\"1\" b=\"2\"];\n}", 2, "value"),
        ("digraph x {\n  graph [a=1];\n}", 2, "value"),
        ("digraph x {\n  graph [a=\"1\", a=\"2\"];\n}", 2, "once"),
        ("digraph x {\n  subgraph y {\n}", 2, "attribute"),
    ],
)  # fmt: skip
def test_files_that_are_not_ours_are_refused_with_the_line(text, line, expected):
    with pytest.raises(FormatError) as caught:
        read_dot(text.encode())
    assert caught.value.line == line
    assert expected in caught.value.expected


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ('lowtide_role="parameter"', 'lowtide_role="ornament"', "Invalid enum value 'ornament'"),
        ('lowtide_bytes="1024"', 'lowtide_bytes="-1024"', "is no size in bytes"),
        ('lowtide_bytes="1024"', 'lowtide_bytes="9999999999999999999"', "sizes lie between"),
        ('lowtide_shape="256 1 1 1"', 'lowtide_shape="256 1 x 1"', "is no dimension"),
        ('lowtide_id="L0.W"', 'lowtide_id="L1.W"', "tensor id 'L1.W' is used twice"),
        ('lowtide_phase="update"', 'lowtide_phase="later"', "Invalid enum value 'later'"),
        ('lowtide_node="op"', 'lowtide_node="operator"', "without lowtide_node"),
        ('lowtide_kind="filter"', 'lowtide_sort="filter"', "lowtide_sort"),
        ("  t1 [", "  t0 [", "the node 't0' stands twice"),
        ("  t1 -> o1", "  t999 -> o1", "an edge of 't999'"),
        ("  t1 -> o1", "  t1 -> t2", "an edge from 't1' to 't2'"),
        ("  t1 -> o1", "  o2 -> o1", "an edge from 'o2' to 'o1'"),
        ('lowtide_port="filters"', 'lowtide_after="true"', "an edge from"),
        ('lowtide_shape_only="true"', 'lowtide_shape_only="maybe"', "lowtide_shape_only='maybe'"),
        (', lowtide_port="filters"', "", "some edges of an operator have a lowtide_port"),
        ('\\"gradient_of\\":17', '\\"gradient_of\\":170', "is the gradient of tensor 170"),
        ('\\"gradient_of\\":17', '\\"alias\\":19', "is a view of"),
        ('\\"hi\\":[256,1,41,41]', '\\"hi\\":[256,1,41]', "as many upper as lower bounds"),
        ('\\"attributes\\":{\\"line\\":8}', '\\"id\\":\\"y\\"', "lowtide_rest"),
        ('\\"attributes\\":{\\"line\\":8}', '\\"attributes\\":' + "[" * 5000, "nested too deeply|breaks off"),
        ('\\"line\\":8', '\\"line\\":8,\\"line\\":8', "stands twice"),
    ],
)  # fmt: skip
def test_damage_is_refused_with_the_line(before, after, problem):
    assert before in TEXT
    with pytest.raises(FormatError, match=problem) as caught:
        read_dot(TEXT.replace(before, after, 1).encode())
    assert caught.value.line is not None


def test_operators_out_of_order_are_refused():
    lines = TEXT.split("\n")
    first = next(k for k, line in enumerate(lines) if line.startswith("  o1 ["))
    lines.insert(len(STEP.graph.tensors) + len(STEP.graph.ops) + 4, lines.pop(first))
    with pytest.raises(FormatError, match="before any operator has written it"):
        read_dot("\n".join(lines).encode())


@pytest.mark.parametrize("data", [b"", b"\xff", b"\0", b"digraph \0 {", "digraph x {".encode("utf-16")])
def test_what_is_no_text(data):
    with pytest.raises(FormatError):
        read_dot(data)


@pytest.mark.parametrize(
    "text",
    [
        'digraph "' + "\\" * 400_000,
        "digraph x {\n" + "[" * 400_000,
        "-" * 400_000,
        '"' * 400_001,
        "\n" * 400_000,
    ],
)
def test_work_stays_in_proportion(text):
    with pytest.raises(FormatError):
        read_dot(text.encode())


@pytest.mark.parametrize("seed", range(3))
def test_damage_of_any_kind_is_read_or_refused(seed):
    for number in range(100):
        data = mutated(random.Random(f"dot {seed} {number}"), DOT)
        try:
            step = read_dot(data)
        except FormatError as error:
            assert error.expected
            assert error.line is not None or error.byte is not None
            continue
        validate(step.graph)
        assert read_dot(write_dot(step).data).graph == step.graph


def test_strings_of_graphviz():
    assert quote('a"b\\c\n\x00') == '"a\\"b\\\\c\\n\\u0000"'


def test_the_formats_say_what_they_can_do():
    assert (FORMAT.name, FORMAT.read, FORMAT.write) == ("dot", read_dot, write_dot)
    assert (SVG_FORMAT.name, SVG_FORMAT.read, SVG_FORMAT.write) == ("svg", None, write_svg)


# pictures

needs_graphviz = pytest.mark.skipif(
    shutil.which("dot") is None and find_spec("pygraphviz") is None, reason="needs Graphviz or pygraphviz"
)


@needs_graphviz
def test_the_picture_is_drawn():
    written = draw_svg(STEP, None)
    root = ElementTree.fromstring(written.data)
    name = "{http://www.w3.org/2000/svg}"
    text = {element.text for element in root.iter(f"{name}text")}
    assert {"L0.W", "dim=[64 1 1 64 7 7 27 27]", "->filters", "update_W1", "L0.a.grad.set_zero"} <= text
    groups = [g.get("class") for g in root.iter(f"{name}g")]
    assert groups.count("node") == len(STEP.graph.tensors) + len(STEP.graph.ops)
    assert groups.count("edge") == sum(len(op.inputs) + len(op.outputs) for op in STEP.graph.ops)
    assert "a picture: it cannot be read back" in written.losses


@needs_graphviz
def test_awkward_names_are_drawn_as_they_are():
    names = [name for name in AWKWARD if name.strip() and name.isprintable()]
    graph = Graph(tensors=tuple(Tensor(name, 1) for name in names))
    root = ElementTree.fromstring(write_svg(Step(graph)).data)
    text = {
        (element.text or "").replace("\xa0", " ") for element in root.iter("{http://www.w3.org/2000/svg}text")
    }
    assert set(names) <= text


@needs_graphviz
def test_a_larger_graph_is_drawn():
    root = ElementTree.fromstring(draw_svg(read_file(document_path("001")).step, None).data)
    assert len([g for g in root.iter() if g.get("class") == "node"]) == 234 + 299


def test_a_graph_too_large_to_lay_out_is_refused():
    graph = Graph(tensors=tuple(Tensor(str(k), 1) for k in range(svg.MAX_NODES + 1)))
    with pytest.raises(ConvertError, match="the limit is 2000. Draw it folded, with --fold instead of --all"):
        write_svg(Step(graph))


def test_without_graphviz_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(svg.shutil, "which", lambda name: None)
    monkeypatch.setattr(svg.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolError, match=r'pip install "lowtide\[svg\]"'):
        write_svg(STEP)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 'syntax error' >&2; exit 1", "Graphviz failed: syntax error"),
        ("exit 3", "Graphviz failed: exit status 3"),
        ("echo nothing", "Graphviz failed"),
        ("sleep 5", "did not lay out the graph within 0.2 seconds"),
    ],
)
def test_a_program_that_fails(monkeypatch, tmp_path, script, problem):
    program = tmp_path / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + ":/usr/bin:/bin")
    monkeypatch.setattr(svg, "_SECONDS", 0.2 if "sleep" in script else 20)
    with pytest.raises(ToolError, match=problem):
        write_svg(STEP)


def test_a_program_that_cannot_start(monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("not allowed")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(svg.shutil, "which", lambda name: "/nowhere/dot")
    with pytest.raises(ToolError, match="could not be started: not allowed"):
        write_svg(STEP)


def test_attributes_are_plain_json():
    for item in (*STEP.graph.tensors, *STEP.graph.ops):
        assert json.loads(json.dumps(item.attributes)) == item.attributes
