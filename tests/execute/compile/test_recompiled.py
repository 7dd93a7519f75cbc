"""Torch's limit of eight recompilations reaches nobody."""

import itertools

import pytest
import torch
from torch import nn

import lowtide
from lowtide.execute.compile.first_call import FirstCall

OPTIONS = {"budget": "100%", "cost": "estimated", "time_limit": 0.2, "cache": False, "verify": False}
MORE = 9
"""More than torch would compile."""


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()


@pytest.fixture
def captures(monkeypatch):
    """How many functions were captured."""
    count = itertools.count(1)
    seen, made = [], FirstCall.made

    def counted(self, arguments):
        seen.append(next(count))
        return made(self, arguments)

    monkeypatch.setattr(FirstCall, "made", counted)
    return seen


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x).square().mean()


def loss_of(model, x):
    return model(x).square().mean()


def scaled(model, x, scale):
    return (model(x) * scale).square().mean()


def gradient(model):
    found, model.weight.grad = model.weight.grad, None
    return found


def test_one_function_is_fitted_as_often_as_one_likes():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    for _ in range(MORE):
        lowtide.fit(loss_of, model, x, **OPTIONS)(model, x).backward()


def test_a_counter_in_forward_goes_on_as_in_eager_and_nothing_is_captured_again(captures):
    model, x = Counting(), torch.randn(2, 4)
    step = lowtide.fit(model, x, **OPTIONS)
    assert model.calls == 0, "fitting leaves the user's objects as they were"
    for k in range(MORE):
        step(x).backward()
        assert model.calls == k + 1
    assert len(captures) <= 2, "once more where torch sees that it changes"


def test_each_shape_is_captured_once(captures):
    model = nn.Linear(4, 4)
    step = lowtide.fit(loss_of, model, torch.randn(2, 4), **OPTIONS)
    for _, rows in itertools.product(range(2), range(1, MORE + 1)):
        step(model, torch.randn(rows, 4)).backward()
    assert len(captures) <= MORE + 1, "one more where torch sees that sizes change"


@pytest.mark.parametrize("values", [[0.5 + k / 7 for k in range(MORE)], list(range(2, 2 + MORE))])
def test_a_number_that_changes_is_that_of_eager(values):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    step = lowtide.fit(scaled, model, x, values[0], **OPTIONS)
    for value in values:
        scaled(model, x, value).backward()
        expected = gradient(model)
        step(model, x, value).backward()
        assert torch.equal(gradient(model), expected)


def test_a_tensor_with_one_number_is_no_number_of_the_code(captures):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    step = lowtide.fit(scaled, model, x, torch.tensor(2), **OPTIONS)
    for value in range(2, 2 + MORE):
        scaled(model, x, torch.tensor(value)).backward()
        expected = gradient(model)
        step(model, x, torch.tensor(value)).backward()
        assert torch.equal(gradient(model), expected)
    assert len(captures) == 1
