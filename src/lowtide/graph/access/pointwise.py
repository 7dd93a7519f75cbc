"""Operators that compute each element from the elements at its place, and those that read no values."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.graph.access.call import AccessCall, Rule, broadcast
from lowtide.graph.access.relation import Relation

__all__ = ["POINTWISE", "RULES"]

_NAMES = """
abs acos acosh add addcdiv addcmul alias angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clone conj copysign
cos cosh deg2rad detach digamma div elu elu_backward eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax
fmin fmod frac ge gelu gelu_backward gt hardshrink hardshrink_backward hardsigmoid hardsigmoid_backward
hardswish hardswish_backward hardtanh hardtanh_backward heaviside hypot isfinite isinf isnan isneginf isposinf
le leaky_relu leaky_relu_backward lerp lgamma lift_fresh lift_fresh_copy log log10 log1p log2
log_sigmoid_backward logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logit_backward
lt masked_fill maximum minimum mish mish_backward mul nan_to_num native_dropout_backward ne neg nextafter
polar pow rad2deg real reciprocal relu relu6 remainder round rsqrt rsub sgn sigmoid sigmoid_backward sign
signbit silu silu_backward sin sinc sinh softplus softplus_backward softshrink softshrink_backward sqrt square
sub tan tanh tanh_backward threshold threshold_backward tril triu true_divide trunc where xlogy
_to_copy _prelu_kernel _prelu_kernel_backward contiguous
"""

POINTWISE = frozenset(_NAMES.split())
"""Kinds in which all tensors are stretched to the output."""

_VALUELESS = """
arange cauchy empty empty_like empty_permuted empty_strided exponential eye fill full full_like geometric
linspace log_normal logspace new_empty new_empty_strided new_full new_ones new_zeros normal_
normal_functional ones ones_like rand rand_like randint randint_like randn randn_like random randperm
scalar_tensor tril_indices triu_indices uniform zero zeros zeros_like
"""


def _pointwise(call: AccessCall) -> list[Relation] | None:
    """Every tensor is stretched to the output; the places where a condition holds are something else."""
    if call.kind == "where" and call.value(1) is None:
        return None
    return [_at_its_place(call, shape) for shape in call.outputs]


def _at_its_place(call: AccessCall, shape: tuple[int, ...]) -> Relation:
    return call.relation(shape, [(v, broadcast(call.shape(v) or (), shape)) for v in call.values()])


def _valueless(call: AccessCall) -> list[Relation]:
    """A number to fill with may be a tensor; other tensors are asked for their shape alone."""
    fill = call.value(1)
    return [call.relation(shape, [(fill, ())] if call.shape(fill) == () else []) for shape in call.outputs]


def _bernoulli(call: AccessCall) -> list[Relation] | None:
    """With a number for the probability the tensor is asked for its shape alone."""
    if call.op.overload in ("p", "float", "float_"):
        return [call.relation(shape, []) for shape in call.outputs]
    return _pointwise(call)


def _native_dropout(call: AccessCall) -> list[Relation]:
    """What is left, and the mask, which depends on no value."""
    left, mask = call.outputs
    return [_at_its_place(call, left), call.relation(mask, [])]


def _copy(call: AccessCall) -> list[Relation]:
    """What is written over is not read."""
    shape, source = call.outputs[0], call.value(1)
    return [call.relation(shape, [(source, broadcast(call.shape(source) or (), shape))])]


def _log_sigmoid(call: AccessCall) -> Sequence[Relation] | None:
    """The result, and a buffer that some devices leave empty."""
    return [
        _at_its_place(call, shape) if shape == call.outputs[0] else call.relation(shape, [])
        for shape in call.outputs
    ]


RULES: dict[str, Rule] = (
    dict.fromkeys(POINTWISE, _pointwise)
    | dict.fromkeys(_VALUELESS.split(), _valueless)
    | {
        "bernoulli": _bernoulli,
        "native_dropout": _native_dropout,
        "copy": _copy,
        "log_sigmoid_forward": _log_sigmoid,
    }
)
"""By kind; an operator in place has the kind without its last underscore."""
