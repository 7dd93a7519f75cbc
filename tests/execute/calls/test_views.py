"""Views made at once are those that their operators make."""

import pytest
import torch
from torch import nn

from lowtide.execute.backend import PROGRAMS, compile_with
from lowtide.execute.calls.views import Views


def rearranged(x):
    """Views of many kinds, each read once."""
    first, second = x.view(4, 6).t().split(3)
    more = [first.unsqueeze(0).expand(2, 3, 4), second[1:, 2].squeeze(), x.permute(2, 0, 1).diagonal()]
    return sum(one.sin().sum() for one in [*more, *x.unbind(1)[:1]])


@pytest.fixture
def captured():
    torch._dynamo.reset()
    made = []

    def backend(module, inputs):
        return compile_with(module, inputs, PROGRAMS["plain"], watch=made.append)

    x = nn.Parameter(torch.randn(2, 3, 4))
    torch.compile(rearranged, backend=backend, fullgraph=True)(x)
    yield made[-1].joint, x.detach()
    torch._dynamo.reset()


def test_each_view_is_that_of_the_operators(captured):
    joint, x = captured
    views, source = Views(joint), joint.inputs[0]
    tensors = [t for t in range(len(joint.values)) if t != source and views.owner(t) == source]
    assert len({joint.graph.ops[op].kind for op in views.operators}) >= 6
    larger = torch.randn(3, 3, 4)
    for given in (x, larger[1:], x.permute(1, 0, 2).contiguous().permute(1, 0, 2)):
        for tensor in tensors:
            try:
                expected = views.by_operators(tensor, source)(given)
            except RuntimeError:  # there is no such view of a tensor with these strides
                with pytest.raises(RuntimeError):
                    views.at_once(tensor, source)(given)
                continue
            made = views.at_once(tensor, source)(given)
            assert torch.equal(made, expected)
            assert (made.stride(), made.storage_offset()) == (expected.stride(), expected.storage_offset())
            assert made.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
