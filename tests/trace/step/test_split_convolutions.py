import operator

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

from lowtide.cost import split
from lowtide.trace.step.split_convolutions import split_convolutions

aten = torch.ops.aten
CONVOLUTIONS = {
    "plain": (nn.Conv2d(4, 6, 3), (2, 4, 9, 9)),
    "stride": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 10, 9)),
    "larger stride": (nn.Conv2d(4, 6, 3, stride=(3, 4), bias=False), (2, 4, 11, 14)),
    "dilation": (nn.Conv2d(4, 6, 3, padding=2, dilation=2), (2, 4, 9, 9)),
    "groups": (nn.Conv2d(4, 8, (3, 1), groups=2), (2, 4, 9, 9)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4, padding=1), (2, 4, 9, 9)),
    "one dimension": (nn.Conv1d(4, 6, 5, stride=2), (2, 4, 14)),
    "three dimensions": (nn.Conv3d(2, 4, 3, stride=2, padding=1), (2, 2, 6, 7, 6)),
    "transposed": (nn.ConvTranspose2d(4, 6, 2, stride=2), (2, 4, 5, 5)),
    "transposed, padded": (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), (2, 4, 5, 5)),
    "channels last": (nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), (2, 4, 9, 9)),
    "weight without gradient": (nn.Conv2d(4, 6, 3, bias=False).requires_grad_(False), (2, 4, 9, 9)),
}


def step(module, x, function):
    module.zero_grad()
    x = x.clone().requires_grad_()
    loss = function(x).square().sum()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in module.parameters() if p.requires_grad)]


def compiled(module, counts, targets):
    def partition(joint, inputs, **keywords):
        counts.append(split_convolutions(joint))
        joint.graph.lint()
        nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
        targets.extend(node.target for node in nodes if "convolution" in str(node.target))
        for node in joint.graph.find_nodes(op="call_function", target=operator.getitem):
            assert node.meta["val"].shape == node.args[0].meta["val"][node.args[1]].shape
        joint.recompile()
        return default_partition(joint, inputs, **keywords)

    made = aot_autograd(fw_compiler=lambda one, _: make_boxed_func(one.forward), partition_fn=partition)
    torch._dynamo.reset()
    return torch.compile(module, backend=made)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_two_calls_do_what_one_does(name, monkeypatch):
    """On every machine; bit for bit where both are found to be the same, which is where they are used."""
    same = []

    def always(arguments):
        same.append(split.same_when_split(arguments))
        return True

    monkeypatch.setattr("lowtide.trace.step.split_convolutions.same_when_split", always)
    module, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    if name == "channels last":
        x = x.to(memory_format=torch.channels_last)
    counts, targets = [], []
    expected = step(module, x, module)
    got = step(module, x, compiled(module, counts, targets))
    torch.testing.assert_close(got, expected)
    parameters = [aten.convolution_backward.default] * any(p.requires_grad for p in module.parameters())
    assert counts == [1]
    assert targets == [aten.convolution.default, *parameters, aten.convolution.default]
    if same == [True]:
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert [a.stride() for a in got] == [b.stride() for b in expected]


def test_a_convolution_of_other_bits_stays_whole(monkeypatch):
    monkeypatch.setattr(split, "_SAME", {})
    monkeypatch.setattr(split, "equal", lambda one, other: False)
    module, shape = CONVOLUTIONS["plain"]
    counts, targets = [], []
    step(module, torch.randn(shape), compiled(module, counts, targets))
    assert counts == [0]
    assert targets == [aten.convolution.default, aten.convolution_backward.default]


def test_a_convolution_is_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(split, "_SAME", {})
    monkeypatch.setattr(split, "_same", lambda arguments: tried.append(arguments) or True)
    calls = [torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1), [1]]
    calls += [[1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]]
    assert split.same_when_split(calls)
    assert split.same_when_split(calls)
    assert len(tried) == 1


def test_a_convolution_that_cannot_be_tried_stays_whole(monkeypatch):
    def fails(arguments):
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(split, "_SAME", {})
    monkeypatch.setattr(split, "_same", fails)
    assert not split.same_when_split([torch.ones(1, 1, 3, 3), [True, True, True]])
