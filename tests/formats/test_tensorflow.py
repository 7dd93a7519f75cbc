import pytest

from lowtide.errors import FormatError
from lowtide.formats import chainer, megengine, native, tensorflow
from lowtide.graph import Category, Phase, Role

SMALL = b"""conv/Conv2D, (2x3x8x8), (3x3x3x4), (2x4x6x6), GPU, 12.5
conv/Conv2D:Conv2D, (no input), (no output), GPU, 11
conv/weights, (1), (3x3x3x4), GPU, 0
conv/weights/read, (3x3x3x4), (3x3x3x4), GPU, 0
edge_7_gradients/conv/Conv2DBackpropFilter:MEMCPYDtoH, (no input), (output 432 bytes), GPU, 0
gradients/conv/Conv2DBackpropFilter, ^conv/Conv2D, (2x3x8x8), (int32 4x1), (2x4x6x6), (3x3x3x4), GPU, 0
_retval_gradients/conv/Conv2DBackpropFilter_0_0, (3x3x3x4), (no output), CPU, 0
"""


@pytest.fixture(scope="module")
def step(documents):
    return tensorflow.read(documents["003"])


def test_the_document_comes_back_byte_for_byte(documents, step):
    assert tensorflow.write(step).data == documents["003"]
    assert tensorflow.write(step).losses == ()


def test_it_is_rebuilt_from_the_graph_through_our_own_file(documents, step):
    assert tensorflow.write(native.read(native.write(step).data)).data == documents["003"]


def test_lines_in_another_order_come_back_in_that_order():
    lines = SMALL.splitlines(keepends=True)
    shuffled = b"".join([lines[1], *reversed(lines[2:]), lines[0]])
    assert tensorflow.write(tensorflow.read(shuffled)).data == shuffled
    assert tensorflow.write(tensorflow.read(SMALL)).data == SMALL


def test_nodes_kernels_copies_and_control_inputs():
    graph = tensorflow.read(SMALL).graph
    ops = {op.id: op for op in graph.ops}
    conv = ops["conv/Conv2D"]
    assert (conv.kind, conv.phase, conv.device) == ("Conv2D", Phase.FORWARD, "GPU")
    assert [k.name for k in conv.kernels] == ["Conv2D"]
    copy = ops["edge_7_gradients/conv/Conv2DBackpropFilter:MEMCPYDtoH"]
    assert copy.category is Category.COPY
    gradient = ops["gradients/conv/Conv2DBackpropFilter"]
    assert [graph.ops[k].id for k in gradient.after] == ["conv/Conv2D"]
    assert [graph.tensors[t].id for t in copy.inputs] == [gradient.id]
    assert ops["_retval_gradients/conv/Conv2DBackpropFilter_0_0"].inputs == gradient.outputs


def test_roles_and_types():
    tensors = {t.id: t for t in tensorflow.read(SMALL).graph.tensors}
    assert tensors["conv/weights"].role is Role.PARAMETER
    assert tensors["conv/weights"].bytes == 4 * 3 * 3 * 3 * 4
    assert tensors["conv/weights/read"].alias is not None
    assert tensors["gradients/conv/Conv2DBackpropFilter"].role is Role.GRADIENT


def test_times_are_microseconds_and_convolutions_have_flop():
    step = tensorflow.read(SMALL)
    cost = dict(zip((op.id for op in step.graph.ops), step.costs, strict=True))["conv/Conv2D"]
    assert cost.seconds.value == pytest.approx(12.5e-6)
    assert cost.flop.value == 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
    assert cost.flop.origin.value == "estimated"


BROKEN = {
    "a name twice": (b"conv/weights/read,", b"conv/weights,", 4, "one line a name"),
    "a kernel of nobody": (b"conv/Conv2D:Conv2D", b"conv/Nobody:Conv2D", 2, "a line for the node"),
    "a copy of nobody": (b"edge_7_gradients/conv", b"edge_7_gradients/cnv", 5, "a line for the node"),
    "a control input of nobody": (b"^conv/Conv2D", b"^conv/Nobody", 6, "another line"),
    "a shape that is none": (b"(2x4x6x6), GPU, 12.5", b"(2x4y6x6), GPU, 12.5", 1, "a shape such as"),
    "an unknown type": (b"int32 4x1", b"quaternion 4x1", 6, "one of float32"),
    "an absurd shape": (b"(2x3x8x8), (3x3", b"(2x3x8x8x9999999999999999999x99), (3x3", 1, "2^60"),
    "a negative time": (b"12.5", b"-12.5", 1, "not negative"),
    "no time": (b", 12.5", b", soon", 1, "a decimal number"),
    "too few fields": (b"conv/weights, (1), (3x3x3x4), GPU, 0", b"conv/weights", 3, "`name,"),
    "no output": (b"(1), (3x3x3x4), GPU", b"^conv/Conv2D, GPU", 3, "`(shape)`"),
    "a node without inputs": (b"conv/weights, (1), (3", b"conv/weights, (3", 3, "`(1)`"),
    "a kernel with a shape": (
        b"(no input), (no output), GPU, 11",
        b"(no input), (2x2), GPU, 11",
        2,
        "node:Kernel",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_lists_say_where_and_what_was_expected(name):
    before, after, line, expected = BROKEN[name]
    assert before in SMALL
    with pytest.raises(FormatError) as caught:
        tensorflow.read(SMALL.replace(before, after, 1))
    assert caught.value.line == line
    assert expected in str(caught.value)


def test_an_empty_list_is_refused():
    with pytest.raises(FormatError, match="empty"):
        tensorflow.read(b"")


@pytest.mark.parametrize(("number", "module"), [("000", chainer), ("001", megengine)])
def test_other_steps_become_lists_that_are_read_again(documents, number, module):
    step = module.read(documents[number])
    written = tensorflow.write(step)
    back = tensorflow.read(written.data)
    assert len(back.graph.ops) == len(step.graph.ops)
    assert any("which tensor each one reads" in loss for loss in written.losses)
