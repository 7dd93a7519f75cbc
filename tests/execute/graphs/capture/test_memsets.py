"""Small memsets of a captured graph become kernels that write the same."""

import ctypes

import pytest
import torch

from lowtide.execute.graphs.arena.driver import call
from lowtide.execute.graphs.capture import memsets


@pytest.mark.parametrize(
    ("value", "element", "word"),
    [
        (0, 1, 0),
        (0xAB, 1, 0xABABABAB),
        (0x1234, 2, 0x12341234),
        (7, 4, 7),
        (0x1FF, 1, 0xFFFFFFFF),
        (1, 8, None),
    ],
)
def test_a_word_is_four_bytes_of_what_elements_are_set_to(value, element, word):
    assert memsets._word(value, element) == word


def test_structures_are_as_large_as_the_drivers():
    assert ctypes.sizeof(memsets._MemsetParams) == 40
    assert ctypes.sizeof(memsets._KernelParams) == 72


class Driver:
    """Some nodes in a line, as CUDA's driver tells of them."""

    def __init__(self, kinds, refused=()):
        self.kinds, self.refused = dict(enumerate(kinds, 1)), refused
        self.edges = {(k, k + 1) for k in range(1, len(kinds))}

    def call(self, name, *given):
        getattr(self, name.lower())(*given)

    def cuctxgetcurrent(self, context):
        pass

    def cumoduleloaddata(self, *_):
        pass

    def cumodulegetfunction(self, function, *_):
        function._obj.value = 99

    def _tell(self, nodes, into, count):
        if into is None:
            count._obj.value = len(nodes)
        else:
            into[:] = nodes

    def cugraphgetnodes(self, _graph, into, count):
        self._tell(list(self.kinds), into, count)

    def cugraphnodegettype(self, node, kind):
        kind._obj.value = 0 if self.kinds[node.value] is None else 2

    def cugraphmemsetnodegetparams(self, node, params):
        where, element, width, height = self.kinds[node.value]
        one = params._obj
        one.where, one.element, one.width, one.height, one.value = where, element, width, height, 5

    def cugraphnodegetdependencies(self, node, into, count):
        if node.value in self.refused:
            raise memsets.DriverError("lossy")
        self._tell([a for a, b in self.edges if b == node.value], into, count)

    def cugraphnodegetdependentnodes(self, node, into, count):
        self._tell([b for a, b in self.edges if a == node.value], into, count)

    def cugraphaddkernelnode_v2(self, node, _graph, before, count, params):
        assert params._obj.function == 99
        assert all(one in self.kinds for one in before)  # none that is gone
        given = ctypes.cast(params._obj.arguments, ctypes.POINTER(ctypes.c_void_p))
        read = [
            ctypes.cast(given[k], ctypes.POINTER(t))[0]
            for k, t in enumerate((ctypes.c_uint64, *[ctypes.c_uint32] * 2))
        ]
        made = 1 + max(self.kinds)
        self.kinds[made] = tuple(read)
        self.edges |= {(one, made) for one in before}
        node._obj.value = made

    def cugraphadddependencies(self, _graph, here, there, count):
        assert all(one in self.kinds for one in there)
        self.edges |= set(zip(here, there, strict=True))

    def cugraphdestroynode(self, node):
        del self.kinds[node.value]
        self.edges = {edge for edge in self.edges if node.value not in edge}


def replaced(monkeypatch, driver):
    monkeypatch.setattr(memsets, "call", driver.call)
    memsets._function.cache_clear()
    try:
        return memsets.by_kernels(7)
    finally:
        memsets._function.cache_clear()


def test_kernels_take_the_place_of_nodes_that_follow_each_other(monkeypatch):
    driver = Driver([None, (512, 1, 4, 1), (1024, 4, 3, 1), None])
    assert replaced(monkeypatch, driver) == 2
    made = {value: node for node, value in driver.kinds.items() if value is not None}
    first, second = made[512, 0x05050505, 1], made[1024, 5, 3]
    assert driver.edges == {(1, first), (first, second), (second, 4)}


@pytest.mark.parametrize(
    "one", [(512, 1, 6, 1), (512, 1, 4, 2), (514, 1, 4, 1), (512, 4, 8192, 1), (512, 4, 0, 1)]
)
def test_others_are_left_alone(monkeypatch, one):
    driver = Driver([None, one, None])
    assert replaced(monkeypatch, driver) == 0
    assert driver.edges == {(1, 2), (2, 3)}


def test_a_node_whose_place_is_not_told_is_left_alone(monkeypatch):
    driver = Driver([None, (512, 1, 4, 1), None], refused=[2])
    assert replaced(monkeypatch, driver) == 0
    assert driver.edges == {(1, 2), (2, 3)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_writes_the_same_by_kernels():
    tensors = [torch.ones(size, dtype=torch.uint8, device="cuda") for size in (4, 8, 2048, 16384, 65536, 6)]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    stream = torch.cuda.Stream()

    def zero(one, size):
        """As libraries do it; PyTorch itself has a kernel for this."""
        where, lane = ctypes.c_uint64(one.data_ptr()), ctypes.c_void_p(stream.cuda_stream)
        call("cuMemsetD8Async", where, ctypes.c_ubyte(0), ctypes.c_size_t(size), lane)

    with torch.cuda.stream(stream):
        graph.capture_begin()
        sums = []
        for one in tensors:
            zero(one, one.numel())
        for one in tensors:
            sums.append(one.sum())
            one.add_(3)
            zero(one, 4)
        graph.capture_end()
    assert memsets.by_kernels(graph.raw_cuda_graph()) >= 10  # all but one of 65,536 and one of six bytes
    graph.instantiate()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert [int(one) for one in sums] == [0] * len(tensors)
        for one in tensors:
            assert one[:4].tolist() == [0] * 4
            assert bool((one[4:] == 3).all())
