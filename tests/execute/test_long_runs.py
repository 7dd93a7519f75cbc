"""Hundreds of steps leave memory as it was, and the model stays the user's: copied, pickled, freed."""

import copy
import gc
import pickle
import resource
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide

SETTLED = 150
PAGES = 4 << 20
"""Bytes by which the process may grow over all steps: Python's own lists and caches."""


class Network(nn.Module):
    """Dropout, BatchNorm and enough layers to recompute some."""

    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
        self.layers, self.norm = nn.Sequential(*layers), nn.BatchNorm1d(32)

    def forward(self, x):
        return self.norm(self.layers(x))


class Breaking(Network):
    """The same in two graphs."""

    def forward(self, x):
        y = self.layers(x)
        return self.norm(y) if y.sum().item() < 1e9 else y


def loss_of(model, x):
    return model(x).square().mean()


def resident_bytes():
    """What the process has in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs Linux to see the memory of the process"
)
@pytest.mark.parametrize(("kind", "steps"), [(Network, 500), (Breaking, 200)])
def test_hundreds_of_steps_take_no_more_memory_than_the_first(kind, steps):
    torch._dynamo.reset()
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = lowtide.fit(loss_of, model, torch.randn(64, 32), budget="70%", time_limit=0.3)
    before = 0
    for k in range(steps):
        optimizer.zero_grad()
        step(model, torch.randn(64, 32)).backward()
        optimizer.step()
        if k == SETTLED:
            gc.collect()
            before = resident_bytes()
    gc.collect()
    assert resident_bytes() - before < PAGES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("kind", "steps"), [(Network, 1000), (Breaking, 200)])
def test_a_thousand_steps_take_no_more_memory_on_a_gpu(kind, steps):
    torch._dynamo.reset()
    model = kind().cuda()

    def batch():  # more than the workspaces of libraries
        return torch.randn(200_000, 32, device="cuda")

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = lowtide.fit(loss_of, model, batch(), budget="70%", time_limit=0.3)
    before = None
    for k in range(steps):
        optimizer.zero_grad()
        step(model, batch()).backward()
        optimizer.step()
        if k == SETTLED:
            gc.collect()
            before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident_bytes()
    gc.collect()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before[:2]
    assert resident_bytes() - before[2] < PAGES


def test_a_fitted_model_is_copied_pickled_and_freed():
    torch._dynamo.reset()
    model, x = Network(), torch.randn(64, 32)
    step = lowtide.fit(loss_of, model, x, budget="80%", time_limit=0.3)
    step(model, x).backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        torch.manual_seed(0)
        loss = loss_of(other, x)
        torch.manual_seed(0)
        assert torch.equal(loss, step(other, x))
    held = weakref.ref(model), weakref.ref(next(model.parameters()).untyped_storage())
    del model, other, step, loss
    gc.collect()
    assert [one() for one in held] == [None, None]
