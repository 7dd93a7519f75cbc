"""What communications take by how fast devices are connected."""

import pytest
import torch

from lowtide.cost.wire import WireEnd, WireSpeed, wire_seconds
from lowtide.execute.shards.wires import speed_of
from lowtide.graph import EXCHANGE, SUM, Graph, Op, Phase, Role, Tensor

SPEED = WireSpeed(1e6, 1e-3)


def test_a_sum_goes_around_a_ring_twice():
    for devices in (2, 3, 8):
        rounds = 2 * (devices - 1)
        slowest = rounds * (1e-3 + 6000 / devices / 1e6)  # of so many messages, each with a part
        assert SPEED.sum_seconds(6000, devices) == pytest.approx(slowest)
    assert SPEED.sum_seconds(6000, 1) == SPEED.sum_seconds(0, 4) == SPEED.seconds(0) == 0.0
    assert WireSpeed(1e6, 1e-3, 2e6, 0.5).sum_seconds(6000, 3) == pytest.approx(0.5 + 8000 / 2e6)


def step(*arguments):
    tensors = (
        Tensor("x", 240, Role.INPUT, shape=(5, 6), dtype="float64"),
        Tensor("y", 240, shape=(5, 6), dtype="float64"),
    )
    kind = SUM if len(arguments) == 3 else EXCHANGE
    return Graph(tensors, (Op("a", kind, Phase.FORWARD, (0,), (1,), arguments=arguments, once=True),))


def test_an_exchange_takes_as_long_as_the_direction_with_more_bytes():
    sends, receives = [0, 0, 2, 1, 2, 5, 2, 1, 2], [0, 3, 4, 1, 0, 3, 2, 4, 5]
    for place in range(3):
        out = sum(8 * 5 * (hi - lo) for to, lo, hi in ((0, 0, 2), (1, 2, 5), (2, 1, 2)) if to != place)
        into = sum(8 * 5 * (hi - lo) for come, lo, hi in ((0, 3, 4), (1, 0, 3), (2, 4, 5)) if come != place)
        graph = step(None, 1, sends, receives, 6, False, "w")
        found = wire_seconds(graph, {"w": WireEnd(SPEED, place, 3)})
        assert found == {0: pytest.approx(1e-3 + max(out, into) / 1e6)}
    assert wire_seconds(graph, {"another": WireEnd(SPEED, 0, 3)}) == {}


def test_a_sum_counts_all_bytes_of_its_tensor():
    graph = step(None, False, "w")
    assert wire_seconds(graph, {"w": WireEnd(SPEED, 0, 3)}) == {0: pytest.approx(SPEED.sum_seconds(240, 3))}


def test_speeds_are_those_that_explain_the_measured_times():
    known, cpu = WireSpeed(2e8, 3e-4, 1e8, 5e-3), torch.device("cpu")
    sizes = 1 << 10, 1 << 20
    times = [known.seconds(size) for size in sizes] + [known.sum_seconds(size, 4) for size in sizes]
    found = speed_of(times, cpu, 4)
    for size in (1 << 14, 1 << 18):
        assert found.seconds(size) == pytest.approx(known.seconds(size), rel=0.02)
        assert found.sum_seconds(size, 4) == pytest.approx(known.sum_seconds(size, 4), rel=0.02)
    noisy = speed_of([1e-3, 9e-4, 2e-3, 1e-3], cpu, 2)  # a large message was faster, by chance
    assert noisy.seconds(1 << 20) <= 2 * 1e-3
    assert noisy.sum_seconds(1 << 20, 2) <= 2 * 2e-3
