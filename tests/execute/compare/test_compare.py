import itertools
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.errors import RunError
from lowtide.execute.backend import PROGRAMS
from lowtide.execute.compare import subject
from lowtide.execute.compare.compare import compare
from lowtide.execute.compile.user_code import users_step

SMALLER = {"densenet161": "densenet161:batch=2,size=32,classes=10,growth=8,layers=2"}
"""Its usual small size takes long to capture."""
LONG = ("densenet161", "resnet50-inference")
"""They take long to capture: with everything run again is enough."""


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "program"),
    [
        (name, program)
        for name in zoo.names()
        for program in PROGRAMS
        if program != "offload-all" or name in ("alexnet", "gpt2", "unet")
        if program != "plain" or name not in LONG
        # benchmarks/exact.py runs these
        if name not in ("resnet50", "resnet152", "vgg19", "locallyconnected")
    ],
)
def test_the_zoo_is_bitwise_equal_and_its_peak_is_predicted(name, program):
    built = zoo.build(SMALLER.get(name) or zoo.small(name))
    options = {"trains": built.trains, "update": built.ending, "repeats": 0}
    found = compare(built.model, built.batch, built.loss, PROGRAMS[program], **options)
    assert found.loss_equal
    assert found.bitwise
    assert found.max_rel_grad_diff == 0
    assert found.predicted_peak_bytes == pytest.approx(found.measured.peak_bytes, rel=0.005)
    if program == "plain":
        assert found.measured.peak_bytes <= found.eager.peak_bytes * 1.005


def test_the_model_is_left_as_it_was():
    model, batch, loss = small_step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compare(model, batch, loss, PROGRAMS["plain"], update=lambda model: zoo.sgd(model, 0.1), repeats=0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def small_step():
    model = nn.Linear(40, 30)
    return model, (torch.randn(2, 40),), lambda model, x: model(x).square().sum()


def test_parameters_that_differ_after_the_update_are_noticed():
    rates = itertools.count(1)
    found = compare(*small_step(), PROGRAMS["plain"], update=lambda m: zoo.sgd(m, next(rates)), repeats=1)
    assert found.loss_equal
    assert found.max_rel_grad_diff == 0
    assert not found.bitwise


def test_a_peak_inside_the_update_is_predicted():
    def update(model):
        with torch.no_grad():
            for parameter in model.parameters():
                scaled = torch.stack([parameter.grad * k for k in range(20)])
                parameter.sub_(scaled.sum(0), alpha=0.1)

    found = compare(*small_step(), PROGRAMS["plain"], update=update, repeats=1)
    plain = compare(*small_step(), PROGRAMS["plain"], repeats=1)
    assert found.bitwise
    assert found.measured.peak_bytes > plain.measured.peak_bytes + 20 * 40 * 30 * 4
    assert found.predicted_peak_bytes == pytest.approx(found.measured.peak_bytes, rel=0.005)
    assert found.operators == found.runs > plain.operators


@pytest.fixture(
    params=[
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ]
)
def too_large_for_eager(request, monkeypatch):
    """Eager PyTorch runs out of memory."""

    @contextmanager
    def full():
        with users_step():
            raise request.param
        yield

    monkeypatch.setattr("lowtide.execute.compare.compare.users_step", full)


def test_eager_may_run_out_of_memory_while_it_is_timed(monkeypatch):
    model, batch, loss = small_step()
    before = subject.timed

    def full(step, ways, *rest):
        if len(ways) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return before(step, ways, *rest)

    monkeypatch.setattr("lowtide.execute.compare.compare.timed", full)
    with pytest.raises(torch.OutOfMemoryError):
        compare(model, batch, loss, PROGRAMS["plain"], repeats=1)
    said = []
    found = compare(model, batch, loss, PROGRAMS["plain"], repeats=1, alone=True, progress=said.append)
    assert "eager PyTorch runs out of memory while it is timed: nothing is compared" in said
    assert (found.eager, found.loss_equal, found.bitwise, found.max_rel_grad_diff) == (None,) * 4
    assert found.measured.seconds > 0


def test_a_program_may_run_alone_where_eager_runs_out_of_memory(too_large_for_eager):
    model, batch, loss = small_step()
    with pytest.raises(RunError, match="does not fit into the memory .* --budget auto"):
        compare(model, batch, loss, PROGRAMS["plain"], repeats=1)
    said = []
    found = compare(model, batch, loss, PROGRAMS["plain"], repeats=1, alone=True, progress=said.append)
    assert "eager PyTorch runs out of memory: the program runs alone, and nothing is compared" in said
    assert (found.eager, found.loss_equal, found.bitwise, found.max_rel_grad_diff) == (None,) * 4
    assert found.predicted_peak_bytes == pytest.approx(found.measured.peak_bytes, rel=0.005)
    assert found.measured.seconds > 0
    assert found.as_json()["eager"] is None
    assert found.as_file("step", "cpu", None).eager is None
