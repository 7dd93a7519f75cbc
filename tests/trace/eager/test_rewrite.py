import operator

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

from lowtide.trace.eager.rewrite import rewrite_batch_norm


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=0.3)

    def forward(self, x):
        return self.second(self.first(x).relu() + x).square().mean()


def step(module, compiled):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    loss = compiled(x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in module.parameters()), *module.buffers()]


def test_the_other_form_of_batch_norm_gives_the_same_bits():
    counts = []

    def partition(joint, inputs, **keywords):
        counts.append(rewrite_batch_norm(joint, lambda value: True))
        joint.graph.lint()
        targets = {node.target for node in joint.graph.nodes}
        assert torch.ops.aten._native_batch_norm_legit_functional.default not in targets
        assert torch.ops.aten.native_batch_norm_backward.default not in targets
        for node in joint.graph.find_nodes(op="call_function", target=operator.getitem):
            assert node.meta["val"].shape == node.args[0].meta["val"][node.args[1]].shape
        joint.recompile()
        return default_partition(joint, inputs, **keywords)

    compiler = aot_autograd(
        fw_compiler=lambda module, _: make_boxed_func(module.forward), partition_fn=partition
    )
    eager, ours = Norms(), Norms()
    ours.load_state_dict(eager.state_dict())
    expected = step(eager, eager)
    torch._dynamo.reset()
    got = step(ours, torch.compile(ours, backend=compiler))
    assert counts == [2]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
