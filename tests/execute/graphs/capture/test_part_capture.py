"""A part as several graphs: what is captured when, what the host does between, and what is given back."""

from contextlib import contextmanager

import pytest
import torch

from lowtide.execute.graphs.capture import part_capture
from lowtide.execute.graphs.capture.part_capture import PartCapture


class _Graph:
    """Tells what it is asked to do."""

    number = 0

    def __init__(self, keep_graph):
        assert keep_graph
        _Graph.number += 1
        self.name, self.nodes, self.generators = f"graph {_Graph.number}", 0, []

    def register_generator_state(self, generator):
        self.generators.append(generator)

    def capture_begin(self, pool, capture_error_mode):
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        EVENTS.append(f"{self.name} begins")

    def capture_end(self):
        EVENTS.append(f"{self.name} ends")

    def raw_cuda_graph(self):
        return self.nodes

    def replay(self):
        EVENTS.append(f"{self.name} runs")


class _Recorder:
    has_begun_own = is_aside = False

    def begins(self):
        self.has_begun_own = False

    @contextmanager
    def aside(self):
        self.is_aside = True
        yield
        self.is_aside = False


EVENTS = []


@pytest.fixture
def capture(monkeypatch):
    EVENTS.clear()
    monkeypatch.setattr(_Graph, "number", 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(part_capture, "has_nodes", bool)
    monkeypatch.setattr(part_capture, "release_pool", lambda index, pool: EVENTS.append("one user less"))

    def complete(graph):
        EVENTS.append(f"{graph.name} is complete")

    return PartCapture(0, "pool", _Recorder(), ["generator"], complete)


def test_graphs_and_what_the_host_does_run_in_order(capture):
    with capture.capturing():
        capture._graph.nodes = 2
        capture.between(lambda: EVENTS.append("one"))
        capture.between(lambda: EVENTS.append("two"))  # nothing was captured since
        assert capture._graph.generators == ["generator"]
        capture._graph.nodes = 1
    assert EVENTS == [
        "graph 1 begins", "graph 1 ends", "graph 2 begins", "graph 2 ends", "graph 3 begins", "graph 3 ends",
    ]  # fmt: skip
    EVENTS.clear()
    part = capture.part()
    assert EVENTS == ["graph 1 is complete", "graph 3 is complete"]
    assert part.graphs == 2
    for _ in range(2):
        EVENTS.clear()
        part.replay()
        assert EVENTS == ["graph 1 runs", "one", "two", "graph 3 runs"]


def test_a_pool_that_an_operator_gave_back_to_the_graph_has_one_user_less_behind_each_graph(capture):
    with capture.capturing():
        capture._recorder.has_begun_own = True  # an operator had a pool of its own meanwhile
        capture.between(lambda: None)
        assert EVENTS.count("one user less") == 1
        capture.between(lambda: None)  # none had
    assert EVENTS.count("one user less") == 1


@pytest.mark.parametrize("between", [False, True])
def test_an_error_ends_the_capture_once(between, capture, monkeypatch):
    def fails(*args, **kwargs):
        raise ValueError("no memory")

    def part():
        with capture.capturing():
            capture._recorder.has_begun_own = True
            monkeypatch.setattr(_Graph, "capture_begin", fails)
            (capture.between if between else fails)(lambda: None)

    with pytest.raises(ValueError, match="no memory"):
        part()
    assert EVENTS == ["graph 1 begins", "graph 1 ends", "one user less"]


def test_a_graph_that_cannot_end_gives_its_pool_back_once(capture, monkeypatch):
    def fails(graph):
        raise RuntimeError("invalid")

    def part():
        with capture.capturing():
            capture._recorder.has_begun_own = True
            monkeypatch.setattr(_Graph, "capture_end", fails)
            capture.between(lambda: None)

    with pytest.raises(RuntimeError, match="invalid"):
        part()
    assert EVENTS.count("one user less") == 1


def test_what_ends_and_begins_graphs_is_not_counted_as_an_operator(capture, monkeypatch):
    seen = []
    end = _Graph.capture_end
    monkeypatch.setattr(
        _Graph, "capture_end", lambda self: seen.append(capture._recorder.is_aside) or end(self)
    )
    with capture.capturing():
        capture.between(lambda: None)
    assert seen == [True, False]
