"""What is computed from symbolic sizes is computed once, and what is asked about them is noted as always."""

import pytest
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lowtide.trace.eager.layouts import learned
from lowtide.trace.shapes.concrete import NotConcrete, SymbolicInputs
from lowtide.trace.shapes.size_arithmetic import computed_once


def sizes(rows=8, columns=6):
    inputs = SymbolicInputs(learned().mode(symbolic=True), [torch.empty(rows, columns)], [frozenset({0, 1})])
    return inputs, *inputs.fakes[0].shape


@pytest.fixture
def products(monkeypatch):
    """How many products were computed."""
    counted, inner = [], SymNode.mul
    monkeypatch.setattr(SymNode, "mul", lambda self, other: counted.append(1) or inner(self, other))
    return counted


def test_a_product_is_computed_once(products):
    _, a, b = sizes()
    products.clear()
    with computed_once():
        found = [a * b + 1, a * b + 1, (a * b) * (a * b)]
    assert len(products) == 2
    assert [str(one) for one in found] == [str(a * b + 1)] * 2 + [str(a * b * a * b)]
    assert [one.node.hint for one in found] == [49, 49, 48 * 48]


def test_methods_are_put_back():
    before = dict(vars(SymNode))

    def fails():
        with computed_once():
            assert SymNode.add is not before["add"]
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert dict(vars(SymNode)) == before


def test_numbers_of_two_environments_and_kinds_are_kept_apart():
    _, a, _ = sizes()
    _, other, _ = sizes(rows=5)
    with computed_once():
        assert [(a * 2).node.hint, (other * 2).node.hint] == [16, 10]
        assert [type(a * 2), type(a * 2.0), type(a == 2)] == [torch.SymInt, torch.SymFloat, torch.SymBool]
        assert (a * 1).node.shape_env is not (other * 1).node.shape_env


def test_a_question_is_noted_also_where_it_was_asked_in_silence_before():
    inputs, a, _ = sizes()
    environment: ShapeEnv = a.node.shape_env
    with computed_once():
        with environment.suppress_guards():
            assert a % 4 == 0
        assert list(inputs.sizes([torch.empty(7, 6)]).values()) == [7, 6]
        assert a % 4 == 0
    with pytest.raises(NotConcrete):
        inputs.sizes([torch.empty(7, 6)])
