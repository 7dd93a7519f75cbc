"""A step of the user's on a mesh: loss, gradients, updates and evaluation are those of one device."""

import copy
import os

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import RunError
from lowtide.execute.shards.arguments import call_key
from lowtide.execute.shards.split import copy_state, cut_model, refuse_cut
from lowtide.graph import SUM, Rect
from lowtide.plan.check.time import seconds_of

BUDGET = 36_000
"""Less than one device takes."""
OPTIONS = {"time_limit": 1.0, "cost": "estimated", "only": "recompute", "verify": False}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.norm, self.last = nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def loss_of(model, batch, *, scale):
    """The second tensor is read first."""
    wanted = batch["y"] * scale
    return (model(batch["x"]) - wanted).square().mean()


def joined(rank, port, count=2):
    """This process as torchrun starts it."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def saved(rank, step, model, batch, folder):
    """What was saved goes on in a model that never was there as a whole."""
    optimizer = torch.optim.Adam(model.parameters())
    step.save(folder, model, optimizer, number=7)
    with torch.device("meta"):
        other = Network().double()
    again = lowtide.fit(loss_of, other, batch, scale=2.0, budget=BUDGET, mesh=2, **OPTIONS)
    with pytest.raises(RunError, match="has no values yet; call"):
        again(other, batch, scale=2.0)
    assert again.load(folder, other, optimizer) == {"number": 7}
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    assert torch.equal(again(other, batch, scale=2.0), step(model, batch, scale=2.0))
    whole = {name: torch.randn(shape).double() for name, shape in step.shapes.items()}
    again.load_state(other, whole)
    for name, value in other.named_parameters():
        assert torch.equal(value, whole[name][again.boxes[name].slices()])
    with pytest.raises(RunError, match=r"is missing in the state_dict; .* Give the state_dict"):
        again.load_state(other, {})


def trained(rank, port, folder):
    joined(rank, port)
    torch.manual_seed(0)
    model = Network().double()
    batch = {"x": torch.randn(1, 3, 33, 21).double(), "y": torch.randn(1, 2, 17, 11).double()}
    alone, refused = copy.deepcopy(model), []
    for mesh in (3, "two", 2 if rank else (1, 2)):
        with pytest.raises(RunError) as caught:
            lowtide.fit(loss_of, model, batch, scale=2.0, budget="100%", mesh=mesh, **OPTIONS)
        refused.append(str(caught.value))
    if rank:
        model.last.bias.data += 1
    with pytest.raises(RunError) as caught:
        lowtide.fit(loss_of, model, batch, scale=2.0, budget="100%", mesh=2, **OPTIONS)
    refused.append(str(caught.value))
    model = copy.deepcopy(alone)
    own = BUDGET if rank else 2**30  # the split is chosen for the smallest one
    step = lowtide.fit(loss_of, model, batch, scale=2.0, budget=own, mesh=2, **OPTIONS)
    assert step.plan.budget_bytes >= step.plan.predicted.peak_bytes
    assert step.communications
    assert "device" in step.explain()
    assert "along axis 0, 2 devices: a message takes" in step.explain()
    (speed,) = step.here.speeds
    told = {"how fast they are": repr(speed)}
    step.here.meeting.agree("compare speeds", told, "All have to know the same")
    assert 0 < speed.latency < 60
    assert 0 < speed.sum_latency < 60
    sums = {k for k, op in enumerate(step.plan.graph.ops) if op.kind == SUM}
    assert sums
    assert sums <= step.plan.wire_seconds.keys()
    took = seconds_of(step.plan.graph, step.plan.program, step.plan.seconds, {}, None, step.plan.wire_seconds)
    assert step.plan.predicted.seconds == pytest.approx(took)
    assert step.predicted_seconds >= took * (1 - 1e-9)
    pairs = [(m, torch.optim.Adam(m.parameters(), lr=0.1)) for m in (model, alone)]
    for number in range(2):
        before = step.sent_bytes
        losses = []
        for (one, _), run in zip(pairs, (step, loss_of), strict=True):
            losses.append(run(one, batch, scale=2.0))
            losses[-1].backward()
        assert step.sent_bytes - before == step.planned_wire_bytes > 0
        assert torch.allclose(*losses, rtol=1e-12)
        expected = dict(alone.named_parameters())
        for name, value in model.named_parameters():
            box = step.boxes[name].slices()
            assert torch.allclose(value.grad, expected[name].grad[box], rtol=1e-10, atol=1e-14), name
        wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        assert torch.allclose(step.clip_grad_norm_(model, 0.1), wanted, rtol=1e-12)
        for name, value in model.named_parameters():
            box = step.boxes[name].slices()
            assert torch.allclose(value.grad, expected[name].grad[box], rtol=1e-10, atol=1e-14), name
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
        state = {**expected, **dict(alone.named_buffers())}
        for name, box in step.boxes.items():
            value = dict(model.named_parameters()).get(name, dict(model.named_buffers()).get(name))
            assert torch.allclose(value, state[name][box.slices()], rtol=1e-10, atol=1e-12), name
        with torch.no_grad():
            boxes = [box for _, box in step.inputs]
            parts = {name: batch[name][box.slices()] for name, box in zip(("x", "y"), boxes, strict=True)}
            whole = step(model, batch, scale=2.0)
            assert torch.equal(step.with_parts(model, parts, scale=2.0), whole)
            for _ in range(2):  # statistics are updated as often
                loss_of(alone, batch, scale=2.0)
            with pytest.raises(RunError, match=r"are not the parts of a batch .*`step.inputs` says"):
                step.with_parts(model, parts | {"x": torch.zeros(1, 3, 5, 5)}, scale=2.0)
        if number == 0:  # evaluation between two steps, of another size
            other = {"x": torch.randn(1, 3, 25, 13).double(), "y": torch.randn(1, 2, 13, 7).double()}
            model.eval()
            alone.eval()
            with torch.no_grad():
                found, wanted = step(model, other, scale=1.0), loss_of(alone, other, scale=1.0)
            assert torch.allclose(found, wanted, rtol=1e-12)
            model.train()
            alone.train()
    saved(rank, step, model, batch, folder)
    torch.distributed.destroy_process_group()
    if rank == 0:
        os.write(1, "\n".join(refused).encode())


def test_calls_are_told_apart_by_all_that_changes_what_is_captured():
    model, x = Network(), torch.zeros(1, 3, 8, 8)
    known = [call_key(model, [x], {})]
    assert call_key(model, [x + 1], {}) == known[0]
    with torch.autocast("cpu"):
        known.append(call_key(model, [x], {}))
    model.first.weight.requires_grad_(False)
    known.append(call_key(model, [x], {}))
    model.eval()
    known += [call_key(model, [x], {}), call_key(model, [x[:, :, :4]], {}), call_key(model, [x, 2], {})]
    assert len(set(known)) == len(known)


def test_a_model_that_is_split_is_refused():
    model = nn.Linear(4, 4)
    refuse_cut(model)
    cut_model(model, {"weight": Rect((0, 0), (2, 4))})
    assert model.weight.shape == (2, 4)
    with pytest.raises(RunError, match="the model is split by another step"):
        refuse_cut(model)


def test_buffers_that_no_state_dict_has_stay():
    model = nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.ones(2), persistent=False)
    copy_state(model, model.state_dict() | {"weight": torch.tensor([3.0, 4.0])}, {}, {}, all_of_it=False)
    assert model.weight.tolist() == [3, 4]
    with pytest.raises(RunError, match="'mask' is missing in the state_dict"):
        copy_state(model, model.state_dict(), {}, {}, all_of_it=True)


def test_training_and_evaluation_are_those_of_one_device(forks, free_port, tmp_path):
    forks.spawn(trained, (free_port, str(tmp_path / "saved")), 2)
    refused = forks.printed()[0].splitlines()
    assert "a mesh of 3 has 3 devices, and 2 processes run" in refused[0]
    assert "mesh='two': give a number of devices" in refused[1]
    assert refused[2].startswith("rank 0 and rank 1 differ in the mesh: 1x2 and 2.")
    assert "rank 0 and rank 1 differ in values of parameters" in refused[3]
