"""Steps cut into given tiles, for tests: captured, run plainly tile after tile."""

from unittest.mock import patch

import torch

from lowtide.execute.compare.tiles import plain_tiles
from lowtide.execute.compile.aot import Aot
from lowtide.execute.tiling import plan_tiles as tiling
from lowtide.graph.tiles import Cut, grid_of
from lowtide.trace.eager.layouts import fake_arguments, learned
from lowtide.trace.step.leaves import leaves_of
from lowtide.trace.tiles.owned import Owned
from lowtide.trace.tiles.tiling import Tiling


def program_of(joint, parts, cut=(), end="", **how):
    """The plain Program of the step in so many parts of each axis, and the step that it runs."""
    return plain_tiles(joint, Tiling(joint, cut, end).boxes(parts), cut, end, **how)


def in_tiles(
    function, parts, cut=lambda _: (), seen=None, end=lambda _: "", own=lambda _: None, *, fused=False, **how
):
    """The function, run in tiles; ``cut``, ``end`` and ``own`` choose from the captured step where loops are."""

    def compiled(module, inputs):
        cuts = []

        def planned(joint):
            joint = joint.ungrouped or joint
            program, whole = program_of(joint, parts, cut(joint), end(joint), own=own(joint), **how)
            cuts.append(whole)
            if seen is not None:
                seen.append(program)
            return program

        def once(*_, **__):
            """The step as it was cut for the Program: cutting it again would take as long."""
            return cuts[-1]

        with patch.object(tiling, "looped", once):
            mode = learned().mode()
            traced = Aot(module, leaves_of(module), fake_arguments(mode, inputs), mode)
            traced.fused = fused
            return traced.compiled(planned, lambda _: None, tuple)

    return torch.compile(function, backend=compiled, fullgraph=True, dynamic=False)


def owning(grid, dims=(-2, -1)):
    """Chooses the first input that has a gradient, in a grid of boxes."""

    def chosen(joint):
        pairs = zip(joint.inputs, joint.gradients, strict=False)
        tensors = [joint.graph.tensors[t] for t, g in pairs if t is not None and g is not None]
        image = next(one for one in tensors if one.role == "input")
        return Owned(image.id, grid_of(Cut(grid, dims), image.shape))

    return chosen


def outcome(joint):
    """The one result of a step whose loss is outside."""
    (result,) = joint.outputs
    return joint.graph.tensors[result].id


def gradients(function, model, batch, scale=1.0, seed=0):
    """Loss and gradients of parameters."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = function(model, *batch)
    (loss * scale).backward()
    return loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


_TIMES = 4
"""Tiles may be so many times further from float64 than eager is: they round as often, at other places."""


def assert_as_exact(got, eager, exact):
    """A loss and gradients of tiles are about as far from float64 as those of eager in the same precision.

    Gradients are taken together: a single one may be the small difference of large sums, which kernels add up in an
    order that depends on the size of a tile.
    """
    eps = torch.finfo(got[0].dtype).eps

    def far(values, true):
        return float(
            torch.cat([(value.double() - t).flatten() for value, t in zip(values, true, strict=True)]).norm()
        )

    for part in (slice(0, 1), slice(1, None)):
        size = far(exact[part], [torch.zeros_like(t) for t in exact[part]])
        ours, theirs = far(got[part], exact[part]), far(eager[part], exact[part])
        assert ours <= _TIMES * (theirs + eps * size), (
            f"{ours:.2e} from float64, eager {theirs:.2e}, of {size:.2e}"
        )
