"""What a step leaves behind once nobody has it."""

import gc
import weakref

import torch
from torch import nn

import lowtide
from lowtide.execute.runtime.interpreter import Interpreter


def loss_of(model, x):
    return model(x).square().mean()


def alive():
    return [one for one in gc.get_objects() if isinstance(one, Interpreter)]


def test_nothing_of_a_step_is_left_but_what_torch_has_compiled():
    """Torch keeps compiled code until it is reset, and nothing else keeps what that holds."""
    torch._dynamo.reset()
    gc.collect()
    before = set(map(id, alive()))
    for number in range(3):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
        step = lowtide.fit(loss_of, model, x, budget="100%", cost="estimated", time_limit=0.2)
        for _ in range(number):
            step(model, x).backward()
        gone = [weakref.ref(one) for one in (step, model, *model.parameters())]
        del step, model
        gc.collect()
        assert [one() for one in gone] == [None] * len(gone)
        torch._dynamo.reset()
        gc.collect()
        assert not set(map(id, alive())) - before
