"""Operators and values that are not what they seem: exact all the same."""

import pytest
import torch
from torch import nn

from lowtide.execute.backend import PROGRAMS, compile_with


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.library.custom_op("lowtidetest::sigmoid", mutates_args=(), tags=(torch.Tag.pointwise,))
def three_times(x: torch.Tensor) -> torch.Tensor:
    """Named like an operator of torch that can run in place, and something else."""
    return x * 3 + 1


three_times.register_fake(torch.empty_like)
three_times.register_autograd(lambda ctx, grad: grad * 3)


@torch.library.custom_op("lowtidetest::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """Random, and does not say so."""
    return x * torch.rand_like(x)


noise.register_fake(torch.empty_like)
noise.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output / inputs[0]),
)


def pieces(layer, x):
    h = layer(x)
    return torch.unsafe_split(h, 6, 0)[0].sigmoid().sum() + h.square().sum()


def chunks(layer, x):
    return sum(part.tanh().sum() for part in torch.unsafe_chunk(layer(x), 3, 0))


def custom(layer, x):
    return layer(three_times(layer(x) + 1)).sum()


def random(layer, x):
    return layer(noise(layer(x))).tanh().sum()


def outcome(function, step):
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(6, 4, requires_grad=True)
    loss = step(layer, x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in layer.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("function", [pieces, chunks, custom, random])
def test_strange_operators_are_exact(function, program):
    compiled = torch.compile(
        function, backend=lambda m, i: compile_with(m, i, PROGRAMS[program]), fullgraph=True
    )
    expected, got = outcome(function, function), outcome(function, compiled)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def blended(x, s):
    return x.mul(s).add(x, alpha=1 - s)


def leaky(x, s):
    return nn.functional.leaky_relu(x - 0.5, s).clamp(max=s)


@pytest.mark.parametrize("options", [{}, {"budget": "100%"}])
@pytest.mark.parametrize("function", [blended, leaky])
def test_a_python_number_that_changes_from_call_to_call(function, options, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    compiled = torch.compile(function, backend="lowtide", options=options, fullgraph=True)
    for s in (0.1, 0.7, 1 / 3, 2.5):
        assert torch.equal(compiled(torch.ones(3), s), function(torch.ones(3), s)), s


class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x, decay):
        y = self.layer(x)
        self.mean.mul_(decay).add_(y.detach().mean(0), alpha=1 - decay)
        return y.square().sum()


def test_a_schedule_of_averages():
    torch.manual_seed(0)
    ours, eager = Average(), Average()
    ours.load_state_dict(eager.state_dict())
    compiled = torch.compile(ours, backend="lowtide", fullgraph=True)
    for decay in (0.5, 0.75, 0.9, 0.97):
        x = torch.randn(3, 4)
        assert torch.equal(compiled(x, decay), eager(x, decay))
        assert torch.equal(ours.mean, eager.mean)


def test_hooks_on_what_is_saved():
    def function(layer, x):
        return layer(layer(x).tanh()).tanh().sum()

    compiled = torch.compile(
        function, backend=lambda m, i: compile_with(m, i, PROGRAMS["offload-all"]), fullgraph=True
    )

    def hooked(layer, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return compiled(layer, x)

    expected, got = outcome(function, function), outcome(function, hooked)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
