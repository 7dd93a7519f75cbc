"""The U-Net as captured is the one that Chainer wrote down: parameters, and what every layer reads and writes."""

from pathlib import Path

import pytest
import torch

import lowtide
from lowtide import zoo
from lowtide.graph import Phase, Role
from tests.conftest import document_path
from tests.scripts import printed_by

ROOT = Path(__file__).parents[3]
SLICED = 1
TRANSPOSED = 6
"""Places of an argument: the dimension of a slice, whether a convolution is transposed."""


@pytest.fixture(scope="module")
def seed():
    return lowtide.read(document_path("000")).step.graph


@pytest.fixture(scope="module")
def captured():
    torch._dynamo.reset()
    built = zoo.build("unet")
    return lowtide.capture(built.loss, built.model, *built.batch).step.graph


def forward(graph, kind, **wanted):
    ops = [op for op in graph.ops if op.phase is Phase.FORWARD and op.kind == kind]
    return [op for op in ops if all(op.arguments[int(k[1:])] == v for k, v in wanted.items())]


def sizes(graph, tensors):
    return [graph.tensors[t].bytes for t in tensors]


def leaves(graph, role):
    """Bytes of what forward reads of this role, in the order in which it first does."""
    read = dict.fromkeys(t for op in graph.ops if op.phase is Phase.FORWARD for t in op.reads)
    return sizes(graph, [t for t in read if graph.tensors[t].role is role])


def test_parameters_and_inputs_are_the_same_in_the_order_of_their_use(seed, captured):
    ours = leaves(captured, Role.PARAMETER)
    assert ours == leaves(seed, Role.PARAMETER)
    assert (len(ours), sum(ours)) == (46, 124_401_416)
    assert len([t for t in captured.tensors if t.role is Role.PARAMETER]) == 46
    assert sorted(leaves(captured, Role.INPUT)) == sorted(leaves(seed, Role.INPUT)) == [4_817_408, 10_469_888]


@pytest.mark.parametrize(
    ("ours", "wanted", "theirs", "count"),
    [
        ("aten.convolution", {f"_{TRANSPOSED}": False}, "Convolution2DFunction", 19),
        ("aten.convolution", {f"_{TRANSPOSED}": True}, "Deconvolution2DFunction", 4),
        ("aten.relu", {}, "ReLU", 22),
        ("aten.max_pool2d_with_indices", {}, "MaxPooling2D", 4),
        ("aten.cat", {}, "Concat", 4),
    ],
)
def test_every_layer_reads_and_writes_the_bytes_of_the_seed(seed, captured, ours, wanted, theirs, count):
    pairs = list(zip(forward(captured, ours, **wanted), forward(seed, theirs), strict=True))
    assert len(pairs) == count
    for one, other in pairs:
        assert sizes(captured, one.inputs) == sizes(seed, other.inputs), one.id
        assert sizes(captured, one.outputs[:1]) == sizes(seed, other.outputs), one.id


def test_every_crop_takes_rows_and_columns_of_what_the_seed_crops(seed, captured):
    rows, columns = (forward(captured, "aten.slice", **{f"_{SLICED}": d}) for d in (2, 3))
    for first, second, other in zip(rows, columns, forward(seed, "GetItem"), strict=True):
        assert first.outputs == second.inputs
        assert sizes(captured, first.inputs) == sizes(seed, other.inputs)
        assert sizes(captured, second.outputs) == sizes(seed, other.outputs)
        assert all(captured.tensors[t].alias is not None for t in second.outputs)


def test_dropout_writes_what_the_seed_writes(seed, captured):
    for one, other in zip(forward(captured, "aten.mul"), forward(seed, "Dropout"), strict=True):
        assert sizes(captured, one.outputs) == sizes(seed, other.outputs)


def test_every_parameter_gets_its_gradient(captured):
    gradients = {t.gradient_of: t.bytes for t in captured.tensors if t.gradient_of is not None}
    parameters = {k: t.bytes for k, t in enumerate(captured.tensors) if t.role is Role.PARAMETER}
    assert gradients == parameters


def test_the_page_says_what_its_command_prints(tmp_path, monkeypatch, capsys):
    printed = printed_by("unet_against_chainer", tmp_path, monkeypatch, capsys)
    assert "DIFFERENT" not in printed
    assert (
        f"```console\n$ python examples/unet_against_chainer.py\n{printed}```"
        in (ROOT / "docs/capture.md").read_text()
    )
