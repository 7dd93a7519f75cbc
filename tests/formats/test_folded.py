"""Large graphs in a few boxes, which a person can read at the first size of the picture."""

import re
from importlib.util import find_spec
from shutil import which
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from lowtide.commands.main import cli
from lowtide.cost import Step
from lowtide.errors import ConvertError, FormatError
from lowtide.formats.dot.fold import fold, module_path
from lowtide.formats.dot.folded import BOXES, write_folded
from lowtide.formats.dot.read import read_dot
from lowtide.formats.dot.svg import write_svg
from lowtide.formats.registry import read_file, write_file
from lowtide.graph import Graph, Op, Phase, Role, Tensor
from tests.conftest import document_path

needs_graphviz = pytest.mark.skipif(
    which("dot") is None and find_spec("pygraphviz") is None, reason="needs Graphviz or pygraphviz"
)


def layers(count):
    """A parameter, a forward and a backward operator for each layer of a captured model."""
    tensors, ops = [Tensor("x", 1000, role=Role.INPUT)], []
    for k in range(count):
        tensors += [Tensor(f"w{k}", 10, role=Role.PARAMETER), Tensor(f"y{k}", 1000)]
        ops.append(
            Op(
                f"mm_{k}",
                "aten.mm",
                name=f"layers.{k}.linear",
                inputs=(2 * k, 2 * k + 1),
                outputs=(2 * k + 2,),
            )
        )
    for k in reversed(range(count)):
        tensors.append(Tensor(f"g{k}", 1000, role=Role.GRADIENT))
        inputs = (2 * k + 2, *((len(tensors) - 2,) if k < count - 1 else ()))
        ops.append(
            Op(
                f"bw_{k}",
                "aten.mm",
                Phase.BACKWARD,
                name=f"layers.{k}.linear",
                inputs=inputs,
                outputs=(len(tensors) - 1,),
            )
        )
    return Graph(tuple(tensors), tuple(ops))


@pytest.mark.parametrize(
    ("op", "path"),
    [
        (Op("addmm", "aten.addmm", name="layers.0.linear1"), ("layers", "0", "linear1")),
        (Op("pow_1", "aten.pow"), ()),
        (Op("L0.filter", "filter"), ("L0", "filter")),
        (Op("ReLU.1", "ReLU"), ()),
        (Op("1", "Const", name="gradients/conv1/ShapeN"), ("gradients", "conv1", "ShapeN")),
        (Op("2", "Elemwise", name="ADD(conv[557],conv[560])[563]"), ()),
        (Op("call 1", "aten.conv2d", name="aten::conv2d (Conv2d_0)"), ("Conv2d_0",)),
        (Op("event 1", "aten.conv2d", name="train.py:31 forward"), ()),
    ],
)
def test_names_say_which_module_an_operator_is_part_of(op, path):
    assert module_path(op) == path


@pytest.mark.parametrize("boxes", [3, 10, 24, 500])
@pytest.mark.parametrize("number", ["000", "001", "002", "003"])
def test_every_operator_is_in_one_group_and_there_are_few(number, boxes):
    graph = read_file(document_path(number)).step.graph
    groups = fold(graph, boxes)
    assert sorted(k for group in groups for k in group.ops) == list(range(len(graph.ops)))
    assert all(graph.ops[k].phase is group.phase for group in groups for k in group.ops)
    assert len(groups) <= boxes


def test_modules_are_unfolded_as_deep_as_there_is_room():
    graph = layers(4)
    assert [group.title for group in fold(graph, 3)] == ["layers", "layers"]
    titles = [f"layers.{k}.linear" for k in (0, 1, 2, 3)]
    assert [group.title for group in fold(graph, 8)] == titles + titles[::-1]


def test_an_operator_between_those_of_a_module_belongs_to_it():
    ops = (
        Op("a", "aten.mm", name="block.first"),
        Op("b", "aten.add"),
        Op("c", "aten.mm", name="block.second"),
        Op("d", "aten.mean"),
    )
    assert [(group.title, group.ops) for group in fold(Graph((), ops), 2)] == [
        ("block", (0, 1, 2)),
        ("d", (3,)),
    ]


def test_arrows_carry_the_bytes_between_groups():
    text = write_folded(Step(layers(3))).data.decode()
    assert "x\\n1000 B" in text
    edges = re.findall(r"(g\d) -> (g\d) \[(.*?)\];", text)
    forward = [
        edge for edge in edges if "dashed" not in edge[2] and "invis" not in edge[2] and "back" not in edge[2]
    ]
    assert [(a, b) for a, b, _ in forward] == [("g0", "g1"), ("g1", "g2")]
    assert all("1000 B" in rest for *_, rest in forward)
    saved = [(a, b) for a, b, rest in edges if "dashed" in rest]
    assert saved == [("g0", "g5"), ("g1", "g4"), ("g2", "g3")]
    assert [line for line in text.splitlines() if "rank=same" in line] == [
        "  { rank=same; g2; g3 }",
        "  { rank=same; g1; g4 }",
        "  { rank=same; g0; g5 }",
    ]


@needs_graphviz
def test_document_002_opens_at_a_size_that_can_be_read():
    """The whole picture fits a window of 1,280 by 720 pixels, at a font of 11 points."""
    written = write_svg(read_file(document_path("002")).step)
    root = ElementTree.fromstring(written.data)
    width, height = (float(root.get(side).removesuffix("pt")) * 4 / 3 for side in ("width", "height"))
    assert width <= 1280
    assert height <= 720
    name = "{http://www.w3.org/2000/svg}"
    text = list(root.iter(f"{name}text"))
    assert {"L0", "L1", "classifier", "update_L0", "parameters 558.32 MiB"} <= {one.text for one in text}
    assert {float(one.get("font-size")) for one in text} == {9.0, 11.0}
    assert (
        "39 operators, which are drawn in 8 groups, and 34 tensors: --all draws every one" in written.losses
    )


@needs_graphviz
def test_a_step_of_thousands_of_operators_is_drawn():
    graph = layers(2000)
    assert len(graph.ops) + len(graph.tensors) > 8000
    root = ElementTree.fromstring(write_svg(Step(graph)).data)
    assert len([g for g in root.iter() if g.get("class") == "node"]) <= BOXES + 1


def test_names_cannot_leave_their_box():
    op = Op('"]; evil [label="x', "k", outputs=(0,))
    text = write_folded(Step(Graph((Tensor("t", 1),), (op, Op("b&lt;", "k", inputs=(0,)))))).data.decode()
    assert '\\"]; evil' in text
    assert "b&amp;lt;" in text


def test_options_of_the_command(tmp_path):
    file, out = document_path("002"), tmp_path / "out.dot"

    def run(*options):
        return CliRunner().invoke(cli, ["convert", str(file), "-o", str(out), *options])

    assert run("--to", "dot", "--fold", "12").exit_code == 0
    assert out.read_text().count("fillcolor=") == 10
    with pytest.raises(FormatError, match="a Graphviz file with no version|no `graph` statement"):
        read_dot(out.read_bytes())
    assert run("--to", "dot", "--all").exit_code == 0
    assert read_file(out).step.graph == read_file(file).step.graph
    assert "give one of them" in run("--to", "dot", "--fold", "12", "--all").stderr
    refused = run("--to", "csv", "--fold", "12").exception
    assert isinstance(refused, ConvertError)
    assert (
        str(refused)
        == "the format 'csv' is no picture: only dot, svg can be folded; leave out --fold and --all"
    )


def test_the_library_folds_too(tmp_path):
    written = write_file(Step(layers(4)), "dot", tmp_path / "a.dot", boxes=3)
    assert written.losses[0].startswith("8 operators, which are drawn in 2 groups")
