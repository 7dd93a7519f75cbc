"""Tiles of steps that are written down by hand: what they need, what they share, and what prevents them."""

import pytest

from lowtide.cost.overlap import overlap_of, overlap_of_op
from lowtide.errors import TileError
from lowtide.graph import Graph, Op, Phase, Rect, Role, Source, Tensor
from lowtide.graph.tiles import BATCH, Cut, layers, share, tile_input, tile_output


class Chain:
    """A graph that grows operator by operator, each reading the last result."""

    def __init__(self, *shape):
        self.tensors = [Tensor("image", 0, Role.INPUT, shape=shape, dtype="float32")]
        self.ops = []
        self.last = 0

    def leaf(self, *shape, role=Role.PARAMETER):
        self.tensors.append(Tensor(f"leaf{len(self.tensors)}", 0, role, shape=shape, dtype="float32"))
        return len(self.tensors) - 1

    def add(self, kind, shape, arguments=(), *, inputs=None):
        inputs = [self.last] if inputs is None else inputs
        self.tensors.append(Tensor(f"t{len(self.tensors)}", 0, shape=tuple(shape), dtype="float32"))
        self.last = len(self.tensors) - 1
        number = len(self.ops)
        given = (*({"input": k} for k in range(len(inputs))), *arguments)
        self.ops.append(
            Op(
                f"op{number}",
                f"aten.{kind}",
                Phase.FORWARD,
                tuple(inputs),
                (self.last,),
                source=Source("net.py", 10 + number),
                arguments=given,
            )
        )
        return self.last

    def conv(self, *, kernel=3, stride=1, padding=1):
        n, _, *space = self.tensors[self.last].shape
        weight = self.leaf(1, 1, kernel, kernel)
        out = [(d + 2 * padding - kernel) // stride + 1 for d in space]
        figures = [None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1]
        return self.add("convolution", (n, 1, *out), figures, inputs=[self.last, weight])

    def graph(self):
        loss = self.add("sum", ())
        return Graph(tuple(self.tensors), tuple(self.ops), returned=(loss,))


def test_two_convolutions_grow_by_one_element_each():
    chain = Chain(1, 1, 12, 12)
    first, second = chain.conv(), chain.conv()
    tiling = tile_output(chain.graph(), Cut((3, 2)))
    assert tiling.tensor == tiling.end == second
    assert [tile.coord for tile in tiling.tiles] == [(r, c) for r in range(3) for c in range(2)]
    middle = tiling.tiles[2]
    assert middle.own == Rect((0, 0, 4, 0), (1, 1, 8, 6))
    assert middle.parts[first] == Rect((0, 0, 3, 0), (1, 1, 9, 7))
    assert middle.parts[0] == Rect((0, 0, 2, 0), (1, 1, 10, 8))


def test_a_tensor_that_two_operators_read_is_needed_in_both_parts():
    chain = Chain(1, 1, 12, 12)
    plain = chain.add("relu", (1, 1, 12, 12))
    chain.last = 0
    wide = chain.conv()
    chain.add("add", (1, 1, 12, 12), inputs=[plain, wide])
    tiling = tile_output(chain.graph(), Cut((3, 1)))
    assert tiling.tiles[1].parts[plain] == Rect((0, 0, 4, 0), (1, 1, 8, 12))
    assert tiling.tiles[1].parts[0] == Rect((0, 0, 3, 0), (1, 1, 9, 12))


def test_own_parts_cover_the_tensor_once_in_uneven_sizes():
    chain = Chain(1, 1, 11, 7)
    chain.conv()
    tiling = tile_output(chain.graph(), Cut((3, 4)))
    seen = [0] * 77
    for tile in tiling.tiles:
        for y in range(tile.own.lo[2], tile.own.hi[2]):
            for x in range(tile.own.lo[3], tile.own.hi[3]):
                seen[y * 7 + x] += 1
    assert seen == [1] * 77
    assert [share(7, 4, k) for k in range(4)] == [(0, 1), (1, 3), (3, 5), (5, 7)]


def test_halo_and_padding_are_what_is_read_beyond():
    chain = Chain(1, 1, 12, 12)
    chain.conv(kernel=5, padding=2)
    graph = chain.graph()
    tiling = tile_output(graph, Cut((3, 3)))
    corner, middle = (layers(graph, tiling, tiling.tiles[k])[0].reads[0] for k in (0, 4))
    assert corner.reach == Rect((0, 0, -2, -2), (1, 1, 6, 6))
    assert corner.region == Rect((0, 0, 0, 0), (1, 1, 6, 6))
    assert corner.padding == ((2, 0), (2, 0))
    assert corner.halo == ((0, 2), (0, 2))
    assert middle.padding == ((0, 0), (0, 0))
    assert middle.halo == ((2, 2), (2, 2))


def test_a_wide_margin_is_padding_first_and_halo_for_the_rest():
    chain = Chain(1, 1, 6, 6)
    chain.conv(kernel=5, padding=2)
    graph = chain.graph()
    tiling = tile_output(graph, Cut((6, 1)))
    second = layers(graph, tiling, tiling.tiles[1])[0].reads[0]
    assert (second.padding[0], second.halo[0]) == ((1, 0), (1, 2))


def test_windows_that_step_over_each_other_share_one_row():
    chain = Chain(1, 1, 16, 16)
    chain.conv(kernel=3, stride=2, padding=1)
    graph = chain.graph()
    tiling = tile_output(graph, Cut((2, 1)))
    above, below = (layers(graph, tiling, tile)[0].reads[0] for tile in tiling.tiles)
    assert above.region.hi[2] - below.region.lo[2] == 1
    assert (above.halo[0], below.halo[0]) == ((0, 0), (1, 0))


def test_the_overlap_is_what_is_computed_over_what_there_is():
    chain = Chain(1, 1, 12, 12)
    chain.conv()
    chain.conv()
    graph = chain.graph()
    tiling = tile_output(graph, Cut((3, 1)))
    assert overlap_of_op(graph, tiling, 1) == 1
    assert overlap_of_op(graph, tiling, 0) == (5 + 6 + 5) / 12
    assert overlap_of(graph, tiling).elements == pytest.approx((1 + 16 / 12) / 2)
    assert overlap_of(graph, tiling).flop == pytest.approx((1 + 16 / 12) / 2)
    whole = tile_output(graph, Cut((1, 1)))
    assert overlap_of(graph, whole).elements == overlap_of(graph, whole).flop == 1


def test_the_flop_weigh_what_is_expensive():
    chain = Chain(1, 1, 12, 12)
    chain.conv()
    chain.add("relu", (1, 1, 12, 12))
    chain.conv(kernel=1, padding=0)
    graph = chain.graph()
    tiling = tile_output(graph, Cut((3, 1)))
    assert overlap_of(graph, tiling).flop == overlap_of(graph, tiling).elements == 1
    chain = Chain(1, 1, 12, 12)
    chain.conv(kernel=1, padding=0)
    chain.conv()
    graph = chain.graph()
    cheap = overlap_of(graph, tile_output(graph, Cut((3, 1))))
    assert 1 < cheap.flop < cheap.elements


def test_the_batch_is_cut_without_any_overlap():
    chain = Chain(6, 1, 8, 8)
    chain.conv()
    chain.add("relu", (6, 1, 8, 8))
    graph = chain.graph()
    tiling = tile_output(graph, Cut((4,), BATCH))
    assert [tile.parts[0].shape[0] for tile in tiling.tiles] == [1, 2, 1, 2]
    assert overlap_of(graph, tiling).elements == 1


def squeeze_and_excite(chain):
    image = chain.last
    mean = chain.add("mean", (1, 1, 1, 1), [[2, 3], True])
    gate = chain.add("sigmoid", (1, 1, 1, 1), inputs=[mean])
    return chain.add("mul", (1, 1, 8, 8), inputs=[image, gate])


def test_a_mean_over_the_image_prevents_tiles_and_is_named_with_its_line():
    chain = Chain(1, 1, 8, 8)
    chain.conv()
    squeeze_and_excite(chain)
    with pytest.raises(TileError, match=r"net\.py:11: aten\.mean .* needs all of t2 .* until op0") as caught:
        tile_output(chain.graph(), Cut((2, 2)))
    assert caught.value.op == 1


def test_what_is_in_front_of_it_can_be_cut():
    chain = Chain(1, 1, 8, 8)
    first = chain.conv()
    squeeze_and_excite(chain)
    tiling = tile_output(chain.graph(), Cut((2, 2)), until="op0")
    assert (tiling.end, tiling.ops) == (first, (0,))


def test_an_operator_that_nobody_knows_prevents_tiles():
    chain = Chain(1, 1, 8, 8)
    chain.add("stir", (1, 1, 8, 8))
    with pytest.raises(
        TileError, match=r"net\.py:10: aten\.stir \(op0\) is not known.*nothing can be cut"
    ) as caught:
        tile_output(chain.graph(), Cut((2, 2)))
    assert caught.value.op == 0


def test_a_whole_tensor_that_does_not_come_from_the_image_is_no_harm():
    chain = Chain(1, 1, 8, 8)
    time = chain.leaf(1, 1, 1, 1, role=Role.INPUT)
    gate = chain.add("sigmoid", (1, 1, 1, 1), inputs=[time])
    chain.add("mul", (1, 1, 8, 8), inputs=[0, gate])
    tiling = tile_output(chain.graph(), Cut((2, 2)))
    assert all(tile.parts[gate] == Rect.of_shape((1, 1, 1, 1)) for tile in tiling.tiles)


def test_an_image_of_one_row_still_follows_the_grid():
    chain = Chain(1, 1, 8, 8)
    chain.conv(kernel=8, padding=0)
    chain.add("constant_pad_nd", (1, 1, 2, 2), [[0, 1, 0, 1], 0.0])
    tiling = tile_output(chain.graph(), Cut((2, 2)))
    assert 0 in tiling.tiles[0].parts
    assert 0 not in tiling.tiles[3].parts


@pytest.mark.parametrize(
    ("grid", "dims", "words"),
    [
        ((9, 2), (-2, -1), r"9x2 does not fit t2 of shape \(1, 1, 8, 8\): dimension 2 has 8 .* try 8x2"),
        ((2, 2), (-1, -1), "no result of the forward pass"),
        ((2,), (7,), "no result of the forward pass"),
        ((2,), (0,), "no result of the forward pass"),
    ],
)
def test_a_grid_that_does_not_fit(grid, dims, words):
    chain = Chain(1, 1, 8, 8)
    chain.conv()
    with pytest.raises(TileError, match=words):
        tile_output(chain.graph(), Cut(grid, dims))


@pytest.mark.parametrize(("grid", "dims"), [((2,), (-2, -1)), ((0, 2), (-2, -1)), ((), ())])
def test_a_grid_that_is_none(grid, dims):
    with pytest.raises(TileError):
        Cut(grid, dims)


def test_an_end_that_is_misspelt():
    chain = Chain(1, 1, 8, 8)
    chain.conv()
    with pytest.raises(TileError, match="Did you mean 'op0'"):
        tile_output(chain.graph(), Cut((2, 2)), until="op00")


def test_an_input_without_a_gradient_has_no_tiles():
    chain = Chain(1, 1, 8, 8)
    chain.conv()
    with pytest.raises(TileError, match="no input has a gradient"):
        tile_input(chain.graph(), Cut((2, 2)))


def test_the_gradient_at_the_end_is_told_from_others_of_its_shape():
    chain = Chain(1, 1, 8, 8)
    weights = []
    for _ in range(2):
        chain.conv()
        weights.append(chain.ops[-1].inputs[1])
    graph = chain.graph()
    tensors, ops = list(graph.tensors), list(graph.ops)

    def backward(kind, inputs, arguments, **more):
        tensors.append(Tensor(f"g{len(tensors)}", 0, shape=(1, 1, 8, 8), dtype="float32", **more))
        given = (*({"input": k} for k in range(len(inputs))), *arguments)
        outputs = (len(tensors) - 1,)
        ops.append(Op(f"b{len(ops)}", kind, Phase.BACKWARD, inputs, outputs, arguments=given))
        return outputs[0]

    tensors.append(Tensor("tangent", 0, Role.GRADIENT, shape=(), dtype="float32"))
    last = first = backward("aten.expand", (len(tensors) - 1,), [[1, 1, 8, 8]])
    figures = [None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]]
    for weight, read, of in ((weights[1], ops[1].inputs[0], None), (weights[0], 0, 0)):
        last = backward("aten.convolution_backward", (last, read, weight), figures, gradient_of=of)
    tiling = tile_input(Graph(tuple(tensors), tuple(ops), returned=graph.returned), Cut((2, 2)))
    assert tiling.given == first
    assert tiling.tensor == last
    assert [ops[k].kind for k in tiling.ops] == ["aten.convolution_backward"] * 2
    assert tiling.tiles[0].parts[first] == Rect((0, 0, 0, 0), (1, 1, 6, 6))
