"""Tiles of steps whose loss is outside, and of regions that end before the loss: forward and backward apart."""

import copy
import functools

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.cost.watch import watch_cpu
from lowtide.errors import CaptureError, InfeasibleError, PlanError
from lowtide.execute.tiling import plan_tiles as tiling
from lowtide.execute.tiling import search as attempts
from lowtide.execute.tiling.regions import middles
from lowtide.graph import LOOP, Phase
from lowtide.plan.check.checker import check
from lowtide.plan.program.instructions import Loop, Program
from lowtide.plan.program.simulate import simulate
from lowtide.trace.step.capture import capture
from lowtide.trace.tiles.tiling import Tiling
from tests.execute.tiling.test_random_tiles import drawn, mean
from tests.execute.tiling.tiles import in_tiles, outcome, program_of

replace = msgspec.structs.replace


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def applied(model, x):
    return model(x)


def middle(joint):
    """The tensor at which the search would end a region."""
    return middles(joint)[0]


def trained(function, model, x, uses):
    """Result and gradients of a step for every use of its result, with the buffers that it leaves."""
    found = []
    for seed, use in enumerate(uses):
        model.zero_grad(set_to_none=True)
        x.grad = None
        torch.manual_seed(seed)
        result = function(model, x)
        use(result)
        first = result[0] if isinstance(result, tuple) else result
        gradients = [x.grad, *(p.grad for p in model.parameters())]
        found.append(
            (torch.get_rng_state(), [first.detach().clone(), *gradients, *copy.deepcopy(model).buffers()])
        )
    return found


def largest(model, x, uses, parts, function=applied, end=outcome, **how):
    """The largest difference between steps as they are and in tiles, over the largest element of each tensor."""
    other = copy.deepcopy(model)
    want = trained(function, model, x, uses)
    got = trained(in_tiles(function, parts, end=end, **how), other, x, uses)
    found = [0.0]
    for (state, ours), (random, theirs) in zip(got, want, strict=True):
        assert torch.equal(state, random)
        assert [a is None for a in ours] == [b is None for b in theirs]
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if b is not None]
        least = 1e-6 * max(float(b.abs().max()) for _, b in pairs)
        found += [float((a - b).abs().max() / b.abs().max().clamp(min=least)) for a, b in pairs]
    return max(found)


def weighted(result):
    """A loss outside that tells every element of the result from the others."""
    weight = torch.arange(result.numel(), dtype=result.dtype).cos().reshape(result.shape)
    (result * weight).sum().backward()


@pytest.mark.parametrize(("seed", "parts", "last"), [(0, (1, 1, 1, 2), False), (3, (2, 2, 1, 1), True)])
def test_random_networks_whose_loss_is_outside(seed, parts, last):
    model, (x, *_), _, _ = drawn(seed, mean)
    assert largest(model, x.requires_grad_(), [weighted, weighted], parts, channels_last=last) < 1e-10


def given_by_columns(y):
    y.backward(torch.linspace(0, 1, 105, dtype=y.dtype).view(5, 7, 3).permute(2, 1, 0))


def test_gradients_that_come_in_with_any_strides():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 5)).double()
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    uses = [
        lambda y: y.sum().backward(),
        lambda y: y.transpose(0, 2).cumsum(1).square().sum().backward(),
        lambda y: y[0, 1, 2].backward(),
        given_by_columns,
    ]
    assert largest(model, x, uses, (1, 2, 2)) < 1e-10


def test_a_scaled_loss_in_half_precision():
    model, x = nn.Linear(4, 3).half(), torch.randn(6, 4).half().requires_grad_()
    scales = (1.0, 512.0, 2.0**-8)
    uses = [lambda y, scale=scale: (y.float().square().sum() * scale).backward() for scale in scales]
    assert largest(model, x, uses, (2, 1)) < 1e-2


class Normalised(nn.Module):
    """An early stage with large images, then BatchNorm, which needs all of the batch."""

    def __init__(self):
        super().__init__()
        layers = [
            nn.Conv2d(2, 8, 3, padding=1),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Conv2d(8, 4, 3, 2, 0, 1, 2, False),
        ]
        self.stage = nn.Sequential(*layers, nn.MaxPool2d(2))
        self.rest = nn.Sequential(nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Conv2d(4, 3, 1))
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        return self.rest(self.stage(x)) * self.frozen


def normalised():
    return Normalised().double(), torch.randn(3, 2, 23, 20, dtype=torch.float64, requires_grad=True)


def of_length(model, x):
    """A loss that is no sum, and a second result."""
    y = model(x)
    return y.norm(), y


def test_a_stage_before_batch_norm_runs_in_tiles_and_updates_buffers_once():
    uses = [lambda y: y[0].backward(), lambda y: weighted(y[1])]
    assert largest(*normalised(), uses, (2, 1, 1, 2), of_length, middle) < 1e-10


def test_the_region_ends_before_what_needs_the_whole_batch():
    joint = capture(of_length, *normalised()).joint
    (end,) = middles(joint)
    assert end.startswith("max_pool2d")
    refused = next(op for op in joint.graph.ops if "batch_norm" in op.kind)
    later = joint.graph.tensors[refused.outputs[0]].id
    with pytest.raises(CaptureError, match="its statistics are those of the whole batch"):
        program_of(joint, (2, 1, 1, 1), end=later)


def test_a_tensor_that_is_read_behind_the_region_too():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x):
            inner = torch.tanh(self.first(x))
            return (self.second(inner) * inner.mean()).norm()

    def end(joint):
        *_, last = (
            op for op in joint.graph.ops if op.kind == "aten.convolution" and op.phase is Phase.FORWARD
        )
        return joint.graph.tensors[last.outputs[0]].id

    x = torch.randn(2, 2, 9, 8, dtype=torch.float64, requires_grad=True)
    assert largest(Twice().double(), x, [torch.Tensor.backward], (1, 1, 1, 2), end=end) < 1e-10


def images():
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 16, 3),
        nn.GELU(),
        nn.Conv2d(16, 2, 3, 2),
    ]
    return nn.Sequential(*layers), torch.randn(2, 2, 49, 49)


@functools.cache
def cut(parts=(1, 1, 1, 2)):
    """A Program with two loops, and the graph that it is for."""
    joint = capture(applied, *images()).joint
    program, whole = program_of(joint, parts, end=outcome(joint))
    return whole.graph, program


def in_strips(joint):
    """A loop inside a tile: over two strips of an image in it."""
    end = middles(joint)[-1]
    return end, Tiling(joint, (), end).boxes((1, 1, 1, 2))


def classified(model, x):
    return functional.cross_entropy(model(x), torch.tensor([1, 4, 2]))


def test_tiles_over_the_batch_hold_tiles_over_the_image():
    layers = [
        nn.Conv2d(2, 8, 3, padding=1),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Conv2d(8, 4, 3, 2),
        nn.MaxPool2d(2),
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(80, 5)).double()
    x = torch.randn(3, 2, 22, 20, dtype=torch.float64, requires_grad=True)
    uses = [torch.Tensor.backward, lambda y: (3 * y).backward()]
    assert largest(model, x, uses, (3,), classified, lambda _: "", inner=in_strips) < 1e-10
    torch._dynamo.reset()
    joint = capture(classified, model, x).joint
    program, whole = program_of(joint, (3,), inner=in_strips)
    (body,) = program.bodies
    assert [len(line.tiles) for line in body.program.instructions if isinstance(line, Loop)] == [2, 2]
    assert tiling.with_loop(joint, program).graph == whole.graph
    assert simulate(whole.graph, program).peak_bytes == check(whole.graph, program).peak_bytes
    program_of_flat, flat = program_of(joint, (3,))
    assert check(whole.graph, program).peak_bytes < check(flat.graph, program_of_flat).peak_bytes
    lines = [
        replace(one, tiles=one.tiles[1:]) if isinstance(one, Loop) else one for one in body.program.backward
    ]
    broken = replace(body, program=replace(body.program, backward=tuple(lines)))
    with pytest.raises(PlanError, match="leaves out parts of axes"):
        check(whole.graph, replace(program, bodies=(broken,)))


def test_programs_with_two_loops_survive_a_file_and_count_the_same_in_the_checker():
    graph, program = cut()
    assert [op.phase for op in graph.ops if op.kind == LOOP] == [Phase.FORWARD, Phase.BACKWARD]
    assert msgspec.json.decode(msgspec.json.encode(program), type=Program) == program
    assert simulate(graph, program).peak_bytes == check(graph, program).peak_bytes
    whole = check(*cut((1, 1, 1, 1)))
    assert check(graph, program).peak_bytes < whole.peak_bytes


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_boxes_must_cover_the_result_in_both_loops(part):
    graph, program = cut()
    lines = [
        replace(one, tiles=one.tiles[1:]) if isinstance(one, Loop) else one for one in getattr(program, part)
    ]
    with pytest.raises(PlanError, match="leaves out parts of axes"):
        check(graph, replace(program, **{part: tuple(lines)}))


def test_fit_keeps_a_module_in_less_than_recomputation_can(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr("lowtide.plan.recompute.smallest_budget._aim", lambda *_, **__: None)
    monkeypatch.setattr(attempts, "result_grids", lambda *_: iter([(2, 1, 1, 2)]))
    model, x = images()
    asked = {"budget": "50%", "only": "recompute,tile", "time_limit": 0.2}
    step = lowtide.fit(model, x, **asked)
    plan = step.plan
    assert plan.decisions.tiles == 4
    assert "forward again, then backward" in plan.explain()
    tangent = torch.randn_like(step(x))
    step(x).backward(tangent)
    want = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    _, took = watch_cpu(lambda _: step(x).backward(tangent))
    peak = plan.resident_bytes + tangent.nbytes + took.peak_bytes
    assert peak <= 1.005 * plan.budget_bytes
    assert plan.predicted.peak_bytes == pytest.approx(peak, rel=0.01)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True))
    model.zero_grad(set_to_none=True)
    model(x).backward(tangent)
    for p, g in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()
    monkeypatch.setattr("lowtide.execute.compile.planned.in_tiles", None)  # the plan is known
    assert lowtide.fit(model, x, **asked).plan.program == plan.program


@pytest.fixture
def tiled(monkeypatch, tmp_path):
    """Fits a module in tiles; what operators around them need beyond the budget is told by the test."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr("lowtide.plan.recompute.smallest_budget._aim", lambda *_, **__: None)
    monkeypatch.setattr(attempts, "result_grids", lambda *_: iter([(2, 1, 1, 2)]))
    model, x = images()

    def fitted(missing):
        torch._dynamo.reset()
        monkeypatch.setattr("lowtide.execute.compile.planned.beyond_budget", missing)
        return lowtide.fit(model, x, budget="50%", only="recompute,tile", time_limit=0.2, verify=False).plan

    return fitted


def test_a_plan_that_was_kept_is_made_again_where_more_is_known(tiled):
    tiled(lambda *_: 0)
    measured = []

    def missing(plan, joint, run):
        measured.append(run is not None)
        return 1 if len(measured) == 1 else 0

    assert tiled(missing).decisions.tiles == 4
    assert measured == [False, True]


def test_plans_that_need_more_than_they_were_made_for_are_refused(tiled):
    with pytest.raises(InfeasibleError, match="operators around tiles need more .* would do") as refused:
        tiled(lambda *_: 1000)
    assert refused.value.smallest_budget == refused.value.budget + 1000
    measured = []

    def missing(plan, joint, run):
        measured.append(run is not None)
        return 0

    tiled(missing)
    assert measured == [True]  # no such plan was kept


def test_fit_puts_loops_into_tiles_where_a_sample_is_too_large(monkeypatch):
    monkeypatch.setattr("lowtide.plan.recompute.smallest_budget._aim", lambda *_, **__: None)
    for name in ("grids", "middles", "endings"):
        monkeypatch.setattr(attempts, name, lambda *_: iter(()))
    layers = [nn.Conv2d(2, 16, 3, padding=1), nn.GELU(), nn.MaxPool2d(6), nn.Flatten(), nn.Linear(576, 5)]
    model, x = nn.Sequential(*layers), torch.randn(3, 2, 36, 36)
    asked = {
        "budget": "25%",
        "only": "recompute,tile",
        "cost": "estimated",
        "time_limit": 0.2,
        "cache": False,
    }
    step = lowtide.fit(classified, model, x, **asked)
    assert "inside     4 tiles of 1×16×6×6 to max_pool2d" in step.plan.explain()
    step(model, x).backward()
    ours = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    classified(model, x).backward()
    for p, gradient in zip(model.parameters(), ours, strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-5)
