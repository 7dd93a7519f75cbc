"""Parts of a Program as CUDA graphs: captured, with memory behind their addresses, ready to be replayed."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from lowtide.collector import collector_paused
from lowtide.device_internals import (
    allocate_to_pool,
    blocks_of_memory,
    free_library_workspaces,
    lost_in_fork,
    release_pool,
    reserved_for,
    stop_allocating_to_pool,
    uses_of_storage,
)
from lowtide.execute.graphs.arena.driver import Addresses
from lowtide.execute.graphs.arena.errors import CannotCaptureError
from lowtide.execute.graphs.arena.layout import ArenaLayout
from lowtide.execute.graphs.arena.memory import Answering, Listing
from lowtide.execute.graphs.arena.pages import pages_of
from lowtide.execute.graphs.arena.segments import Pages
from lowtide.execute.graphs.beside.beside import Beside
from lowtide.execute.graphs.beside.wires import Between
from lowtide.execute.graphs.capture.memsets import by_kernels
from lowtide.execute.graphs.capture.part_capture import PartCapture, Replayable
from lowtide.execute.graphs.capture.recorder import Alive, Recorder, Sizes
from lowtide.execute.graphs.stopwatch import Stopwatch
from lowtide.execute.memory import reserved
from lowtide.execute.runtime.copies import Form
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.trace.step.group import Group

__all__ = ["SharedStorage", "Tape", "Tapes", "Value"]

_CAPTURES = threading.Lock()
"""One capture at a time: they share the allocator of addresses."""


_ALONE = torch.empty(1)


class _Memory:
    """Bytes of a device for PyTorch; whoever has a tensor on them keeps the addresses."""

    def __init__(self, addresses: Addresses, address: int, size: int) -> None:
        self.addresses = addresses
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


class SharedStorage:
    """Memory that a part writes and that users may hold."""

    def __init__(self, base: torch.Tensor, span: range, pages: frozenset[int], order: int) -> None:
        """``order`` is that of the capture, among all in this memory."""
        self.base, self.span, self.pages, self.order = base, span, pages, order

    @property
    def held(self) -> bool:
        """Whether somebody has a tensor on it."""
        return uses_of_storage(self.base) > uses_of_storage(_ALONE)


class Value:
    """A tensor that a part gives, on memory that it always writes to."""

    def __init__(self, storage: SharedStorage, form: Form) -> None:
        self._storage, self._form = storage, form

    def now(self) -> torch.Tensor:
        """The tensor itself."""
        return self._form.over(self._storage.base)


class Tape:
    """Forward and backward, captured one after the other, in memory that only they use while they run."""

    def __init__(
        self, pages: Pages, graph_pool: Any, memory: Listing | Answering, *, libraries: bool = True
    ) -> None:
        """``libraries`` says whether those for matrices take part."""
        self._pages, self._graph_pool, self._memory, self._libraries = pages, graph_pool, memory, libraries
        self._alive: list[Alive] = []
        self._pools: list[Any] = []
        self.order = 0
        """Of the capture, among all in this memory."""
        self.storages: list[SharedStorage] = []
        """What users may hold."""

    @property
    def used(self) -> set[int]:
        """All pages that it writes to."""
        return set(self._memory.pages)

    def captured(
        self,
        run: Callable[[list[Any], Between], list[Any]],
        arguments: list[Any],
        groups: Sequence[Group],
        large: Collection[int],
        generators: Sequence[torch.Generator] = (),
    ) -> tuple[Replayable, list[Any]]:
        """Graphs of what ``run`` does with the arguments, and what it returns. Nothing is computed yet.

        It is also given what it calls to have the host do something between two graphs. ``large`` are the
        operators that allocate much, by their number. ``generators`` are those that it draws random numbers
        from besides the device's own.
        """
        index = self._pages.index
        device = torch.device("cuda", index)
        reserved.lift(index)
        with _CAPTURES, _capturing(device, index, self._graph_pool, libraries=self._libraries):
            self._memory.open()
            recorder = Recorder(self._memory, index, self._graph_pool, self._alive, large)
            graphs = PartCapture(index, self._graph_pool, recorder, generators, self._complete)
            try:
                with graphs.capturing(), recorder.watching(groups):
                    results = run(arguments, graphs.between)
            finally:
                self._memory.close()
                self._pools += recorder.pools
                recorder.pools = []
            self._nothing_left()
            part = graphs.part()
        return part, results

    def _complete(self, graph: Any) -> None:
        """Make it ready to be replayed."""
        by_kernels(graph.raw_cuda_graph())
        graph.instantiate()

    def value(self, tensor: torch.Tensor) -> Value:
        """A result of a part: memory that stays its own."""
        form, storage = Form.of(tensor), tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        known = next((one for one in self.storages if one.base.data_ptr() == address), None)
        if known is None:
            span, addresses = range(0), self._memory.addresses
            if address in addresses:
                span = pages_of(address - addresses.base, size)
                flat = torch.as_tensor(_Memory(addresses, address, size), device=tensor.device)
            else:  # a small one, in the pool of the graph
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            pages = frozenset(self._memory.pages[page] for page in span)
            known = SharedStorage(flat, span, pages, self.order)
            self.storages.append(known)
        return Value(known, form)

    def there(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Gives a tensor that lies where this one does, in every replay."""
        form, address = Form.of(tensor), tensor.untyped_storage().data_ptr()
        return cache(lambda: self.again(form, address))

    def again(self, form: Form, address: int) -> torch.Tensor:
        """A tensor that lies where one of a captured part did."""
        device = torch.device("cuda", self._pages.index)
        memory = _Memory(self._memory.addresses, address, form.storage_bytes)
        return form.over(torch.as_tensor(memory, device=device))

    def settle(self) -> None:
        """Nothing more is captured: let go of what PyTorch's allocator knows of the addresses."""
        self._pools.clear()
        self._alive.clear()
        gc.collect()
        torch.cuda.empty_cache()
        reserved.settle(self._pages.index)

    def close(self) -> None:
        """Give the memory back, but for what somebody holds."""
        self.settle()
        self.storages = [one for one in self.storages if one.held]
        self._memory.addresses.leave({page for one in self.storages for page in one.span}, self._pages.index)

    def _nothing_left(self) -> None:
        """Refuse where somebody keeps memory that was taken while operators were captured."""
        gc.collect()
        known = {one.address for one in self._alive}
        addresses = self._memory.addresses
        ours = range(addresses.base, addresses.base + addresses.size)
        for address, size in blocks_of_memory(ours):
            if address not in known:
                raise CannotCaptureError(f"a library keeps {size:,} bytes that it took inside an operator")


class ListingTape(Tape):
    """A tape whose parts are captured for what they ask for alone."""

    def __init__(self, pages: Pages, graph_pool: Any, *, libraries: bool = True) -> None:
        self._listing = Listing(pages)
        super().__init__(pages, graph_pool, self._listing, libraries=libraries)

    def _complete(self, graph: Any) -> None:
        """It is not replayed."""

    def layout(self, room: int) -> ArenaLayout:
        """Places for everything, once both parts are captured; so many bytes are there for them."""
        return self._listing.layout(room)


class Tapes:
    """Captures on a CUDA device, in one memory for all of them."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._pages: Pages | None = None
        self._graph_pool: Any = None
        self._libraries = False
        """Whether those for matrices take part, as far as that was seen."""

    @property
    def size(self) -> int:
        """Bytes of the memory."""
        return 0 if self._pages is None else self._pages.size

    @property
    def unplanned_bytes(self) -> int:
        """What PyTorch's allocator has beside it for graphs: small tensors, and what libraries keep."""
        return reserved_for(self._graph_pool)

    def watched(self) -> None:
        """A step is going to run that tells what graphs of it need: have libraries hold nothing before."""
        free_library_workspaces()

    def sizes(self, device: torch.device) -> Sizes:
        """Sees which operators allocate much."""
        return Sizes(device.index)

    def beside(self, interpreter: Interpreter, device: torch.device) -> Beside:
        """What a Program does beside its operators."""
        return Beside(interpreter, device)

    def stopwatch(self) -> Stopwatch:
        """Measures parts."""
        return Stopwatch()

    def alone(self) -> None:
        """Have libraries keep nothing for other streams: graphs have as much of their own."""
        if self._libraries:
            free_library_workspaces()

    def wait(self) -> None:
        """Let everything end that runs on the device: what it uses is given up."""
        if self._pages is not None and not lost_in_fork():
            torch.cuda.synchronize(self._pages.index)

    def possible(self) -> bool:
        """Whether something can be captured now."""
        cuda: Any = torch.cuda
        return not cuda.is_current_stream_capturing()

    def listing(self, device: torch.device) -> ListingTape:
        """A tape that nothing is replayed from: it tells what a step asks for."""
        pages, cuda = self._there(device), torch.cuda
        before = cuda.memory_allocated(device)
        free_library_workspaces()  # they take as much for the stream that is captured
        self._libraries |= cuda.memory_allocated(device) != before
        return ListingTape(pages, self._graph_pool, libraries=self._libraries)

    def new(self, device: torch.device, layout: ArenaLayout, held: Collection[int], most: int) -> Tape:
        """A tape, in memory without pages that are ``held``; so many bytes of it are there at ``most``."""
        pages = self._there(device)
        self.alone()
        memory = Answering(pages, layout, held, most)
        return Tape(pages, self._graph_pool, memory, libraries=self._libraries)

    def _there(self, device: torch.device) -> Pages:
        """The memory, made if need be."""
        if self._pages is None:
            cuda: Any = torch.cuda
            self._pages, self._graph_pool = Pages(device), cuda.graph_pool_handle()
            allocate_to_pool(self._pages.index, self._graph_pool)  # it is there as long as this
            stop_allocating_to_pool(self._pages.index, self._graph_pool, captured=True)
        return self._pages

    def forget(self) -> None:
        """Have no memory; pages that are still behind addresses stay as long as those."""
        if self._pages is not None and lost_in_fork():
            self._pages = None  # they are those of the process that this one was forked from
        elif self._pages is not None:
            index = self._pages.index
            release_pool(index, self._graph_pool)
            self._pages = None
            free_library_workspaces()  # those of the stream that was captured lie in its pool
            torch.cuda.empty_cache()
            reserved.settle(index)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as where the process ends
            self.forget()


@cache
def _stream(device: torch.device) -> Any:
    """The stream on which everything is captured: libraries keep memory for each stream that they see."""
    cuda: Any = torch.cuda
    return cuda.Stream(device)


@contextlib.contextmanager
def _capturing(device: torch.device, index: int, graph_pool: Any, *, libraries: bool) -> Iterator[None]:
    """Capture on a stream for which ``libraries`` have what they keep, in the pool of the graph."""
    cuda: Any = torch.cuda
    cuda.synchronize(device)
    gc.collect()
    cuda.empty_cache()  # the pages need it
    stream = _stream(device)
    with (
        collector_paused(),
        cuda.stream(stream),
    ):  # graphs and pages among what it frees would end the capture
        allocate_to_pool(index, graph_pool)
        try:
            for dtype in (torch.float32, torch.bfloat16, torch.float16) if libraries else ():
                matrix = torch.zeros(64, 64, dtype=dtype, device=device)
                torch.addmm(matrix[0], matrix, matrix.mm(matrix))
                del matrix
            stream.synchronize()
        finally:
            stop_allocating_to_pool(index, graph_pool)
        yield
