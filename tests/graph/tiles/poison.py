"""Captured operators run with everything outside of the named parts made no number: what is read there shows."""

import torch
from torch import fx


def only(value, rect):
    """The value inside of the Rect, no number outside; whole numbers stay."""
    if not value.dtype.is_floating_point:
        return value.clone()
    kept = torch.full_like(value, torch.nan)
    kept[rect.slices()] = value[rect.slices()]
    return kept


def leaves_of(captured, named):
    """The leaves of a step by tensor, from their names; every incoming gradient is one."""
    graph = captured.step.graph
    found = {t: named[one.name].detach() for t, one in enumerate(graph.tensors) if one.name in named}
    return found | {t: torch.ones(graph.tensors[t].shape) for t in captured.joint.tangents}


def run(captured, ops, given, parts=None, drawn=None):
    """What operators give; with ``parts`` only there. Random ones give again what is ``drawn`` already."""
    graph, joint = captured.step.graph, captured.joint
    values = dict(given)

    def value_of(node):
        tensor = joint.tensor_of[node]  # what is not there is asked for its shape alone
        return values[tensor] if tensor in values else torch.full(graph.tensors[tensor].shape, torch.nan)

    for k in ops:
        call = joint.calls[k]
        arguments, options = fx.map_arg((call.args, dict(call.kwargs)), value_of)
        known = drawn is not None and k in drawn
        results = drawn[k] if known else call.target(*arguments, **options)
        if drawn is not None and graph.ops[k].random:
            drawn[k] = results
        for t, value in zip(call.results, results if call.several else (results,), strict=True):
            if t >= 0 and (parts is None or t in parts):
                values[t] = value.clone() if parts is None else only(value, parts[t])
    return values


def run_tiled(captured, tiling, given, whole, drawn, parts_of=lambda tile: tile.parts):
    """The tensor that is cut, put together from its tiles; ``whole`` is what the untiled step gave."""
    found = torch.full_like(whole[tiling.tensor], torch.nan)
    for tile in tiling.tiles:
        parts = parts_of(tile)
        mine = {t: only(value, parts[t]) for t, value in given.items() if t in parts}
        if tiling.given is not None:
            mine[tiling.given] = only(whole[tiling.given], parts[tiling.given])
        made = run(captured, tiling.ops, mine, parts, drawn)
        found[tile.own.slices()] = made[tiling.tensor][tile.own.slices()]
    return found
