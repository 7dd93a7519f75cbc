"""Changes to Programs and plans, the same for the same random generator."""

import math

import msgspec

from lowtide.graph import Rect
from lowtide.plan.program.instructions import Drop, Fetch, Loop, Program, Run, Send

replace = msgspec.structs.replace


def mutated(draw, graph, program, able=()):
    """The Program with one to three changes; often without its drops, which hide what is wrong otherwise."""
    if draw.random() < 0.5:
        program = _without_drops(program)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        program = _changed(draw, graph, program, able)
    return program


def _without_drops(program):
    """Everything that is not sent to the host is held to the end."""
    sent = {line.tensor for line in program.instructions if isinstance(line, Send)}

    def kept(lines):
        left = [Drop(tuple(sent.intersection(x.tensors))) if isinstance(x, Drop) else x for x in lines]
        return tuple(x for x in left if not isinstance(x, Drop) or x.tensors)

    return replace(program, forward=kept(program.forward), backward=kept(program.backward))


def _changed(draw, graph, program, able):
    lines, cut = list(program.instructions), len(program.forward)
    bodies = program.bodies
    how = draw.choice(LINES + (TILES if bodies else ()))
    if how in TILES:
        return _with_tiles(draw, graph, program, how)
    if how == "border":
        cut = draw.randint(0, len(lines))
    elif how == "insert":
        at = draw.randint(0, len(lines))
        lines.insert(at, _some_line(draw, graph, bodies))
        cut += at < cut
    elif how in ("swap runs", "move run", "in place", "send"):
        cut = _among_runs(draw, graph, lines, cut, how, able)
    elif lines:
        cut = _rearranged(draw, graph, lines, cut, how)
    return Program(tuple(lines[:cut]), tuple(lines[cut:]), bodies)


def _rearranged(draw, graph, lines, cut, how):
    """Change the lines; where the forward part ends then."""
    a, b = draw.randrange(len(lines)), draw.randrange(len(lines))
    if how == "swap neighbours":
        b = min(a + 1, len(lines) - 1)
    if how in ("swap", "swap neighbours"):
        lines[a], lines[b] = lines[b], lines[a]
    elif how == "move":
        lines.insert(b, lines.pop(a))
    elif how == "move a little":
        lines.insert(max(0, a + draw.randint(-4, 4)), lines.pop(a))
    elif how == "delete":
        del lines[a]
        cut -= a < cut
    elif how == "duplicate":
        lines.insert(b, lines[a])
        cut += b < cut
    elif how == "change":
        lines[a] = _other(draw, graph, lines[a])
    return cut


LINES = (
    "swap", "swap neighbours", "swap neighbours", "move", "move a little", "move a little", "delete", "duplicate",
    "insert", "change", "change", "border", "swap runs", "swap runs", "swap runs", "move run", "move run", "move run",
    "in place", "in place", "in place", "send", "send",
)  # fmt: skip
TILES = ("tiles", "body", "body", "body", "body list", "loop")


def _among_runs(draw, graph, lines, cut, how, able):
    """Change runs alone, or send what one of them made; where the forward part ends then."""
    runs = [k for k, line in enumerate(lines) if isinstance(line, Run) and 0 <= line.op < len(graph.ops)]
    if len(runs) < 2:
        return cut
    if how in ("swap runs", "move run"):
        for _ in range(12):  # most are refused for what is not there yet, which says little
            tried, (a, b) = list(lines), draw.sample(runs, 2)
            if how == "swap runs":
                tried[a], tried[b] = tried[b], tried[a]
            else:
                tried.insert(b, tried.pop(a))
            if _made_before_read(graph, tried):
                break
        lines[:] = tried
        return cut
    a = (
        draw.choice([k for k in runs if lines[k].op in able] or runs)
        if how == "in place"
        else draw.choice(runs)
    )
    op = graph.ops[lines[a].op]
    if how == "in place" and op.inputs and op.outputs:
        lines[a] = replace(lines[a], in_place=None if lines[a].in_place == 0 else 0)
    elif how == "send" and op.outputs:
        t = draw.choice(op.outputs)
        places = sorted(draw.randint(a + 1, len(lines)) for _ in range(3))
        new = [Send(t), Drop((t,)), Fetch(t)]
        chosen = [k for k in range(3) if k == 0 or draw.random() < 0.8]
        for k in reversed(chosen):
            lines.insert(places[k], new[k])
            cut += places[k] < cut
    return cut


def _made_before_read(graph, lines):
    """Whether operators read what others have made, as far as nothing is dropped."""
    made = {t for op in graph.ops for t in op.outputs if t not in op.inputs}
    there = set(range(len(graph.tensors))) - made
    for line in lines:
        if isinstance(line, Run) and 0 <= line.op < len(graph.ops):
            if not there.issuperset(graph.ops[line.op].inputs):
                return False
            there.update(graph.ops[line.op].outputs)
    return True


def _some_line(draw, graph, bodies):
    tensor = draw.randrange(len(graph.tensors))
    return draw.choice([Drop((tensor,)), Send(tensor), Fetch(tensor), Run(draw.randrange(len(graph.ops)))])


def _other(draw, graph, line):
    """The instruction with one field changed."""
    tensor, op = draw.randint(-1, len(graph.tensors)), draw.randint(-1, len(graph.ops))
    if isinstance(line, Drop):
        others = list(line.tensors)
        how = draw.randrange(3)
        if how == 0 and others:
            del others[draw.randrange(len(others))]
        elif how == 1 and others:
            others[draw.randrange(len(others))] = tensor
        else:
            others.append(tensor)
        return Drop(tuple(others))
    if isinstance(line, Send | Fetch):
        return draw.choice([replace(line, tensor=tensor), Send(line.tensor), Fetch(line.tensor)])
    how = draw.choice(["op", "in_place", "in_place", "in_place", "short", "loop"])
    if how == "op":
        return replace(line, op=op)
    if how == "short":
        return replace(line, short=not line.short)
    if how == "loop":
        return Run(line.op) if isinstance(line, Loop) else Loop(line.op)
    if line.in_place is not None and draw.random() < 0.5:
        return replace(line, in_place=None)
    return replace(line, in_place=draw.choice([0, 0, 0, 0, 1, -1, 5]))


def _with_tiles(draw, graph, program, how):
    bodies = list(program.bodies)
    if how == "body":
        k = draw.randrange(len(bodies))
        body = bodies[k]
        inside = mutated(draw, body.graph, body.program, body.able)
        bodies[k] = replace(body, program=inside)
        if draw.random() < 0.1:
            bodies[k] = replace(body, workspace_bytes=body.workspace_bytes[1:], seconds=body.seconds[2:])
        return replace(program, bodies=tuple(bodies))
    if how == "body list":
        change = draw.randrange(3)
        if change == 0:
            bodies.append(draw.choice(bodies))
        elif change == 1:
            del bodies[draw.randrange(len(bodies))]
        else:
            k = draw.randrange(len(bodies))
            able = draw.sample(range(len(bodies[k].graph.ops)), min(3, len(bodies[k].graph.ops)))
            bodies[k] = replace(bodies[k], able=() if draw.random() < 0.5 else tuple(able))
        return replace(program, bodies=tuple(bodies))
    lines, cut = list(program.instructions), len(program.forward)
    loops = [k for k, line in enumerate(lines) if isinstance(line, Loop)]
    if not loops:
        return program
    at = draw.choice(loops)
    changed = _other_loop(draw, lines[at]) if how == "loop" else _other_tiles(draw, lines[at])
    for k in loops if draw.random() < 0.5 else [at]:
        if lines[k] == lines[at]:
            lines[k] = changed
    return Program(tuple(lines[:cut]), tuple(lines[cut:]), program.bodies)


def _other_loop(draw, line):
    return draw.choice(
        [
            replace(line, cut=(*line.cut, "nope")),
            replace(line, cut=()),
            replace(line, end="" if line.end else "nope"),
            replace(line, channels_last=not line.channels_last),
            replace(line, own="" if line.own else "primals_1"),
        ]
    )


def _other_tiles(draw, line):
    tiles = list(line.tiles)
    if not tiles:
        return line
    k = draw.randrange(len(tiles))
    how = draw.randrange(7)
    if how == 0:
        del tiles[k]
    elif how == 1:
        tiles.append(tiles[k])
    elif how == 2:
        tiles[k] = replace(tiles[k], body=tiles[k].body + draw.choice([-1, 1, 9]))
    elif how == 3:
        tiles = []
    elif how == 4:
        draw.shuffle(tiles)
    else:
        box = tiles[k].over
        if box.lo:
            d, by = draw.randrange(len(box.lo)), draw.choice([-2, -1, 1, 2])
            ends = [list(box.lo), list(box.hi)]
            ends[draw.randrange(2)][d] += by
            tiles[k] = replace(tiles[k], over=Rect(tuple(ends[0]), tuple(ends[1])))
    return replace(line, tiles=tuple(tiles))


FIGURES = (
    "plain.peak_bytes", "plain.seconds", "predicted.peak_bytes", "predicted.seconds", "overhead", "bound.seconds",
    "bound.overhead", "gap", "smallest_budget_bytes", "decisions.kept", "decisions.recomputed",
    "decisions.offloaded", "decisions.in_place", "decisions.tiles", "budget_bytes", "beside_bytes",
    "resident_bytes", "solve_seconds", "seconds", "workspace_bytes", "able", "short", "only", "offload", "link",
)  # fmt: skip


def with_other_figure(draw, plan):
    """The plan with one figure changed, and the name of it; None where it stays the same."""
    name = draw.choice(FIGURES)
    inner, _, last = name.rpartition(".")
    owner = getattr(plan, inner) if inner else plan
    before = getattr(owner, last)
    after = _other_figure(draw, before)
    if after == before or (after != after and before != before):
        return name, None
    changed = replace(owner, **{last: after})
    return name, replace(plan, **{inner: changed}) if inner else changed


def _other_figure(draw, value):
    if isinstance(value, dict):
        return dict(list(value.items())[1:]) if value else {draw.randint(-1, 99): -1.0}
    if isinstance(value, tuple):
        if not value:
            return draw.choice([(draw.randint(-3, 10**6),), ("zzz",), ()])
        k = draw.randrange(len(value))
        how = draw.randrange(3)
        other = "zzz" if isinstance(value[k], str) else _other_figure(draw, value[k])
        return value[:k] + value[k + 1 :] if how == 0 else (*value[:k], other, *value[k + 1 :])
    if value is None or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return draw.choice(
            [value + 1, value - 1, value * 2 + 1, 0, -value - 1, 10**30, value + draw.randint(1, 99)]
        )
    return draw.choice(
        [value * 1.01 + 1e-3, value - 0.1, -value - 1.0, math.nan, math.inf, -math.inf, value * 2 + 1]
    )
