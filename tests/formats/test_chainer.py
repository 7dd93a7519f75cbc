import json
import re

import pytest

from lowtide.cost import Step
from lowtide.errors import ConvertError, FormatError
from lowtide.formats import chainer, megengine, native
from lowtide.graph import Graph, Op, Phase, Role, Tensor

SMALL = b"""4 4
0 40 0
1 8 /l/W
2 400 _
3 4 _
forward
2 1
0 _
1 _
2
Convolution2DFunction
{"_input_indexes_to_retain": [0, 1], "rank": 0}
forward
1 1
2 _
3
ReLU
{"_input_indexes_to_retain": null, "rank": 1}
backward
2 1
3 gradient
3 output
2
ReLU
{"_input_indexes_to_retain": null, "rank": 1}
backward
3 2
2 gradient
0 input
1 input
0
1
Convolution2DFunction
{"_input_indexes_to_retain": [1], "rank": 0}
"""


def test_the_document_comes_back_byte_for_byte(documents):
    step = chainer.read(documents["000"])
    assert chainer.write(step).data == documents["000"]
    assert chainer.write(step).losses == ()


def test_it_is_rebuilt_from_the_graph_through_our_own_file(documents):
    step = native.read(native.write(chainer.read(documents["000"])).data)
    assert chainer.write(step).data == documents["000"]


def test_what_is_written_follows_the_graph(documents):
    step = chainer.read(documents["000"])
    tensors = list(step.graph.tensors)
    tensors[0] = Tensor(tensors[0].id, 12345, tensors[0].role)
    changed = Step(Graph(tuple(tensors), step.graph.ops, attributes=step.graph.attributes), "chainer")
    assert b"\n0 12345 _\n" in chainer.write(changed).data


def test_roles_ranks_and_retained_sets_are_read():
    step = chainer.read(SMALL)
    graph = step.graph
    assert [op.id for op in graph.ops] == [
        "Convolution2DFunction.0", "ReLU.1", "ReLU.1.backward", "Convolution2DFunction.0.backward",
    ]  # fmt: skip
    assert [t.role for t in graph.tensors[:4]] == [
        Role.INPUT,
        Role.PARAMETER,
        Role.ACTIVATION,
        Role.ACTIVATION,
    ]
    relu, conv = graph.ops[2:]
    assert conv.phase is Phase.BACKWARD
    assert conv.input_ports == ("gradient", "input", "input")
    assert conv.shape_only == (1,)
    assert [graph.tensors[t].id for t in conv.reads] == ["2.grad", "1"]
    assert [graph.tensors[t].id for t in relu.inputs] == ["3.grad", "3"]
    assert [graph.tensors[t].gradient_of for t in conv.outputs] == [0, 1]


def test_a_gradient_with_two_producers_is_added_to_in_place(documents):
    graph = chainer.read(documents["000"]).graph
    twice = [op for op in graph.ops if "accumulate" in op.input_ports]
    assert {graph.tensors[op.inputs[op.input_ports.index("accumulate")]].id for op in twice} == {
        "25.grad", "49.grad", "71.grad", "88.grad",
    }  # fmt: skip


def test_peaks_of_a_small_graph_counted_by_hand():
    step = chainer.read(SMALL)
    # leaves 48; conv: +400; relu: +400+4; relu backward: 4 + grad 4 + grad 400; conv backward: grad 400 + leaf grads 48
    assert step.lifetimes().live_bytes == (448, 452, 456, 496)
    assert step.lifetimes().bytes_between(1) == 52


def numbered_lines(text):
    return text.decode().split("\n")


BROKEN = {
    "negative size": (b"0 40 0", b"0 -40 0", 2, "not negative"),
    "size out of this world": (b"0 40 0", b"0 9999999999999999999 0", 2, "2^60"),
    "endless number": (b"0 40 0", b"0 " + b"4" * 5000 + b" 0", 2, "whole number"),
    "duplicate id": (b"1 8 /l/W", b"0 8 /l/W", 3, "not used before"),
    "dangling id": (b"2 _\n3\nReLU", b"9 _\n3\nReLU", 15, "listed above"),
    "absurd count of variables": (b"4 4\n", b"999999999999 4\n", 1, "as many lines"),
    "absurd count of inputs": (b"2 1\n0 _", b"99999999999999 1\n0 _", 7, "no more than"),
    "wrong count of functions": (b"4 4\n", b"4 5\n", 34, "5, as line 1 says"),
    "unknown role": (b"3 output", b"3 outward", 22, "gradient, input, output"),
    "unknown name": (b"1 8 /l/W", b"1 8 W", 3, "parameter"),
    "a cycle": (b'"rank": 1}\nbackward\n2 1', b'"rank": -1}\nbackward\n2 1', 13, "earlier rank"),
    "no rank": (b'{"_input_indexes_to_retain": [1], "rank": 0}', b"{}", 34, '"rank"'),
    "attributes that are no object": (b'{"_input_indexes_to_retain": [1], "rank": 0}', b"[1]", 34, "object"),
    "broken attributes": (b'{"_input_indexes_to_retain": [1], "rank": 0}', b'{"rank": ', 34, "JSON"),
    "a key twice": (b'{"_input_indexes_to_retain": [1], "rank": 0}', b'{"rank": 0, "rank": 1}', 34, "JSON"),
    "not text": (b"0 40 0", b"0 40 \xff", None, "UTF-8"),
    "a leaf written": (b"1 _\n2\nConv", b"1 _\n1\nConv", 6, "written once"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_say_where_and_what_was_expected(name):
    before, after, line, expected = BROKEN[name]
    assert SMALL.count(before) >= 1
    with pytest.raises(FormatError) as caught:
        chainer.read(SMALL.replace(before, after, 1))
    assert caught.value.line == line
    assert (caught.value.byte is not None) == (line is None)
    assert expected in str(caught.value)


def test_every_truncation_is_noticed():
    lines = SMALL.split(b"\n")[:-1]
    for count in range(len(lines)):
        with pytest.raises(FormatError):
            chainer.read(b"\n".join(lines[:count]))


def test_a_profile_becomes_a_chainer_graph_with_the_same_peak(documents):
    profile = megengine.read(documents["001"])
    written = chainer.write(profile)
    assert chainer.read(written.data).lifetimes().peak_bytes == profile.lifetimes().peak_bytes
    assert "286 addresses" in written.losses
    assert any("leaves" in loss for loss in written.losses)


def test_backward_values_that_are_no_gradients_cannot_be_held():
    tensors = (Tensor("x", 4, Role.INPUT), Tensor("t", 4))
    ops = (Op("b", "k", Phase.BACKWARD, inputs=(0,), outputs=(1,)),)
    with pytest.raises(ConvertError, match="gradient of no variable"):
        chainer.write(Step(Graph(tensors, ops)))


def test_attributes_come_back_as_json(documents):
    step = chainer.read(documents["000"])
    listed = re.findall(rb"^\{.*\}$", documents["000"], re.M)
    assert sorted(json.dumps(op.attributes).encode() for op in step.graph.ops) == sorted(listed)
