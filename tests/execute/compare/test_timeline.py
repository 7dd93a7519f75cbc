"""The measured timeline: what the program holds, storage by storage."""

import weakref

import torch
from torch import nn

from lowtide.cost.watch import Allocations, Marker
from lowtide.execute.compare.compare import compare
from lowtide.execute.compare.timeline import StorageMarker
from lowtide.graph import Lifetime
from lowtide.plan.program.instructions import Run
from lowtide.plan.program.simple import recompute_all, store_all


def setup():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
    return model, (torch.randn(32, 64),)


def loss(model, x):
    return model(x).square().mean()


def compared(planner):
    torch._dynamo.reset()
    model, batch = setup()
    return compare(model, batch, loss, planner, repeats=1)


def test_an_entry_for_every_run():
    found = compared(recompute_all)
    assert len(found.recording.operators) == len(found.recording.timeline.live_bytes) == found.runs
    assert found.runs > found.operators


def test_the_largest_entry_is_the_measured_peak():
    found = compared(store_all)
    assert abs(found.recording.timeline.peak_bytes - found.measured.peak_bytes) <= 64


def test_storages_live_as_the_simulation_says():
    found = compared(store_all)
    lives = found.recording.timeline.lifetimes
    assert lives
    assert all(one.first <= one.last for one in lives)
    held = [sum(o.bytes for o in lives if o.first <= k <= o.last) for k in range(found.runs)]
    assert max(held) <= found.recording.timeline.peak_bytes
    runs = [line.op for line in found.program.instructions if isinstance(line, Run)]
    assert len(held) == len(runs)


def test_recomputing_holds_less_at_the_end_of_forward():
    plain, again = compared(store_all), compared(recompute_all)
    boundary = sum(isinstance(line, Run) for line in plain.program.forward)

    def across(found):
        return sum(o.bytes for o in found.recording.timeline.lifetimes if o.first < boundary <= o.last)

    assert across(again) < across(plain)


def test_following_keeps_nothing_alive():
    marker = StorageMarker(Marker())
    marker.before(0)
    tensor = torch.ones(8)
    marker.after(0)
    marker.left({5: tensor})
    gone = weakref.ref(tensor)
    del tensor
    assert gone() is None
    marker.before(1)
    marker.after(1)
    timeline = marker.timeline(Allocations(32, 0, {0: [(0, 32, 32)], 1: [(0, 0, 0)]}), 100)
    assert timeline.lifetimes == (Lifetime(5, 32, 0, 0),)
    assert timeline.live_bytes == (132, 100)
