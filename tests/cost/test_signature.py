"""Operators share figures exactly when they do the same work on the same sort of data."""

import subprocess
import sys

import msgspec
import pytest
import torch

from lowtide.cost import Step
from lowtide.cost.signature import signature
from lowtide.formats import native
from lowtide.graph import Graph, Op, Role, Tensor
from tests.cost.steps import Captured, parameter


def graph(shape=(4, 6), dtype="float32", device="cpu", strides=(6, 1), arguments=({"input": 0}, 2), **op):
    tensors = (
        Tensor("x", 96, Role.INPUT, shape=shape, dtype=dtype, device=device),
        Tensor("y", 96, shape=shape, dtype=dtype, device=device),
    )
    called = {"overload": "default", "arguments": tuple(arguments), "strides": (tuple(strides),)}
    fields = {"id": "pow", "kind": "aten.pow", "inputs": (0,), "outputs": (1,), "device": device} | op
    return Graph(tensors, (Op(**fields, **called),))


PLAIN = signature(graph(), 0)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (6, 4)},
        {"dtype": "float64"},
        {"device": "cuda:0"},
        {"strides": (1, 4)},
        {"arguments": ({"input": 0}, 3)},
        {"arguments": ({"input": 0}, 2, {"input": 0})},
        {"kind": "aten.mul"},
    ],
    ids=str,
)
def test_what_decides_the_work_is_in_the_signature(change):
    assert signature(graph(**change), 0) != PLAIN


def test_names_phases_and_the_number_of_the_device_are_not():
    assert signature(graph(id="other", name="layer.pow", phase="backward"), 0) == PLAIN
    assert signature(graph(device="cuda:0"), 0) == signature(graph(device="cuda:1"), 0)


def test_a_device_among_the_arguments_loses_its_number_too():
    one, other = (graph(device=name, arguments=([name],)) for name in ("cuda:0", "cuda:3"))
    assert signature(one, 0) == signature(other, 0)


def test_it_is_the_same_in_another_process():
    code = (
        "import sys; from lowtide.cost.signature import signature; from lowtide.formats import native; "
        "sys.stdout.write(signature(native.read(sys.stdin.buffer.read()).graph, 0))"
    )
    data = native.write(Step(graph())).data
    other = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert other.stdout.decode() == PLAIN
    assert PLAIN.startswith("aten.pow/")


def test_a_captured_operator_carries_all_that_its_signature_needs():
    weight = parameter(5, 4)
    captured = Captured(
        lambda x, w: torch.nn.functional.linear(x, w).softmax(1).sum(), torch.randn(3, 4), weight
    )
    op = captured.graph.ops[captured.op("_softmax")]
    assert op.overload == "default"
    assert op.arguments == ({"input": 0}, 1, False)
    assert op.strides == ((5, 1),)
    again = native.read(native.write(Step(captured.graph, "capture")).data).graph
    assert again == captured.graph
    everything = range(len(captured.graph.ops))
    assert [signature(again, k) for k in everything] == [signature(captured.graph, k) for k in everything]


def test_layers_of_one_size_share_a_signature_and_others_do_not():
    def loss(x, a, b, c):
        return ((x @ a) @ b @ c).sum()

    captured = Captured(loss, torch.randn(8, 8), parameter(8, 8), parameter(8, 8), parameter(8, 5))
    names = [signature(captured.graph, captured.op("mm", k)) for k in range(3)]
    assert names[0] == names[1] != names[2]


def test_numbers_that_json_does_not_have_are_spelt_out():
    captured = Captured(
        lambda x, w: (x * w).masked_fill(x > 0, float("-inf")).exp().sum(), torch.randn(4), parameter(4)
    )
    text = msgspec.json.encode([op.arguments for op in captured.graph.ops]).decode()
    assert '"-inf"' in text


def test_channels_last_is_another_operator():
    def loss(x, w):
        return torch.nn.functional.conv2d(x, w).sum()

    x, w = torch.randn(2, 3, 8, 8), parameter(4, 3, 3, 3)
    plain, last = Captured(loss, x, w), Captured(loss, x.to(memory_format=torch.channels_last), w)
    names = [signature(one.graph, one.op("convolution")) for one in (plain, last)]
    assert names[0] != names[1]
