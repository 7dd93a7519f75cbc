"""The first call of a model, run once as it is: some set up what later calls find there.

Hooks are installed, modules are imported, tables are built, often under a lock: code that torch cannot trace,
and that no other call runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.execute.compile.sharded import unsynchronised
from lowtide.execute.compile.trial import untouched
from lowtide.torch_internals import tree_leaves
from lowtide.trace.distributed.stand_ins import nothing_sent

__all__ = ["run_once"]


def run_once(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: Sequence[nn.Module],
) -> bool:
    """Whether forward of a step ran, without gradients and without a trace on tensors.

    Where it fails, the step as it is fails as well, or needs gradients: whoever captures it says so.
    """
    buffers = [buffer for module in modules for buffer in module.buffers()]
    batch = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    devices = {tensor.device for tensor in (*buffers, *batch, *parameters)}
    changing = [
        one for one in (*buffers, *batch) if one.layout is torch.strided and one.device.type != "meta"
    ]
    with contextlib.suppress(Exception), untouched(changing, devices):
        with torch.no_grad(), nothing_sent(), unsynchronised(modules):
            function(*args, **kwargs)
        return True
    return False
