"""Tiles that own boxes of an input: its gradient is made side by side, everything else is added up."""

import copy

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

from lowtide.errors import CaptureError, PlanError, RunError
from lowtide.execute.compare.tiles import run_tiles
from lowtide.execute.tiling import plan_tiles as tiling
from lowtide.graph import LOOP, Rect
from lowtide.graph.tiles import Cut, tile_input
from lowtide.plan.check.checker import check
from lowtide.plan.program.instructions import Loop, Program
from lowtide.plan.program.simulate import simulate
from lowtide.trace.step.capture import capture
from lowtide.trace.tiles.owned import Owned
from tests.execute.tiling.test_outside import applied, largest, middle, normalised, weighted
from tests.execute.tiling.test_random_tiles import drawn, mean
from tests.execute.tiling.tiles import outcome, owning, program_of

replace = msgspec.structs.replace


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.mark.parametrize("seed", [1, 3])
def test_random_networks(seed):
    model, (x, *_), _, _ = drawn(seed, mean)
    x.requires_grad_()
    assert largest(model, x, [weighted, weighted], (1, 1, 2, 2), own=owning((2, 3))) < 1e-10


def test_a_region_before_batch_norm():
    model, x = normalised()
    uses = [lambda y: y.square().mean().backward()]
    assert largest(model, x, uses, (1, 1, 2, 1), end=middle, own=owning((3, 2))) < 1e-10


def test_batches_of_tokens():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 5)).double()
    x = torch.randn(5, 7, 6, dtype=torch.float64, requires_grad=True)
    assert largest(model, x, [weighted], (2, 3, 1), own=owning((3, 2), (0, 1))) < 1e-10


def test_pixels_that_nobody_reads_have_no_gradient():
    model = nn.Conv2d(1, 2, 2, stride=9).double()
    x = torch.randn(1, 1, 20, 20, dtype=torch.float64, requires_grad=True)
    assert largest(model, x, [weighted], (1, 1, 2, 2), own=owning((6, 4))) < 1e-10


class Of(nn.Module):
    """A function of a convolution and the input."""

    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Conv2d(2, 2, 3, padding=1)
        self.rows = nn.Parameter(torch.randn(1, 2, 3, 11))

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: model.layer(x),
        lambda model, x: model.layer(model.layer(x).relu()),
        lambda model, x: functional.avg_pool2d(model.layer(x), 3, 1, 1),
        lambda model, x: x + model.layer(x).flip(-1),
        lambda model, x: model.layer(x.roll((3, -2), (2, 3))),
        lambda model, x: model.layer(x[:, :, 7:]),
        lambda model, x: torch.cat([model.rows, model.layer(x[:, :, 7:])], 2),
        lambda model, x: model.layer(x.sign()),
    ],
)
def test_a_region_whose_gradients_have_the_shape_of_its_result(function):
    model, x = Of(function).double(), torch.randn(1, 2, 13, 11, dtype=torch.float64, requires_grad=True)
    assert largest(model, x, [weighted], (1, 1, 2, 2), own=owning((3, 2))) < 1e-10


def test_linear_operators_of_the_same_shape_behind_the_region():
    def function(model, x):
        y = model.layer(x)
        return y + 2 * y.flip(-1)

    def layer(joint):
        made = next(op for op in joint.graph.ops if op.kind == "aten.convolution")
        return joint.graph.tensors[made.outputs[0]].id

    model, x = Of(function).double(), torch.randn(1, 2, 13, 11, dtype=torch.float64, requires_grad=True)
    assert largest(model, x, [weighted], (1, 1, 2, 2), end=layer, own=owning((3, 2))) < 1e-10


class Shared(nn.Module):
    """One layer three times, then another."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return self.last(self.layer(self.layer(self.layer(x))))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(4))

    def forward(self, x):
        x = x + self.b(self.a(x))
        return x + self.d(self.c(x))


class Parallel(Residual):
    def forward(self, x):
        y = self.c(self.a(x) * self.b(x))
        return self.d(y) * y.sigmoid() + y


class Pooled(nn.Module):
    """Linear operators without names."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2, 3, 3))

    def forward(self, x):
        y = functional.conv2d(functional.conv2d(x, self.weight, padding=1), self.weight, padding=1)
        return functional.avg_pool2d(functional.avg_pool2d(y, 3, 1, 1) * 2.0, 2)


LAYERS = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1), nn.AvgPool2d(2))


@pytest.mark.parametrize(
    ("model", "gradients"),
    [
        (LAYERS, {"0": "convolution_backward.0", "1": "avg_pool2d_backward"}),
        (
            Shared(),
            {
                "convolution": "convolution_backward_2.0",
                "convolution_1": "convolution_backward_1.0",
                "convolution_2": "convolution_backward.0",
            },
        ),
        (Residual(), {"b": "add_2", "add": "add_2", "c": "convolution_backward.0", "d": "mul_1"}),
        (Parallel(), {"a": "mul_7", "b": "mul_6", "c": "add_2", "d": "mul_5", "sigmoid": "mul_4"}),
        (Pooled(), {"convolution": "convolution_backward.0", "convolution_1": "avg_pool2d_backward_1"}),
    ],
    ids=["layers", "shared", "residual", "parallel", "pooled"],
)
def test_until_a_layer_tiles_go_back_from_its_gradient(model, gradients):
    graph = of_squares(model)
    found = {name: tile_input(graph, Cut((2, 2)), name).given for name in gradients}
    assert {name: graph.tensors[t].id for name, t in found.items()} == gradients


def test_so_they_do_where_nobody_says_what_is_differentiated():
    graph = of_squares(LAYERS)
    ops = (replace(op, differentiates="") for op in graph.ops)
    graph = replace(graph, ops=tuple(ops))
    given = [tile_input(graph, Cut((2, 2)), name).given for name in ("0", "1")]
    assert [graph.tensors[t].id for t in given] == ["convolution_backward.0", "avg_pool2d_backward"]


def of_squares(model):
    x = torch.randn(1, 2, 8, 8, requires_grad=True)
    return capture(lambda model, x: model(x).square().mean(), model, x).joint.graph


def test_a_run_needs_one_number_as_loss():
    model, x = nn.Conv2d(1, 2, 3), torch.randn(1, 1, 9, 9)
    with pytest.raises(RunError, match="must be a single number"):
        run_tiles(lambda model, x: model(x), model, (x,), Cut((2, 2)))
    torch._dynamo.reset()
    with pytest.raises(RunError, match="must be a tensor"):
        run_tiles(lambda model, x: (model(x).sum(), 1), model, (x,), Cut((2, 2)))


def test_with_frozen_weights_there_is_no_loop_for_them():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.GELU(), nn.Conv2d(3, 2, 3)).double().requires_grad_(False)
    x = torch.randn(1, 1, 14, 11, dtype=torch.float64, requires_grad=True)
    assert largest(model, x, [weighted], (1, 1, 2, 2), own=owning((2, 2))) < 1e-10
    torch._dynamo.reset()
    joint = capture(applied, model, x).joint
    whole = program_of(joint, (1, 1, 2, 2), end=outcome(joint), own=owning((2, 2))(joint))[1]
    assert sum(op.kind == LOOP for op in whole.graph.ops) == 2


def cut():
    """A Program with three loops, the step that it runs, and the step as it was captured."""
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3))
    joint = capture(applied, model, torch.randn(1, 1, 14, 11, requires_grad=True)).joint
    return *program_of(joint, (1, 1, 2, 2), end=outcome(joint), own=owning((3, 2))(joint)), joint


def loops(program):
    return [line for line in program.instructions if isinstance(line, Loop)]


def test_the_program_survives_a_file_and_finds_its_step_again():
    program, whole, joint = cut()
    assert [(len(one.tiles), bool(one.own)) for one in loops(program)] == [(4, False), (4, False), (6, True)]
    read = msgspec.json.decode(msgspec.json.encode(program), type=Program)
    assert read == program
    torch._dynamo.reset()
    assert tiling.with_loop(joint, read).graph == whole.graph
    assert simulate(whole.graph, read).peak_bytes == check(whole.graph, read).peak_bytes


def test_boxes_that_do_not_cover_the_input_once_are_refused():
    program, whole, _ = cut()
    tiles = loops(program)[2].tiles
    twice = replace(tiles[0], over=Rect(tiles[0].over.lo, tiles[1].over.hi))
    for damaged, words in ((tiles[1:], "leaves out parts of axes"), ((twice, *tiles[1:]), "turns twice for")):
        lines = [
            replace(one, tiles=damaged) if isinstance(one, Loop) and one.own else one
            for one in program.backward
        ]
        with pytest.raises(PlanError, match=words):
            check(whole.graph, replace(program, backward=tuple(lines)))


def test_a_tile_without_other_gradients_says_what_to_do():
    model, x = nn.Conv2d(2, 2, 3, padding=1), torch.randn(1, 2, 8, 8, requires_grad=True)

    def loss(model, x):
        return torch.cat([model(x), x.flip(2)], 2).square().sum()

    with pytest.raises(CaptureError, match="cannot own boxes of 'x': .* nothing that has a gradient; cut by"):
        run_tiles(loss, model, (x,), Cut((2, 2)), own="input")


def test_what_cannot_be_owned_is_refused():
    _, _, joint = cut()
    boxes = [Rect.of_shape((1, 1, 14, 11))]
    with pytest.raises(CaptureError, match="no input 'y' that has a gradient"):
        program_of(joint, (1, 1, 2, 2), end=outcome(joint), own=Owned("y", boxes))
    torch._dynamo.reset()
    model = nn.Conv2d(1, 1, 3)
    image = torch.randn(1, 1, 8, 8, requires_grad=True)
    loss = capture(lambda model, x: model(x).square().sum(), model, image).joint
    with pytest.raises(CaptureError, match="end before the loss"):
        program_of(loss, (1, 1, 2, 2), own=owning((2, 2))(loss))


def test_a_run_tells_how_far_gradients_are_and_leaves_the_model_as_it_was():
    model, x = normalised()
    before = copy.deepcopy(model.state_dict())
    ran = run_tiles(
        lambda model, x: model.stage(x).square().mean(), model, (x,), Cut((2, 2)), own="input", seed=3
    )
    assert ran.tiles == 12
    assert ran.gradients == 4
    assert ran.loss_difference == 0
    assert 0 <= ran.largest_difference < 1e-10
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
