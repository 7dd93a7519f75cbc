import pytest
import torch

from lowtide.graph import Rect
from lowtide.graph.access import Same, Whole
from lowtide.graph.access.pointwise import POINTWISE
from tests.graph.access.probe import Probe, aten, check, integers, tensor

OVERLOADS = ("default", "Tensor", "self", "Scalar", "Tensor_Tensor", "Tensor_Scalar", "ScalarOpt_dim")
PLAIN = {"float": 0.25, "number": 0.25, "int": 1, "bool": False, "ScalarType": torch.float32}
WHOLE_NUMBERS = "bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor"
LEVEL = """_prelu_kernel _prelu_kernel_backward angle clamp clamp_max elu_backward floor_divide fmin hardshrink_backward
hardtanh_backward heaviside leaky_relu_backward log_sigmoid_backward masked_fill minimum nextafter sgn sign
softshrink_backward threshold_backward tril triu where"""
"""Kinds that are level where the probe puts a value: what they read is proved, that it matters is not."""

FORMS = {
    "clamp": (aten.clamp.default, [tensor(3, 4), -0.1, 0.6]),
    "masked_fill": (aten.masked_fill.Scalar, [tensor(3, 4), tensor(3, 4, seed=2) > 0, 0.5]),
    "where": (aten.where.self, [tensor(3, 4, seed=2) > 0, tensor(3, 4), tensor(3, 4, seed=3)]),
}


def call(kind):
    """The first form of an operator that takes what can be made up from its schema."""
    if kind in FORMS:
        return FORMS[kind]
    packet = getattr(aten, kind)
    for name in OVERLOADS:
        target = getattr(packet, name, None) if name in packet.overloads() else None
        if target is not None:
            return target, [made(kind, k, a) for k, a in enumerate(target._schema.arguments) if needed(a)]
    raise AssertionError(f"{kind} has none of these forms: {packet.overloads()}")


def needed(argument):
    return not argument.has_default_value() and not argument.kwarg_only


def made(kind, position, argument):
    name = str(argument.type)
    if "Tensor" in name and kind in WHOLE_NUMBERS.split():
        return integers(5, 3, 4, seed=position)
    if "Tensor" in name:
        return tensor(3, 4, seed=position + 1, positive=kind not in ("real", "acosh")) * 0.4 + (
            kind == "acosh"
        )
    return next(value for plain, value in PLAIN.items() if plain in name.lower() or plain in name)


@pytest.mark.parametrize("kind", sorted(POINTWISE))
def test_every_element_at_its_place(kind):
    target, args = call(kind)
    relations = check(target, *args, count=2, tight=kind not in LEVEL.split())
    for relation in relations:
        assert all(indices in ((), (Same(0), Same(1))) for indices in relation.inputs if indices is not None)


@pytest.mark.parametrize(
    "shapes", [((3, 4), (4,)), ((3, 1), (1, 4)), ((2, 3, 4), (3, 1)), ((3, 4), ()), ((1,), (3, 4))]
)
def test_broadcasting(shapes):
    one, other = tensor(*shapes[0]), tensor(*shapes[1], seed=2, positive=True)
    check(aten.mul.Tensor, one, other)
    check(aten.sub.Tensor, one, other, options={"alpha": 2})
    check(aten.where.self, tensor(3, 4, seed=3) > 0, one, other, tight=False)
    check(aten.addcmul.default, tensor(2, 3, 4, seed=4), one, other)


def test_a_repeated_dimension_is_read_where_it_is():
    relation = check(aten.add.Tensor, tensor(3, 4), tensor(3, 1, seed=2))[0]
    assert relation.inputs[1] == (Same(0), Whole())
    assert relation.needs(Rect((1, 2), (2, 4))) == (Rect((1, 2), (2, 4)), Rect((1, 0), (2, 1)))


def test_one_tensor_given_twice():
    assert check(aten.mul.Tensor, *[tensor(3, 4)] * 2)[0].inputs == ((Same(0), Same(1)),)


def test_in_place():
    for target in (aten.add_.Tensor, aten.mul_.Tensor):
        relation = check(target, tensor(3, 4), tensor(4, seed=2))[0]
        assert relation.inputs == ((Same(0), Same(1)), (Same(1),))
    check(aten.relu_.default, tensor(3, 4, positive=True))
    relation = check(aten.copy_.default, tensor(3, 4), tensor(4, seed=2))[0]
    assert relation.inputs == (None, (Same(1),))
    assert check(aten.zero_.default, tensor(3, 4))[0].inputs == (None,)
    assert check(aten.fill_.Scalar, tensor(3, 4), 0.5)[0].inputs == (None,)


def test_copies():
    assert check(aten.copy.default, tensor(3, 4), tensor(3, 4, seed=2))[0].inputs[0] is None
    check(aten._to_copy.default, tensor(3, 4), options={"dtype": torch.float32})
    check(aten.clone.default, tensor(3, 4), options={"memory_format": torch.contiguous_format})


def test_what_reads_no_values():
    like = tensor(3, 4)
    for target, *rest in (
        (aten.zeros_like.default,), (aten.ones_like.default,), (aten.full_like.default, 2.0),
        (aten.new_zeros.default, [5]), (aten.new_full.default, [2, 2], 3.0), (aten.new_ones.default, [2]),
    ):  # fmt: skip
        assert check(target, like, *rest)[0].inputs == (None,)
    for target, *rest in (
        (aten.arange.default, 5), (aten.full.default, [2, 3], 1.0), (aten.zeros.default, [2]),
        (aten.ones.default, [2]), (aten.eye.default, 3), (aten.scalar_tensor.default, 1.0),
    ):  # fmt: skip
        assert check(target, *rest)[0].inputs == ()
    for target in (aten.empty_like.default, aten.rand_like.default, aten.randn_like.default):
        assert Probe(target, (like,)).access.relations[0].inputs == (None,)
    for target in (aten.exponential.default, aten.uniform.default, aten.normal_.default):
        assert Probe(target, (like,)).access.relations[0].inputs == (None,)
    assert check(aten.fill.Tensor, like, tensor())[0].inputs == (None, ())


def test_chance():
    given = tensor(3, 4, positive=True)
    kept, mask = Probe(aten.native_dropout.default, (given, 0.5, True)).access.relations
    assert kept.inputs == ((Same(0), Same(1)),)
    assert mask.inputs == (None,)
    check(aten.native_dropout_backward.default, given, tensor(3, 4, seed=2) > 0, 2.0, tight=False)
    assert Probe(aten.bernoulli.p, (given, 0.5)).access.relations[0].inputs == (None,)
    chances = torch.sigmoid(given)
    assert Probe(aten.bernoulli.default, (chances,)).access.relations[0].inputs == ((Same(0), Same(1)),)


def test_places_where_a_condition_holds_are_unknown():
    assert not Probe(aten.where.default, (tensor(3, 4) > 0,)).access.known


def test_a_buffer_that_is_left_empty():
    result, _ = check(aten.log_sigmoid_forward.default, tensor(3, 4), tight=False)
    assert result.inputs == ((Same(0), Same(1)),)
