"""Estimates from shapes and from what a device does at most."""

import pytest

from lowtide.cost import Origin, Step, validate_step
from lowtide.cost.estimate import estimate
from lowtide.graph import Graph, Op, Role, Tensor
from tests.cost.test_device import device, environment


def product(m, k, n, dtype="float32", bytes_=4):
    shapes = ((m, k), (k, n), (m, n))
    tensors = tuple(
        Tensor(name, bytes_ * a * b, role, shape=(a, b), dtype=dtype, device="cpu")
        for name, role, (a, b) in zip(
            "abc", (Role.INPUT, Role.PARAMETER, Role.ACTIVATION), shapes, strict=True
        )
    )
    called = {"overload": "default", "arguments": ({"input": 0}, {"input": 1})}
    return Graph(tensors, (Op("mm", "aten.mm", inputs=(0, 1), outputs=(2,), **called),))


def seconds(graph, on):
    return estimate(graph, on)[0].seconds.value


def test_a_large_product_takes_as_long_as_its_arithmetic():
    on = device()
    assert seconds(product(4096, 4096, 4096), on) == pytest.approx(2 * 4096**3 / 2e12 + 5e-6)
    half = product(4096, 4096, 4096, "bfloat16", 2)
    assert seconds(half, on) == pytest.approx(2 * 4096**3 / 8e12 + 5e-6)


def test_a_thin_product_takes_as_long_as_its_traffic():
    moved = 4 * (10**6 + 10**3 + 10**3)
    assert seconds(product(1, 1000, 1000), device()) == pytest.approx(moved / 1e12 + 5e-6, rel=1e-3)


def test_a_product_of_next_to_nothing_takes_its_launch():
    assert seconds(product(1, 1, 1), device()) == pytest.approx(5e-6, rel=1e-3)


def test_estimates_scale_with_size():
    on = device(launch_seconds=1e-12)
    times = [seconds(product(n, n, n), on) for n in (1024, 2048, 4096)]
    assert times[1] / times[0] == pytest.approx(8, rel=0.01)
    assert times[2] / times[1] == pytest.approx(8, rel=0.01)


def test_every_figure_says_that_it_is_an_estimate():
    cost = estimate(product(4, 5, 6), device())[0]
    assert {f.origin for f in (cost.seconds, cost.flop, cost.bytes_moved)} == {Origin.ESTIMATED}
    assert (cost.flop.value, cost.bytes_moved.value) == (2 * 4 * 5 * 6, 4 * (20 + 30 + 24))
    assert cost.workspace_bytes is None, "not known, which is not the same as none"


def test_a_view_takes_nothing_where_nothing_is_launched():
    base = Tensor("x", 64, Role.INPUT, shape=(4, 4), dtype="float32")
    view = Tensor("y", 64, shape=(16,), dtype="float32", alias=0)
    graph = Graph((base, view), (Op("view", "aten.view", inputs=(0,), outputs=(1,)),))
    gpu = environment()
    gpu = type(gpu)("a GPU", "cuda", gpu.versions, gpu.settings)
    assert seconds(graph, device(environment=gpu)) == 0
    assert seconds(graph, device()) == 5e-6


def test_a_document_of_another_framework_can_be_estimated(documents):
    from lowtide.formats import chainer

    graph = chainer.read(documents["000"]).graph
    step = validate_step(Step(graph, costs=estimate(graph, device())))
    assert len(step.costs) == 120
