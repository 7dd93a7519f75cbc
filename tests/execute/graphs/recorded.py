"""CUDA graphs on the host, for steps that talk to other processes: operators are recorded, and run again.

Whatever a part allocates has memory of its own that is the same in every replay. Nothing is computed while a
part is recorded. What was freed while it was recorded is written over at that place of every replay: another
tensor may lie there. A call between two graphs happens in replays alone.
"""

import ctypes
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from lowtide.execute.graphs.beside.wires import WireAside, WireBetween
from lowtide.execute.graphs.capture.part_capture import CapturedPart
from lowtide.execute.graphs.capture.recorder import _Operators
from lowtide.execute.graphs.common_memory import CommonMemory
from lowtide.execute.graphs.part import SharedStorage, Value
from lowtide.execute.graphs.replay import Replay
from lowtide.execute.runtime.copies import Form
from lowtide.trace.distributed.wires import wire_of

RUBBISH = 0x7F


class Numbered(_Operators):
    """Counts operators, and calls the tape with each."""

    def __init__(self, tape=None):
        super().__init__("cpu")
        self.tape, self.count = tape, 0

    def operator(self, number, call, parts):
        self.count = number
        return call()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.tape is not None and not self._inside:
            self.tape.ran(func, args, kwargs or {}, result)
        return result


class Graph:
    def __init__(self):
        self.calls = []

    def replay(self):
        with torch.no_grad():
            for call in self.calls:
                call()


class Tape:
    order = 0

    def __init__(self, watched):
        self.watched, self.storages, self.used = watched, [], set()
        self.shadows, self.alive = {}, {}
        self.pieces = self.graph = None
        """Where each storage lies in replays, by its address while it was recorded."""

    def captured(self, run, arguments, groups, large, generators):
        random = torch.get_rng_state()
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        before = [one.clone() for one in tensors]
        for one in tensors:
            self.shadows.setdefault(one.untyped_storage().data_ptr(), flat(one))
        self.pieces, self.graph = CapturedPart(), Graph()
        mode = Numbered(self)
        with mode.watching(groups):
            results = run(arguments, self.between)
            mode.tape = None
        self.end()
        assert mode.count == self.watched.pop(0)  # operators have the same numbers
        torch.set_rng_state(random)
        for one, value in zip(tensors, before, strict=True):
            if not torch.equal(one, value):
                one.detach().copy_(value)
        return self.pieces, results

    def end(self):
        self.bury()
        if self.graph.calls:
            self.pieces.add_graph(self.graph)

    def between(self, call):
        self.end()
        self.pieces.add_call(call)
        self.graph = Graph()

    def bury(self):
        """What is freed by now is written over."""
        for address in [address for address, one in self.alive.items() if one.expired()]:
            del self.alive[address]
            shadow = self.shadows.pop(address)
            self.graph.calls.append(lambda shadow=shadow: shadow.fill_(RUBBISH))

    def ran(self, func, args, kwargs, result):
        self.bury()
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        for one in made:
            address = one.untyped_storage().data_ptr()
            if address not in self.shadows:
                self.shadows[address] = torch.full_like(flat(one), RUBBISH)
                self.alive[address] = StorageWeakRef(one.untyped_storage())
        places, given = [self.there(one) for one in made], self.placed((args, kwargs))

        def call():
            args, kwargs = (tree_map_only(Placed, lambda one: one.now(), part) for part in given)
            found = [one for one in tree_leaves(func(*args, **kwargs)) if isinstance(one, torch.Tensor)]
            for place, value in zip(places, found, strict=True):
                there = place()
                if there.data_ptr() != value.data_ptr():
                    there.copy_(value)

        self.graph.calls.append(call)

    def placed(self, values):
        return tree_map_only(torch.Tensor, lambda one: Placed(self.there(one)), values)

    def there(self, tensor):
        form, address = Form.of(tensor), tensor.untyped_storage().data_ptr()
        if address not in self.shadows:  # a constant, or a parameter that is no argument of this part
            self.shadows[address] = flat(tensor)
        shadow = self.shadows[address]
        return lambda: form.over(shadow)

    def value(self, tensor):
        self.storages.append(
            Storage(self.shadows[tensor.untyped_storage().data_ptr()], range(0), frozenset(), 0)
        )
        return Value(self.storages[-1], Form.of(tensor))

    def again(self, form, address):
        return form.over(self.shadows[address])

    def settle(self):
        pass

    def close(self):
        self.storages = []


class Storage(SharedStorage):
    held = False


class Placed:
    def __init__(self, now):
        self.now = now


def flat(tensor):
    return torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())


class Silent(WireBetween):
    """What comes from others is zero while a part is recorded: operators run then, and look at indices."""

    def swap(self, sends, receives):
        super().swap(sends, receives)
        zeroed(receives)

    def begin_swap(self, sends, receives):
        ended = super().begin_swap(sends, receives)
        zeroed(receives)
        return ended


def zeroed(messages):
    for _, x in messages:
        ctypes.memset(x.data_ptr(), 0, x.nbytes)


class Beside:
    def __init__(self, interpreter):
        self.interpreter = interpreter

    def watching(self, part, aside):
        return self.interpreter.lent(wires=lambda name: WireAside(wire_of(name), aside))

    def generators(self, part):
        return ()

    def capturing(self, part, between, there):
        return self.interpreter.lent(wires=lambda name: Silent(name, between, there), computes=False)

    def set_out(self, part):
        pass

    def as_saved(self, value):
        return value


class Stopwatch:
    @contextmanager
    def timing(self, part):
        yield

    def seconds(self):
        return [[], []]


class Tapes:
    device_type, size, unplanned_bytes = "cpu", 1, 0

    def __init__(self):
        self.seen, self.made = [], []

    def sizes(self, device):
        """Operators of a part that is watched."""
        counted = Numbered()
        counted.large = set()
        self.seen.append(counted)
        return counted

    def listing(self, device):
        tape = self.new(device, None, None, None)
        tape.layout = lambda room: object()
        return tape

    def new(self, device, layout, held, most):
        self.made.append(Tape([one.count for one in self.seen]))
        return self.made[-1]

    def beside(self, interpreter, device):
        return Beside(interpreter)

    def stopwatch(self):
        return Stopwatch()

    def possible(self):
        return True

    def watched(self):
        pass

    def alone(self):
        pass

    def wait(self):
        pass

    def forget(self):
        pass


def replayed(self, interpreter, how, room):
    """In place of ``Shapes.replayed``."""
    if how == "off":
        return None
    device = torch.device("cpu")
    if device not in self.common:
        self.common[device] = CommonMemory(Tapes())
    replay = Replay(interpreter, self.common[device])
    self.graphs.add(replay)
    return replay
