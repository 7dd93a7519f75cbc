"""What a recorder is shown: operators one by one, and those of a group as one."""

import torch
from torch import fx

from lowtide.execute.graphs import recorder
from lowtide.graph import Graph
from lowtide.trace.step.group import Group


class _Counted(recorder._Operators):
    def __init__(self):
        super().__init__("cpu")
        self.seen = []

    def operator(self, number, call):
        self.seen.append(number)
        return call()


def test_operators_of_a_group_are_one():
    body = fx.Graph()
    x = body.placeholder("x")
    body.output((body.call_function(torch.sin, (body.call_function(torch.cos, (x,)),)),))
    group = Group(fx.GraphModule({}, body), Graph(name="", ops=(), tensors=()))
    counted = _Counted()
    with counted.watching([group]):
        x = torch.ones(3)
        y = group(x)[0] + 1
    assert torch.equal(y, x.cos().sin() + 1)
    assert counted.seen == [1, 2, 3]
    assert group.measured is None
    group(x)
    assert counted.seen == [1, 2, 3]
