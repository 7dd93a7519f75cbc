"""Traces as ``torch.profiler`` exports them on a machine with a GPU, built without one."""

import json

HOST, ENGINE = {"pid": 100, "tid": 100}, {"pid": 100, "tid": 200}


def call(name, start, length, *, cat="cpu_op", thread=HOST, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "args": args} | thread


def kernel(name, start, length, number, *, cat="kernel", **args):
    place = {"device": 0, "stream": 7, "External id": number, "correlation": number}
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": length, "args": place | args,
    }  # fmt: skip


def memory(start, size, address, total, *, thread=HOST, kind=1):
    args = {
        "Total Reserved": 1 << 20,
        "Total Allocated": total,
        "Bytes": size,
        "Device Id": 0,
        "Device Type": kind,
    }
    event = {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "ts": start}
    return event | {"args": args | {"Addr": address}} | thread


def gpu_events():
    """A copy to the device, a convolution in a module, its backward on another thread, an update."""
    return [
        {"ph": "M", "name": "process_name", "pid": 100, "tid": 0, "ts": 0, "args": {"name": "python"}},
        call("train.py(31): forward", 900, 700, cat="python_function"),
        call("torch/nn/modules/module.py(1775): _call_impl", 1000, 400, cat="python_function"),
        call("nn.Module: Conv2d_0", 1001, 300, cat="python_function"),
        call("aten::to", 910, 40, **{"External id": 1}),
        call("aten::copy_", 915, 30, **{"External id": 2}),
        call("aten::conv2d", 1010, 100, **{"External id": 3, "Sequence number": 7}),
        call("aten::convolution", 1020, 80, **{"External id": 4, "Sequence number": 7}),
        kernel("Memcpy HtoD (Pinned -> Device)", 930, 20, 2, cat="gpu_memcpy", bytes=4096),
        kernel("void cutlass_conv<float>(int)", 1200, 300, 4),
        call("autograd::engine::evaluate_function: ConvolutionBackward0", 1500, 200, thread=ENGINE, **{
            "Sequence number": 7, "Fwd thread id": 1, "External id": 5,
        }),
        call("ConvolutionBackward0", 1510, 180, thread=ENGINE, **{"Sequence number": 7, "External id": 6}),
        call("aten::convolution_backward", 1520, 160, thread=ENGINE, **{"External id": 7}),
        kernel("wgrad", 1700, 250, 7),
        kernel("dgrad", 1950, 150, 7),
        call("Optimizer.step#SGD.step", 2000, 100, cat="user_annotation"),
        call("aten::add_", 2010, 50, **{"External id": 8}),
        kernel("add", 2200, 10, 8),
        kernel("ncclAllReduce", 2300, 30, 999),
        memory(912, 4096, 0x1000, 10_000 + 4096),
        memory(1030, 8192, 0x2000, 10_000 + 4096 + 8192),
        memory(1040, 512, 0x9000, 10_000 + 4096 + 8192 + 512),
        memory(1090, -512, 0x9000, 10_000 + 4096 + 8192),
        memory(1530, 2048, 0x4000, 10_000 + 4096 + 8192 + 2048, thread=ENGINE),
        memory(1695, -8192, 0x2000, 10_000 + 4096 + 2048, thread=ENGINE),
        memory(2020, -1000, 0x5000, 9000 + 4096 + 2048),
        memory(1000, 64, 0x77, 64, kind=0),
    ]  # fmt: skip


def exported(events):
    document = {"schemaVersion": 1, "deviceProperties": [], "displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(document).encode()
