"""The true optimum of a tiny step over every order of its operators and every recomputation.

Works on the Graph alone and shares no code with the planner. A state is which operators have run, which
storages are held, and how often each was updated. Any operator may run next that finds its values there;
storages are dropped only where a run needs the room, since dropping is free. What a program may need besides
(states of random generators, copies of buffers that only second runs read) is left out: the optimum is that
of a larger set, which no bound may exceed either. Views are made of one storage, and take no time.
"""

import heapq
from itertools import combinations

from lowtide.graph import RESIDENT_ROLES, Phase, Role
from lowtide.plan.program.instructions import Drop, Program, Run


class TooLargeError(Exception):
    """There are too many states."""


class EveryOrder:
    """A step, ready for searches at several budgets.

    ``again`` names the operators that may run a second time; all by default. ``in_turn`` keeps random
    operators, those that run once and those that update a buffer in their order.
    """

    def __init__(self, graph, seconds, workspace=(), able=(), *, again=None, in_turn=True):
        self.graph, self.seconds = graph, seconds
        tensors = graph.tensors
        self.root = graph.storages()
        self.leaf = [tensors[r].role in RESIDENT_ROLES for r in self.root]
        self.ops = [k for k, op in enumerate(graph.ops) if not self._is_view(op)]
        assert all(seconds[k] == 0 for k in range(len(graph.ops)) if k not in self.ops)
        written = {t for op in graph.ops for t in op.outputs}
        self.size = {r: tensors[r].bytes for r in set(self.root) if not self.leaf[r]}
        self.given = frozenset(r for r in self.size if r not in written)
        stay = set(graph.returned)
        stay |= {
            t for t, one in enumerate(tensors)
            if one.gradient_of is not None and tensors[one.gradient_of].role in RESIDENT_ROLES
        }  # fmt: skip
        self.stay_tensors = stay
        self.stay = frozenset(r for r in self.size if r in stay)
        self.final = frozenset(self.root[t] for t in stay if t in written and not self.leaf[t])
        self.returned = frozenset(self.root[t] for t in graph.returned)
        self.returned -= frozenset(r for r in self.returned if self.leaf[r])
        self.workspace = {k: workspace[k] if workspace else 0 for k in self.ops}
        self.able = set(able)
        self.again = set(self.ops if again is None else again)
        self.base = self._base()
        self.wanted = self._wanted_versions()
        self.forward = frozenset(k for k in self.ops if graph.ops[k].phase is Phase.FORWARD)
        shown = [k for k in self.ops if self._in_turn(graph.ops[k])] if in_turn else []
        self.turn = dict(zip(shown[1:], shown, strict=False))
        self.reads = {k: self._touched(graph.ops[k], graph.ops[k].reads) for k in self.ops}
        self.reads_again = {k: self._touched(graph.ops[k], graph.ops[k].reads_again) for k in self.ops}
        self.fresh = {k: self._fresh(graph.ops[k]) for k in self.ops}

    def _is_view(self, op):
        return bool(op.outputs) and all(
            self.graph.tensors[t].alias is not None and t not in op.inputs for t in op.outputs
        )

    def _in_turn(self, op):
        return not op.repeatable

    def _base(self):
        """Bytes that are there throughout: leaves, and old values of those that backward reads."""
        graph = self.graph
        updated = set(graph.updated)
        old = {
            t for k in self.ops if graph.ops[k].phase is not Phase.FORWARD for t in graph.ops[k].reads_again
            if t in updated or graph.tensors[t].role is Role.BUFFER
        }  # fmt: skip
        leaves = [
            t for t, one in enumerate(graph.tensors) if one.role in RESIDENT_ROLES and one.alias is None
        ]
        return sum(graph.tensors[t].bytes for t in (*leaves, *old))

    def _wanted_versions(self):
        count, found = {}, {}
        for k, op in enumerate(self.graph.ops):
            found[k] = {self.root[t]: count.get(self.root[t], 0) for t in op.reads}
            for t in set(op.inputs) & set(op.outputs):
                count[self.root[t]] = count.get(self.root[t], 0) + 1
        return found

    def _touched(self, op, reads):
        touched = {self.root[t] for t in reads} | {self.root[t] for t in op.outputs if t in op.inputs}
        return frozenset(r for r in touched if not self.leaf[r])

    def _fresh(self, op):
        return tuple(t for t in op.outputs if t not in op.inputs and self.root[t] == t)

    def may_run(self, k, done, held, versions):
        """Whether an operator finds its values, and may run now."""
        op = self.graph.ops[k]
        if k in done:
            if k not in self.again or op.once or not op.outputs:
                return False
            if set(op.inputs) & set(op.outputs):
                return False
        else:
            if k in self.turn and self.turn[k] not in done:
                return False
            if k not in self.forward and not self.forward <= done:
                return False
        reads = self.reads_again[k] if k in done else self.reads[k]
        return all(r in held and versions.get(r, 0) == self.wanted[k].get(r, 0) for r in reads)

    def best(self, budget, limit=30_000):
        """The least time spent on running again, and the line of steps; None where nothing fits."""
        start = (frozenset(), self.given, ())
        if self.base + sum(self.size[r] for r in self.given) > budget:
            return None
        costs, came, queue, seen = {start: 0.0}, {}, [(0.0, 0, 0, start)], {}
        number = 0
        while queue:
            cost, _, _, state = heapq.heappop(queue)
            done, held, versions = state
            if costs[state] < cost:
                continue
            if len(done) == len(self.ops) and self.final <= held:
                return cost, self._line(came, state)
            others = seen.setdefault((done, versions), [])
            if any(held <= other for other in others):
                continue
            others.append(held)
            number += 1
            if number > limit:
                raise TooLargeError
            for price, then, step in self._steps(cost, state, budget):
                if price < costs.get(then, price + 1):
                    costs[then] = price
                    came[then] = state, step
                    heapq.heappush(queue, (price, -len(then[0]), len(queue), then))
        return None

    def _steps(self, cost, state, budget):
        done, held, versions = state
        known = dict(versions)
        behind = self.forward <= done
        for k in self.ops:
            if not self.may_run(k, done, held, known):
                continue
            if behind and k not in done and k not in self.forward and not self._past_forward(done, held):
                continue
            price = cost + (self.seconds[k] if k in done else 0.0)
            then = done | {k}
            for kept, source in self._choices(k, done, held, budget):
                after = dict(known)
                for t in set(self.graph.ops[k].inputs) & set(self.graph.ops[k].outputs):
                    after[self.root[t]] = after.get(self.root[t], 0) + 1
                left = (kept | set(self.fresh[k])) - ({source} if source is not None else set())
                now = left & (self._useful(then) | self.stay)
                told = tuple(sorted((r, v) for r, v in after.items() if r in now))
                yield price, (then, frozenset(now), told), (k, held - kept, source, left - now)

    def _past_forward(self, done, held):
        """Whether forward may end here: the first operator of backward finds what forward returns."""
        return len(done) > len(self.forward) or self.returned <= held

    def _choices(self, k, done, held, budget):
        """What is held while an operator runs: the largest sets that leave room, and what it writes over."""
        reads = self.reads_again[k] if k in done else self.reads[k]
        own = reads | (held & self.stay)
        fresh = self.fresh[k]
        need = self.base + self.workspace[k] + sum(self.size[r] for r in own)
        need += sum(self.size[r] for r in fresh)  # a second copy, where the first one is held
        free = sorted(held - own)
        sources = [None, self._over(k)] if k in self.able and self._over(k) is not None else [None]
        for source in sources:
            room = budget - need + (self.size[source] if source is not None else 0)
            for kept in self._largest(free, room):
                if source is None or not set(fresh[:1]) & (own | kept):
                    yield own | kept, source

    def _over(self, k):
        op = self.graph.ops[k]
        source, made = self.root[op.inputs[0]], op.outputs[0]
        if self.leaf[source] or source in self.given | self.stay or op.inputs[0] in self.stay_tensors:
            return None
        return source if self.size[source] == self.graph.tensors[made].bytes else None

    def _largest(self, free, room):
        if room < 0:
            return
        found = []
        for count in range(len(free), -1, -1):
            for chosen in combinations(free, count):
                if sum(self.size[r] for r in chosen) <= room and not any(set(chosen) < one for one in found):
                    found.append(set(chosen))
                    yield frozenset(chosen)

    def _useful(self, done):
        """Storages that somebody may still read, or that must be there in the end."""
        found = set(self.final)
        for k in self.ops:
            if k not in done:
                found |= self.reads[k]
        stack = list(found)
        makers = {t: k for k in self.ops for t in self.fresh[k]}
        while stack:
            k = makers.get(stack.pop())
            new = self.reads_again[k] - found if k in self.again else set()
            found |= new
            stack += new
        return found

    def _line(self, came, state):
        line = []
        while state in came:
            state, step = came[state]
            line.append(step)
        return line[::-1]

    def program(self, line):
        """The Program of a line of steps: views are made where they are first read."""
        graph, held = self.graph, set()
        held |= {t for t in range(len(graph.tensors)) if self.leaf[t] or t in self.given}
        makers = {t: k for k, op in enumerate(graph.ops) if self._is_view(op) for t in op.outputs}
        parts = ([], [])

        def drop(roots, part):
            gone = sorted(t for t in held if self.root[t] in roots)
            held.difference_update(gone)
            part += [Drop(tuple(gone))] if gone else []

        def make(t, part):
            if t not in held and t in makers:
                for other in graph.ops[makers[t]].reads:
                    make(other, part)
                part.append(Run(makers[t]))
                held.update(graph.ops[makers[t]].outputs)

        late = False
        for k, dropped, source, unread in line:
            if not late and k not in self.forward:
                for t in graph.returned:
                    make(t, parts[0])
                late = True
            part = parts[late]
            drop(dropped, part)
            for t in graph.ops[k].reads:
                make(t, part)
            part.append(Run(k, in_place=None if source is None else 0))
            held.update(graph.ops[k].outputs)
            drop(unread | ({source} if source is not None else set()), part)
        for t, one in enumerate(graph.tensors):
            if one.gradient_of is not None and t in makers:
                make(t, parts[1])
        return Program(tuple(parts[0]), tuple(parts[1]))
