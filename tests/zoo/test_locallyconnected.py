"""Untied filters against loops, and the network against the boxes of the picture."""

import itertools
import re

import pytest
import torch

from lowtide import zoo
from lowtide.zoo.locallyconnected import untied
from tests.zoo.record import Recorder


def brute(x, weight):
    count, _, _, _ = x.shape
    outputs, _, _, _, rows, columns, height, width = weight.shape
    out = torch.zeros(count, outputs, height, width, dtype=x.dtype)
    for n, o, row, column in itertools.product(*map(range, out.shape)):
        patch = x[n, :, row : row + rows, column : column + columns]
        out[n, o, row, column] = (patch * weight[o, 0, 0, :, :, :, row, column]).sum()
    return out


@pytest.mark.parametrize(
    ("count", "inputs", "outputs", "kernel", "left"),
    [(2, 3, 4, (3, 2), (4, 5)), (1, 1, 2, (1, 1), (3, 3)), (3, 2, 1, (4, 4), (1, 1))],
)
def test_the_untied_filter_is_the_sum_over_its_own_kernel(count, inputs, outputs, kernel, left):
    generator = torch.Generator().manual_seed(0)
    sides = [k + n - 1 for k, n in zip(kernel, left, strict=True)]
    x = torch.randn(count, inputs, *sides, generator=generator, dtype=torch.float64, requires_grad=True)
    shape = (outputs, 1, 1, inputs, *kernel, *left)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    out = untied(x, weight)
    expected = brute(x, weight)
    torch.testing.assert_close(out, expected)
    direction = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad((out * direction).sum(), (x, weight))
    theirs = torch.autograd.grad((expected * direction).sum(), (x, weight))
    torch.testing.assert_close(ours, theirs)


def test_one_kernel_for_all_positions_is_a_convolution():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 8, 9, generator=generator)
    kernel = torch.randn(4, 3, 3, 3, generator=generator)
    weight = kernel[:, None, None, :, :, :, None, None].expand(4, 1, 1, 3, 3, 3, 6, 7)
    torch.testing.assert_close(untied(x, weight), torch.nn.functional.conv2d(x, kernel), rtol=1e-4, atol=1e-5)


def test_parameters_and_data_have_the_boxes_of_the_seed(documents):
    text = documents["002"].decode()
    boxes = {
        tuple(map(int, re.findall(r"\d+", box))) for box in re.findall(r"\), array\(\[([\d, ]+)\]", text)
    }
    boxes |= {box for box in [(1,)] if "array([1], dtype=int32)" in text}
    built = zoo.build("locallyconnected", device="meta")
    shapes = {name: tuple(parameter.shape) for name, parameter in built.model.named_parameters()}
    assert shapes == {
        "L0.W": (64, 1, 1, 1, 9, 9, 33, 33),
        "L0.a": (1,),
        "L0.b": (1, 64, 33, 33),
        "L1.W": (64, 1, 1, 64, 7, 7, 27, 27),
        "L1.a": (1,),
        "L1.b": (1, 64, 27, 27),
        "classifier.weights1": (3034, 64, 27, 27),
    }
    assert set(shapes.values()) <= boxes
    assert [tuple(part.shape) for part in built.batch] == [(256, 1, 41, 41), (256, 1, 1, 1)]
    assert {(256, 1, 41, 41), (256, 1, 1, 1)} <= boxes


def test_activations_have_the_boxes_of_the_seed():
    built = zoo.build("locallyconnected", device="meta")
    shapes = {}
    for name, module in built.model.named_children():
        module.register_forward_hook(lambda m, i, out, name=name: shapes.__setitem__(name, tuple(out.shape)))
    built.step()
    assert shapes == {"L0": (256, 64, 33, 33), "L1": (256, 64, 27, 27), "classifier": (256, 3034)}


def test_the_evaluation_says_how_good_the_scores_are():
    built = zoo.build("locallyconnected:batch=40,size=17,channels=3,classes=8")
    data, labels = built.batch
    assert labels.dtype == torch.int32
    loss = built.step()
    with torch.no_grad():
        order = built.model(data).argsort(1, descending=True)
    hits = order == labels.reshape(-1, 1)
    expected = [40, hits[:, 0].sum().item(), hits[:, :5].sum().item(), 40 * loss.item()]
    evaluation = built.model.classifier.evaluation
    assert not evaluation.requires_grad
    torch.testing.assert_close(evaluation, torch.tensor(expected))
    assert 0 < expected[1] < expected[2] < 40
    torch.testing.assert_close(built.model.accuracy(), hits[:, 0].float().mean())


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_scores_that_are_all_alike_hit_nothing(value):
    built = zoo.build("locallyconnected:batch=6,size=15,channels=1,classes=8")
    with torch.no_grad():
        built.model.classifier.weights1.fill_(value)
    built.step()
    assert built.model.classifier.evaluation[:3].tolist() == [6, 0, 0]


def test_no_copy_is_larger_than_what_goes_in_and_out():
    x = torch.empty(256, 64, 33, 33, device="meta")
    weight = torch.empty(64, 1, 1, 64, 7, 7, 27, 27, device="meta")
    with Recorder() as recorder:
        untied(x, weight)
    fresh = [
        c.bytes for c in recorder.calls if c.kind in ("baddbmm", "clone", "bmm", "new_zeros", "_unsafe_view")
    ]
    assert max(fresh) <= x.numel() * 4
