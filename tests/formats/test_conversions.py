"""What is written is read again, or is not written; what is lost on the way is said."""

import itertools

import pytest

from lowtide.cost import Step
from lowtide.errors import ConvertError, FormatError
from lowtide.formats import chainer, csvfile, dataflow, megengine, native, tensorflow
from lowtide.formats.registry import FORMATS, read_file, write_file
from lowtide.graph import Graph, Op, Phase, Role, Tensor
from tests.conftest import document_path

READABLE = [name for name, one in FORMATS.items() if one.read and one.write and name != "dataflow"]


@pytest.mark.parametrize(
    ("number", "name"), list(itertools.product(["000", "001", "002", "003", "004"], READABLE))
)
def test_every_pair_is_readable_or_refused(number, name, tmp_path):
    step = read_file(document_path(number)).step
    out = tmp_path / "out"
    try:
        write_file(step, name, out)
    except ConvertError as error:
        assert str(error)
        assert not out.exists()
    else:
        assert read_file(out).format.name == name


X, Y = Tensor("x", 100, Role.INPUT), Tensor("y", 100)


def test_a_view_without_an_address_is_said_to_be_lost():
    view = Tensor("v", 100, alias=1)
    graph = Graph(
        (X, Y, view), (Op("a", "k", inputs=(0,), outputs=(1,)), Op("b", "view", inputs=(1,), outputs=(2,)))
    )
    assert any("1 views" in loss for loss in megengine.write(Step(graph)).losses)


def test_an_input_that_nobody_reads_stays_one():
    graph = Graph((X, Y), (Op("a", "k", outputs=(1,)),))
    back = megengine.read(megengine.write(Step(graph)).data)
    assert back.graph.tensors[0].role is Role.INPUT
    assert back.lifetimes().peak_bytes == Step(graph).lifetimes().peak_bytes == 200


def test_what_a_chainer_graph_changes_is_said():
    gradients = (
        Tensor("g", 100, Role.GRADIENT, gradient_of=0),
        Tensor("h", 100, Role.GRADIENT, gradient_of=0),
    )
    ops = (
        Op("f", "k", inputs=(0, 0), outputs=(1,), shape_only=(1,)),
        Op("b", "k", Phase.BACKWARD, inputs=(1,), outputs=(2, 3)),
    )
    losses = chainer.write(Step(Graph((X, Y, *gradients), ops))).losses
    assert any("asked for their shape" in loss for loss in losses)
    assert any("written as one" in loss for loss in losses)


def test_a_gradient_of_a_gradient_is_refused():
    tensors = (X, Tensor("g", 4, Role.GRADIENT, gradient_of=0), Tensor("h", 4, Role.GRADIENT, gradient_of=1))
    graph = Graph(tensors, (Op("b", "k", Phase.BACKWARD, outputs=(1, 2)),))
    with pytest.raises(ConvertError, match="'h' the first, are the gradient of no variable"):
        chainer.write(Step(graph))


def test_names_roles_and_phases_are_said_to_be_lost(documents):
    step = chainer.read(documents["000"])
    for module in (tensorflow, csvfile):
        losses = " ".join(module.write(step).losses)
        assert "phases" in losses
        assert "roles" in losses
    assert "names" in " ".join(csvfile.write(megengine.read(documents["001"])).losses)


def test_operators_of_one_name_get_names_of_their_own():
    graph = Graph(
        (X, Y), (Op("1", "k", outputs=(1,), name="n"), Op("2", "k", inputs=(1,), name="n", after=(0,)))
    )
    back = tensorflow.read(tensorflow.write(Step(graph)).data)
    assert [op.id for op in back.graph.ops] == ["n", "n#2"]
    assert back.graph.ops[1].after == (0,)


def test_a_file_that_claims_a_format_it_does_not_have_is_converted_without_it():
    graph = Graph((X, Y), (Op("a", "k", outputs=(1,)),))
    for name in ("csv", "chainer", "megengine", "tensorflow"):
        for target in (csvfile, chainer, megengine, tensorflow):
            target.write(Step(graph, format=name))


def test_a_byte_order_mark_is_refused_but_in_a_table(documents):
    for number, module in (("000", chainer), ("003", tensorflow), ("001", megengine)):
        with pytest.raises(FormatError, match="byte order mark"):
            module.read(b"\xef\xbb\xbf" + documents[number])
    assert csvfile.read(b"\xef\xbb\xbfid,lower,upper,size\na,0,1,4\n").graph.tensors[0].id == "a"


def test_a_picture_that_breaks_off_is_refused(documents):
    lines = documents["002"].split(b"\n")
    accepted = []
    for count in range(1, len(lines) - 8):
        try:
            accepted.append((count, dataflow.read(b"\n".join(lines[:count]))))
        except FormatError:
            continue
    # what is left is whole: the last update has its name and dimensions, only its box may be missing
    assert all(step.graph.ops[-1].phase is Phase.UPDATE for _, step in accepted)
    assert all(sum(op.phase is Phase.UPDATE for op in step.graph.ops) == 7 for _, step in accepted)


def test_deeply_nested_attributes_are_refused_by_writers(tmp_path):
    deep = leaf = {}
    for _ in range(100_000):
        leaf["a"] = {}
        leaf = leaf["a"]
    graph = Graph((Tensor("x", 4, Role.INPUT, attributes=deep),), ())
    with pytest.raises(ConvertError, match="nested"):
        write_file(Step(graph), "dot", tmp_path / "x")


def test_many_functions_of_one_rank_are_numbered_in_linear_time():
    count = 20_000
    variables = "".join(f"{k} 4 _\n" for k in range(count))
    record = 'forward\n0 1\n{}\nReLU\n{{"rank": 0}}\n'
    text = f"{count} {count}\n{variables}" + "".join(record.format(k) for k in range(count))
    assert len({op.id for op in chainer.read(text.encode()).graph.ops}) == count


def test_native_files_hold_what_others_lose(documents):
    step = megengine.read(documents["001"])
    assert native.write(step).losses == ()
