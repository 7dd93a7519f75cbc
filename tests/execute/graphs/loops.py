"""Training loops with everything that users do between steps."""

import copy
import random
import time

import torch
from torch import nn


class Network(nn.Module):
    def __init__(self, dropout=0.1, width=32):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(6))
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(width, 10)

    def forward(self, x):
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return self.last(self.drop(x.mean((2, 3))))


class Dropping(Network):
    """Numbers are drawn in every layer."""

    def forward(self, x):
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x)) * torch.rand_like(x)
        return self.last(x.mean((2, 3)))


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def batches(model, count, rows=None):
    """Images and classes, larger ones on a GPU."""
    device = next(model.parameters()).device
    rows, size = (rows or 32, 64) if device.type == "cuda" else ((rows or 32) // 8, 8)
    numbers = torch.Generator(device).manual_seed(0)
    for _ in range(count):
        x = torch.randn(rows, 3, size, size, device=device, generator=numbers)
        yield x, torch.randint(0, 10, (rows,), device=device, generator=numbers)


def trained(model, step, loop):
    """What a loop leaves behind: losses, parameters, buffers, gradients."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = [loss.detach().clone() for loss in loop(model, step, optimizer)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    values = [*losses, *model.parameters(), *model.buffers(), *gradients]
    return [one.detach().clone() for one in values]


def usual(model, step, optimizer):
    for x, y in batches(model, 8):
        optimizer.zero_grad()
        loss = step(model, x, y)
        loss.backward()
        optimizer.step()
        yield loss


def one_batch(model, step, optimizer):
    """The batch is the same memory, with other values, until it is not."""
    x, y = next(batches(model, 1))
    for number, (values, classes) in enumerate(batches(model, 12)):
        x, y = (x.copy_(values), y.copy_(classes)) if number < 8 else (values, classes)
        optimizer.zero_grad()
        loss = step(model, x, y)
        loss.backward()
        optimizer.step()
        yield loss


def kept_gradients(model, step, optimizer):
    for x, y in batches(model, 8):
        optimizer.zero_grad(set_to_none=False)
        loss = step(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        yield loss


def accumulated(model, step, optimizer):
    for number, (x, y) in enumerate(batches(model, 12)):
        loss = step(model, x, y) / 3
        loss.backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        yield loss


def evaluated(model, step, optimizer):
    state = copy.deepcopy(model.state_dict())
    for number, (x, y) in enumerate(batches(model, 9)):
        optimizer.zero_grad()
        loss = step(model, x, y)
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        yield loss
        model.eval()
        with torch.no_grad():
            yield step(model, x, y)
        model.train()
        if number == 4:
            model.load_state_dict(state)


def other_shapes(model, step, optimizer):
    for number in range(12):
        x, y = next(batches(model, 1, 16 if number % 3 == 1 else 32))
        optimizer.zero_grad()
        loss = step(model, x, y)
        loss.backward()
        optimizer.step()
        yield loss


def held(model, step, optimizer):
    """A user keeps the gradients of earlier steps, and begins steps that never end."""
    kept = []
    for number, (x, y) in enumerate(batches(model, 10)):
        loss = step(model, x, y)
        if number % 4 == 3:
            del loss
            continue
        loss.backward()
        optimizer.step()
        kept.append([p.grad for p in model.parameters()])
        optimizer.zero_grad()
        if number % 3 == 0:
            kept.pop(0)
        yield loss
    for gradients in kept:
        yield from gradients


def moved(model, step, optimizer):
    """Parameters get other memory on the way."""
    for number, (x, y) in enumerate(batches(model, 8)):
        optimizer.zero_grad()
        loss = step(model, x, y)
        loss.backward()
        optimizer.step()
        if number == 3:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        yield loss


def two_at_once(model, step, optimizer):
    previous = None
    for x, y in batches(model, 6):
        loss = step(model, x, y)
        if previous is not None:
            previous.backward()
            optimizer.zero_grad()
            yield previous
        previous = loss


def many(model, step, optimizer, count=10_000):
    """Everything that users do between steps, in a random order, with pauses."""
    chance = random.Random(0)
    state = copy.deepcopy(model.state_dict())
    shapes = {rows: list(batches(model, 4, rows)) for rows in (8, 16, 32)}
    for _ in range(count):
        x, y = chance.choice(shapes[chance.choice((8, 16, 16, 32))])
        if chance.random() < 0.02:
            time.sleep(chance.random() * 0.005)
        if chance.random() < 0.1:
            model.eval()
            with torch.no_grad():
                yield step(model, x, y)
            model.train()
        if chance.random() < 0.01:
            optimizer.param_groups[0]["lr"] *= chance.choice((0.5, 0.9, 1.1))
        if chance.random() < 0.005:
            model.load_state_dict(state)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            loss = step(model, x, y)
            if chance.random() < 0.01:
                del loss  # its backward never comes
                continue
            loss.backward()
            yield loss
        if chance.random() < 0.1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=chance.random() < 0.8)


def shapes_in_turn(model, step, optimizer):
    """Gradients of one shape are kept while another one runs, added to, and given up."""
    for number in range(24):
        x, y = next(batches(model, 1, (32, 16, 8)[number % 3]))
        loss = step(model, x, y)
        if number % 5 == 4:
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        loss.backward()
        optimizer.step()
        yield loss


def shapes_at_once(model, step, optimizer):
    """A step of another shape runs between forward and backward of one."""
    for number in range(10):
        optimizer.zero_grad()
        (x, y), (z, w) = next(batches(model, 1, 32)), next(batches(model, 1, 16))
        first = step(model, x, y)
        if number > 5:
            second = step(model, z, w)
            second.backward()
            yield second
        first.backward()
        optimizer.step()
        yield first


LOOPS = [
    usual, one_batch, kept_gradients, accumulated, evaluated, other_shapes, held, moved, two_at_once,
    shapes_in_turn, shapes_at_once,
]  # fmt: skip
