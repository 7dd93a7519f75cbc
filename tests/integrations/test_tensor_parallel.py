"""Steps of tensor-parallel models: nothing is sent while they are planned, and each collective runs once a step.

A group that only one process of two takes part in stands for the other one: torch's fake group, which gives
each process its own numbers back, or raises an error where it is asked for any.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.cost.unit import unit_seconds
from lowtide.cost.watch import watch_cpu
from lowtide.distributed_internals import local_of
from lowtide.errors import CaptureError, InfeasibleError
from lowtide.execute.compile.bits import same_bits
from lowtide.execute.compile.sharded import unsynchronised
from lowtide.graph import Role
from lowtide.plan.check.checker import check
from lowtide.plan.make.make_plan import make_plan
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Run
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.torch_internals import FakeTensorMode
from lowtide.trace.distributed.collectives import COLLECTIVES, name_of
from lowtide.trace.distributed.stand_ins import StandIns
from lowtide.trace.tiles.tiling import Tiling

OPTIONS = {"budget": "100%", "time_limit": 0.3, "cost": "estimated", "only": "recompute"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def fresh(cache, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(cache))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def group_of_two(rank=0, shape=(2,), *, silent=False):
    """One process of a group; in a ``silent`` one nothing can be sent."""
    options = FakeProcessGroup.Options()
    options.error_on_collective = silent
    count = torch.Size(shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count, pg_options=options)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    finally:
        dist.destroy_process_group()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.wide, self.last = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x):
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return self.last(nn.functional.gelu(self.wide(x)).tanh())


class Sequences(nn.Module):
    """A network whose rows are split over the processes where its features are not."""

    def __init__(self):
        super().__init__()
        self.norm, self.body = nn.LayerNorm(8), Network()

    def forward(self, x):
        return self.body(self.norm(x))


SPLIT = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "wide": ColwiseParallel(),
    "last": RowwiseParallel(),
}


def parallel(mesh):
    torch.manual_seed(0)
    return parallelize_module(Network(), mesh, SPLIT)


def parallel_sequences(mesh):
    torch.manual_seed(0)
    split = {
        "norm": SequenceParallel(sequence_dim=0),
        "body": PrepareModuleInput(
            input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
        ),
        "body.up": ColwiseParallel(),
        "body.down": RowwiseParallel(),
        "body.wide": ColwiseParallel(),
        "body.last": RowwiseParallel(output_layouts=Shard(0)),
    }
    return parallelize_module(Sequences(), mesh, split)


def loss_of(model, x):
    return model(x).square().mean()


def batch(rows=16, number=0):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(number))


class Recorded(TorchDispatchMode):
    """The collectives that run, each with the shape of what it is given."""

    leaves_calls_alone = True

    def __init__(self):
        super().__init__()
        self.calls = []

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if name_of(func) in COLLECTIVES:
            self.calls.append((name_of(func), tuple(args[0].shape)))
        return func(*args, **(kwargs or {}))


# what stands for a collective

ARGUMENTS = {
    "all_reduce": ("sum",),
    "all_gather_into_tensor": (2,),
    "reduce_scatter_tensor": ("sum", 2),
    "all_to_all_single": ([3, 5], [4, 4]),
    "broadcast": (0,),
}


def look(value):
    return value.shape, value.stride(), value.dtype, value.untyped_storage().nbytes()


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("joined", [False, True])
def test_what_stands_for_a_collective_looks_like_its_result(name, joined):
    x = torch.randn(8, 3)
    x = x if name != "all_reduce" else torch.randn(3, 8).t()
    with group_of_two(silent=True):
        function = getattr(torch.ops.lowtide if joined else torch.ops._c10d_functional, name)
        arguments = (*ARGUMENTS[name], "0")
        with StandIns():
            one, other = function(x, *arguments), function(x, *arguments)
        assert same_bits(one, other)
        assert one.data_ptr() != x.data_ptr()
        with FakeTensorMode() as mode:
            real = getattr(torch.ops._c10d_functional, name)(mode.from_tensor(x).contiguous(), *arguments)
        assert look(one) == look(real)
        with pytest.raises(RuntimeError, match="collective"):
            function(x, *arguments)


def test_results_of_one_process_alone_are_those_of_the_collectives(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        x, alone = torch.randn(4, 3), {"all_gather_into_tensor": (1,), "reduce_scatter_tensor": ("sum", 1)}
        for name in COLLECTIVES:
            sizes = ([4], [4]) if name == "all_to_all_single" else alone.get(name, ARGUMENTS[name])
            function = getattr(torch.ops.lowtide, name)
            real = function(x, *sizes, "0")
            with StandIns():
                assert same_bits(function(x, *sizes, "0"), real)
            assert look(real)[1:] == look(x)[1:]
    finally:
        dist.destroy_process_group()


def test_a_collective_that_nothing_stands_for_is_refused():
    with group_of_two(), StandIns(), pytest.raises(CaptureError, match="all_reduce_coalesced.*leave this"):
        torch.ops._c10d_functional.all_reduce_coalesced([torch.ones(2)], "sum", "0")


def test_a_captured_collective_that_is_not_supported_is_refused():
    def both(x):
        one, other = torch.ops._c10d_functional.all_reduce_coalesced([x, x + 1], "sum", "0")
        return (one * other).sum()

    with group_of_two(), pytest.raises(CaptureError, match=r"test_tensor_parallel.*all_reduce_coalesced"):
        lowtide.capture(both, batch())


# planning and running


def test_nothing_is_sent_while_a_step_is_planned():
    with group_of_two() as mesh:
        model = parallel_sequences(mesh)
    with group_of_two(silent=True):
        with pytest.raises(RuntimeError, match="collective"):
            loss_of(model, batch())
        measured = OPTIONS | {"cost": "measured", "budget": "90%"}
        step = lowtide.fit(loss_of, model, batch(), **measured)
        assert any(op.once for op in step.plan.graph.ops)
        with pytest.raises(RuntimeError, match="collective"):
            step(model, batch())


def test_plans_of_any_budget_on_any_rank_run_the_collectives_of_eager_in_its_order():
    expected, graphs = [], []
    for rank in range(2):
        with group_of_two(rank) as mesh:
            torch._dynamo.reset()
            model = parallel_sequences(mesh)
            with Recorded() as seen:
                loss_of(model, batch(64)).backward()
            expected.append(seen.calls)
            graphs.append(lowtide.capture(loss_of, model, batch(64)).step.graph)
    assert expected[0] == expected[1]
    assert {name for name, _ in expected[0]} > {"all_gather_into_tensor", "reduce_scatter_tensor"}
    planned = 0
    for graph in graphs:
        costs = Costs(unit_seconds(graph), (0,) * len(graph.ops), "estimated")
        for only in ("recompute", "recompute,offload"):
            for share in (100, 90, 80, 70, 60):
                request = PlanRequest.of(f"{share}%", only=only, time_limit=0.02, seed=share)
                link = Link(to_host=1e9, to_device=1e9) if "offload" in only else None
                with contextlib.suppress(InfeasibleError):
                    plan = make_plan(graph, costs, request, DeviceRoom(link=link))
                    check(graph, plan.program)
                    ops = [graph.ops[line.op] for line in plan.program.instructions if isinstance(line, Run)]
                    found = [
                        (op.kind.removeprefix("lowtide."), graph.tensors[op.inputs[0]].shape)
                        for op in ops
                        if op.kind.removeprefix("lowtide.") in COLLECTIVES
                    ]
                    assert found == expected[0]
                    planned += len(ops) > len(graph.ops) or only != "recompute"
    assert planned > 4


def trained(step, model, rows=(16,)):
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number in range(6):
        loss = step(model, batch(rows[number % len(rows)], number))
        loss.backward()
        found += [loss.detach(), *(local_of(p.grad).clone() for p in model.parameters())]
        found.append([(type(p.grad), getattr(p.grad, "placements", None)) for p in model.parameters()])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found


def same(one, other):
    pairs = list(zip(one, other, strict=True))
    return all(same_bits(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_training_gives_the_same_bits_with_each_collective_once():
    with group_of_two() as mesh:
        model = parallel(mesh)
        x = batch(256)
        step = lowtide.fit(loss_of, model, x, **OPTIONS | {"budget": "75%", "cost": "measured"})
        assert step.plan.decisions.recomputed > 0
        for function in (loss_of, step):
            with Recorded() as seen:
                function(model, batch(256)).backward()
            assert seen.calls == [
                ("all_reduce", (256, 8)),
                ("all_reduce", (256, 4)),
                ("all_reduce", (256, 8)),
            ]
        model.zero_grad()
        _, taken = watch_cpu(lambda _: step(model, x).backward())
        given = sum(local_of(one).nbytes for one in (x, *model.parameters()))
        assert given + taken.peak_bytes <= step.plan.budget_bytes
        model.zero_grad()
        assert same(trained(loss_of, parallel(mesh), (256,)), trained(step, model, (256,)))
        assert all(isinstance(p, DTensor) and isinstance(p.data, DTensor) for p in model.parameters())
        found = {t.name: t.bytes for t in step.plan.graph.tensors if t.role is Role.PARAMETER}
        assert found == {name: local_of(p).nbytes for name, p in model.named_parameters()}
        assert found["up.weight"] == 16 * 8 * 4  # the half of it that this process has


def test_other_shapes_and_the_backend_give_the_same_bits():
    with group_of_two() as mesh:
        expected = trained(loss_of, parallel(mesh), rows=(16, 24, 40))
        step = torch.compile(loss_of, backend="lowtide", options=OPTIONS | {"budget": "90%"})
        assert same(expected, trained(step, parallel(mesh), rows=(16, 24, 40)))


# what is refused


def test_a_step_in_several_graphs_is_refused_with_the_way_out():
    def broken(model, x):
        y = model(x)
        torch._dynamo.graph_break()
        return y.square().mean()

    with group_of_two() as mesh:
        model = parallel(mesh)
        with pytest.raises(
            CaptureError, match=r"(?s)graph_break.*must be captured as one graph.*Take out what"
        ):
            lowtide.fit(broken, model, batch(), **OPTIONS)
        step = torch.compile(broken, backend="lowtide", options=OPTIONS)
        with pytest.raises(CaptureError, match="must be captured as one graph"):
            step(model, batch())


def test_a_collective_of_the_users_own_in_several_graphs_is_refused():
    def broken(x):
        y = all_reduce(x * 2, "sum", dist.group.WORLD)
        torch._dynamo.graph_break()
        return y.square().mean()

    with group_of_two(), pytest.raises(CaptureError, match="must be captured as one graph"):
        lowtide.fit(broken, batch(), **OPTIONS)


def test_a_model_that_is_split_and_sharded_is_refused_with_the_way_out():
    with group_of_two(shape=(2, 2)) as mesh:
        model = parallel(mesh["inner"])
        fully_shard(model, mesh=mesh["outer"])
        with pytest.raises(CaptureError, match=r"sharded by fully_shard and split.*take one of the two"):
            lowtide.fit(loss_of, model, batch(), **OPTIONS)


def test_no_tiles_are_cut_where_other_processes_take_part():
    with group_of_two() as mesh:
        captured = lowtide.capture(loss_of, parallel(mesh), batch())
    with pytest.raises(CaptureError, match="other processes take part"):
        Tiling(captured.joint)


def gradients(model, step, *batch):
    model.zero_grad()
    step(model, *batch).backward()
    return [None if p.grad is None else local_of(p.grad).clone() for p in model.parameters()]


@pytest.mark.parametrize("frozen", [["up.weight"], ["up.weight", "up.bias"], ["down.bias"], ["wide.weight"]])
def test_frozen_parameters_that_are_split_leave_the_gradients_of_others_alone(frozen):
    with group_of_two() as mesh:
        model, x = parallel(mesh), torch.randn(6, 8)
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        expected = gradients(model, loss_of, x)
        step = lowtide.fit(loss_of, model, x, **OPTIONS)
        assert all(map(same_bits, gradients(model, step, x), expected))


def test_a_batch_may_be_split_too():
    with group_of_two() as mesh:
        torch.manual_seed(0)
        model = distribute_module(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), mesh)
        batch = [distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]) for _ in range(2)]

        def loss(model, x, y):
            return nn.functional.mse_loss(model(x), y)

        expected = gradients(model, loss, *batch)
        step = lowtide.fit(loss, model, *batch, **OPTIONS)
        assert all(map(same_bits, gradients(model, step, *batch), expected))


@pytest.mark.parametrize("talk", [dist.all_reduce, lambda _: dist.barrier()])
def test_what_talks_between_graphs_is_refused_before_anything_is_sent(talk):
    def broken(model, x):
        h = model(x)
        torch._dynamo.disable(talk)(h.detach().clone())
        return h.square().mean()

    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    with group_of_two(silent=True), pytest.raises(CaptureError, match="in code that torch does not capture"):
        lowtide.fit(broken, model, x, **OPTIONS)


def test_data_parallel_models_are_planned_without_the_others():
    with group_of_two():
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        with unsynchronised([nn.Sequential(model)]):
            assert not model.require_backward_grad_sync
            assert not model.require_forward_param_sync
        assert model.require_backward_grad_sync
        assert model.require_forward_param_sync


def test_a_batch_that_is_still_under_way_is_refused_with_the_way_out():
    with group_of_two():
        coming = all_gather_tensor(torch.randn(8, 4), 0, dist.group.WORLD)
        with pytest.raises(CaptureError, match="still under way"):
            lowtide.fit(loss_of, nn.Linear(4, 4), coming, **OPTIONS)
        coming.wait()
