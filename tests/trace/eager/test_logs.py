# ruff: noqa: T201
"""What a step says while it runs is said at every step, and the step is planned as any other."""

import logging
import sys
import warnings

import pytest
import torch
from torch import nn

import lowtide
from lowtide.execute.compile.bits import same_bits

LOG = logging.getLogger("tests.user")


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        print("inside", [1, 2], {"a": None}, sep="|")
        return self.layer(x)


class Speaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Inner()

    def forward(self, x):
        print("rows", x.shape[0], x.dtype, end="!\n")
        hidden = self.first(x)
        LOG.info("the mean of %d rows is %s", len(x), hidden.detach().mean())
        if LOG.isEnabledFor(logging.DEBUG):
            LOG.debug("never")
        LOG.warning(f"the sum is {hidden.sum():.4f}")
        warnings.warn("careful", stacklevel=1)
        return self.second(hidden).square().mean()


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append((record.levelname, record.getMessage()))


@pytest.fixture
def kept(monkeypatch):
    """What the user's code logs, from INFO on."""
    handler, level = Kept(), LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    monkeypatch.setattr(LOG, "propagate", False)
    yield handler
    LOG.removeHandler(handler)
    LOG.setLevel(level)


def said(step, x, capsys, kept):
    """What a step prints, logs and warns of, and the gradients that it leaves."""
    kept.records = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(x).backward()
    careful = [str(one.message) for one in told if str(one.message) == "careful"]
    return capsys.readouterr().out, kept.records, careful


@pytest.mark.parametrize("budget", ["100%", "90%"])
def test_every_step_says_what_eager_says(budget, capsys, kept):
    torch.manual_seed(0)
    model, x = Speaking(), torch.randn(16, 8)
    expected = said(model, x, capsys, kept)
    gradients = [p.grad.clone() for p in model.parameters()]
    step = lowtide.fit(model, x, budget=budget, time_limit=0.3, cache=False)
    assert capsys.readouterr().out == "", "a rehearsal is not a step"
    for _ in range(2):
        model.zero_grad()
        assert said(step, x, capsys, kept) == expected
        assert all(same_bits(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert expected[1][0] == ("INFO", expected[1][0][1])
    assert len(expected[1]) == 2


def test_a_tensor_with_a_gradient_is_shown_without_its_function(capsys):
    def loss(model, x):
        y = model(x)
        print(y.sum())
        return y.square().mean()

    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    step = lowtide.fit(loss, model, x, budget="100%", time_limit=0.3, cache=False)
    step(model, x).backward()
    shown = capsys.readouterr().out
    assert shown == f"{model(x).sum().detach()!r}\n"


def test_other_backends_are_left_alone(capsys):
    def speaks(x):
        print("here", x.shape[0])
        return x + 1

    compiled = torch.compile(speaks, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(torch.ones(3))
    assert capsys.readouterr().out == ""


def test_it_may_go_to_a_file(capsys):
    def loss(model, x):
        print("to a file", file=sys.stderr)
        return model(x).square().mean()

    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    step = lowtide.fit(loss, model, x, budget="100%", time_limit=0.3, cache=False)
    step(model, x)
    assert capsys.readouterr().err == "to a file\n"


def test_named_arguments_may_come_from_the_step(capsys):
    def loss(model, x):
        print("the end is", end=f" {x.sum():.1f}\n")
        return model(x).square().mean()

    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    step = lowtide.fit(loss, model, x, budget="100%", time_limit=0.3, cache=False)
    step(model, x)
    assert capsys.readouterr().out == "the end is 8.0\n"


def test_what_is_changed_later_is_shown_as_it_was_also_inside_of_lists(capsys):
    def loss(model, x):
        y = model(x)
        print("before", y.detach()[0], [y.detach().sum(), 1], {"most": (y.detach().max(), None)})
        y = y.mul_(2)
        print(f"after {y.detach().sum():.4f}")
        return y.square().mean()

    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    step = lowtide.fit(loss, model, x, budget="100%", time_limit=0.3, cache=False)
    loss(model, x)
    expected = capsys.readouterr().out
    step(model, x).backward()
    assert capsys.readouterr().out == expected


def test_a_list_of_tensors_with_gradients_may_be_shown(capsys):
    def loss(model, x):
        y = model(x)
        print([y.sum()], {"most": y.max()})
        return y.square().mean()

    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    loss(model, x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    capsys.readouterr()
    step = lowtide.fit(loss, model, x, budget="100%", time_limit=0.3, cache=False)
    model.zero_grad()
    step(model, x).backward()
    assert all(same_bits(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    y = model(x).detach()
    assert capsys.readouterr().out == f"{[y.sum()]} { ({'most': y.max()}) }\n"
