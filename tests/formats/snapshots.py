"""Snapshots of the CUDA allocator, built as PyTorch builds them, without a GPU."""

import pickle

USER = {"filename": "/home/user/train.py", "line": 31, "name": "forward"}
BACKWARD_LINE = {"filename": "/home/user/train.py", "line": 40, "name": "main"}
CONVOLUTION = [
    {"filename": "??", "line": 0, "name": "at::_ops::empty_memory_format::call(c10::ArrayRef<c10::SymInt>)"},
    {"filename": "??", "line": 0, "name": "at::_ops::convolution::call(at::Tensor const&)"},
    {
        "filename": "/env/lib/python3.11/site-packages/torch/nn/modules/conv.py",
        "line": 548,
        "name": "forward",
    },
    USER,
    {"filename": "/home/user/train.py", "line": 77, "name": "<module>"},
]
BACKWARD = [
    {"filename": "??", "line": 0, "name": "at::_ops::convolution_backward::call(at::Tensor const&)"},
    {"filename": "??", "line": 0, "name": "torch::autograd::Engine::thread_main(std::shared_ptr<>)"},
    {"filename": "/env/site-packages/torch/autograd/graph.py", "line": 841, "name": "_engine_run_backward"},
    BACKWARD_LINE,
]
UPDATE = [
    {"filename": "/env/site-packages/torch/optim/adam.py", "line": 150, "name": "_init_group"},
    {"filename": "/home/user/train.py", "line": 41, "name": "main"},
]


class Allocator:
    """Writes down what a caching allocator does; each block has an address of its own."""

    def __init__(self, *, segment=64 << 20, device=0):
        self.base, self.device, self.segment = 0x7F00_0000_0000, device, segment
        self.trace, self.live, self.clock, self.next = [], {}, 1_700_000_000_000_000, self.base

    def _event(self, action, address, size, frames, **more):
        self.clock += 10
        entry = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": self.clock}
        self.trace.append(entry | {"frames": frames} | more)

    def reserve(self, size, sign=1):
        self._event("segment_alloc" if sign > 0 else "segment_free", self.base, size, [])

    def alloc(self, size, frames=(), *, recorded=True):
        address, rounded = self.next, -(-size // 512) * 512
        self.next += rounded
        self.live[address] = (size, rounded, list(frames))
        if recorded:
            self._event("alloc", address, size, list(frames))
        return address

    def free(self, address):
        size, _, frames = self.live.pop(address)
        self._event("free_requested", address, size, frames)
        self._event("free_completed", address, size, frames)

    def out_of_memory(self, size, left):
        self.clock += 10
        entry = {"action": "oom", "device_free": left, "size": size, "stream": 0, "time_us": self.clock}
        self.trace.append(entry | {"frames": CONVOLUTION})

    def segments(self):
        blocks, at = [], self.base
        for address in sorted(self.live):
            size, rounded, frames = self.live[address]
            if address > at:
                blocks.append(_block(at, address - at, 0, "inactive", []))
            blocks.append(_block(address, rounded, size, "active_allocated", frames))
            at = address + rounded
        if at < self.base + self.segment:
            blocks.append(_block(at, self.base + self.segment - at, 0, "inactive", []))
        used = sum(rounded for _, rounded, _ in self.live.values())
        return [
            {
                "device": self.device, "address": self.base, "total_size": self.segment, "allocated_size": used,
                "active_size": used, "requested_size": used, "stream": 0, "segment_type": "large",
                "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks,
            }
        ]  # fmt: skip

    def snapshot(self):
        return {
            "segments": self.segments(),
            "device_traces": [*([] for _ in range(self.device)), self.trace],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1},
            "external_annotations": [],
        }


def _block(address, size, requested, state, frames):
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}


def training_step():
    """A parameter from before, two activations, a backward that frees them, optimiser state that stays."""
    allocator = Allocator()
    allocator.alloc(4096, recorded=False)
    stale = allocator.alloc(1000, recorded=False)
    allocator.reserve(32 << 20)
    first = allocator.alloc(1 << 20, CONVOLUTION)
    allocator.free(stale)
    second = allocator.alloc(1_500_000, CONVOLUTION)
    gradient = allocator.alloc(3 << 20, BACKWARD)
    allocator.free(second)
    allocator.free(first)
    allocator.alloc(4096, UPDATE)
    allocator.free(gradient)
    return allocator


def pickled(snapshot=None, protocol=4):
    return pickle.dumps(training_step().snapshot() if snapshot is None else snapshot, protocol=protocol)
