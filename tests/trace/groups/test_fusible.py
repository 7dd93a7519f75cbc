"""Which nodes of a traced graph only name memory that is there."""

import torch
from torch import fx

from lowtide.trace.groups.fusible import is_part, is_view, tensors_read

aten = torch.ops.aten


def call(graph, target, *args):
    """A node with what it gives."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(one.meta["val"] if isinstance(one, fx.Node) else one for one in args))
    return node


def test_a_node_is_looked_at_again_where_it_changes():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"], y.meta["val"] = torch.randn(4), torch.randn(4)
    view = call(graph, aten.view.default, x, [2, 2])
    total = call(graph, aten.add.Tensor, view, 1)
    for _ in range(2):
        assert (is_view(view), is_view(total), is_part(view)) == (True, False, False)
    assert list(tensors_read(total)) == [x]
    view.args = (y, [2, 2])  # what it gives still lies where x does
    assert not is_view(view)
    view.meta["val"] = y.meta["val"].view(2, 2)
    assert is_view(view)
    view.target = aten.add_.Tensor  # it writes: nothing that does is a view
    assert not is_view(view)


def test_a_copy_of_a_node_is_looked_at_by_itself():
    graph, other = fx.Graph(), fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.randn(4)
    view = call(graph, aten.view.default, x, [2, 2])
    assert is_view(view)
    apart = other.placeholder("x")
    apart.meta["val"] = torch.randn(4)
    assert not is_view(other.node_copy(view, lambda _: apart))
