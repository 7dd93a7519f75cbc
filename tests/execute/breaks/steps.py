"""What a step leaves behind, and what it takes."""

import torch

from lowtide.cost.watch import watch_cpu


def left(step, model, x, seed):
    """The loss, gradients, buffers and the random state behind a step, and its peak."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    found = []

    def run(_):
        loss = step(model, x)
        loss.backward()
        found.append(loss.detach())

    _, seen = watch_cpu(run)
    state = [*model.parameters(), *model.buffers()]
    found += [one.grad for one in model.parameters()] + [one.clone() for one in model.buffers()]
    found.append(torch.get_rng_state())
    return found, seen.peak_bytes + sum(one.nbytes for one in (*state, x))


def same(one, other):
    """Whether two steps left the same behind."""
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True))
