"""Has a captured graph set a few bytes by kernels: behind nodes for that, it waits several times as long.

Libraries for matrices set a counter to zero before many of their kernels. Nothing else of the graph changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from lowtide.execute.graphs.arena.driver import DriverError, call

__all__ = ["by_kernels", "has_nodes"]

_MEMSET = 2
"""The kind of a node, as CUDA's driver has it."""
_MOST_WORDS = 4096
"""Larger ones are left alone."""
_THREADS = 128
_SOURCE = b"""
.version 6.0
.target sm_70
.address_size 64
.visible .entry lowtide_set(.param .u64 where, .param .u32 value, .param .u32 words)
{
    .reg .pred %p;
    .reg .b32 %r<4>;
    .reg .b64 %d<3>;
    ld.param.u64 %d0, [where];
    ld.param.u32 %r0, [value];
    ld.param.u32 %r1, [words];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ntid.x;
NEXT:
    setp.ge.u32 %p, %r2, %r1;
    @%p bra DONE;
    mul.wide.u32 %d1, %r2, 4;
    add.u64 %d2, %d0, %d1;
    st.u32 [%d2], %r0;
    add.u32 %r2, %r2, %r3;
    bra NEXT;
DONE:
    ret;
}
\0"""
"""Writes a word so many times."""


class _MemsetParams(ctypes.Structure):
    _fields_ = (
        ("where", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint),
        ("element", ctypes.c_uint), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class _KernelParams(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("arguments", ctypes.c_void_p), ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


class _Memset(NamedTuple):
    node: int
    where: int
    value: int
    words: int


@cache
def _function(context: int) -> int:
    """The kernel, loaded once for each context of CUDA's."""
    del context
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(_SOURCE))
    call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"lowtide_set"))
    assert function.value is not None
    return function.value


def by_kernels(graph: int) -> int:
    """Replace small memsets of a captured graph, which is not instantiated yet; how many were replaced.

    Those whose place in the graph its driver cannot tell are left alone. A DriverError comes where one could
    be told and not replaced: the graph cannot be used then.
    """
    try:
        context = ctypes.c_void_p()
        call("cuCtxGetCurrent", ctypes.byref(context))
        function = _function(context.value or 0)
        found = [one for node in _listed("cuGraphGetNodes", graph) if (one := _memset(node)) is not None]
    except DriverError:
        return 0
    return sum(_replaced(graph, function, one) for one in found)


def has_nodes(graph: int) -> bool:
    """Whether anything was captured; taken to be so where the driver does not tell."""
    try:
        return bool(_listed("cuGraphGetNodes", graph))
    except DriverError:
        return True


def _listed(name: str, of: int) -> list[int]:
    """Nodes of a graph, or those before or behind a node."""
    count = ctypes.c_size_t()
    call(name, ctypes.c_void_p(of), None, ctypes.byref(count))
    if not count.value:
        return []
    nodes = (ctypes.c_void_p * count.value)()
    call(name, ctypes.c_void_p(of), nodes, ctypes.byref(count))
    return [node for node in nodes if node is not None]


def _memset(node: int) -> _Memset | None:
    """What a node sets, if these are a few words."""
    kind = ctypes.c_int(-1)
    call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    if kind.value != _MEMSET:
        return None
    params = _MemsetParams()
    call("cuGraphMemsetNodeGetParams", ctypes.c_void_p(node), ctypes.byref(params))
    size, word = params.element * params.width, _word(params.value, params.element)
    if word is None or params.height != 1 or size % 4 or params.where % 4 or not 0 < size <= 4 * _MOST_WORDS:
        return None
    return _Memset(node, params.where, word, size // 4)


def _word(value: int, element: int) -> int | None:
    """Four bytes of what elements of so many bytes are set to."""
    if element not in (1, 2, 4):
        return None
    return int.from_bytes(
        (value & (1 << 8 * element) - 1).to_bytes(element, "little") * (4 // element), "little"
    )


def _replaced(graph: int, function: int, one: _Memset) -> bool:
    """Put a kernel into the place of a node; False where that place is not known."""
    try:  # now: its neighbours may have been replaced
        before, after = (
            _listed(name, one.node) for name in ("cuGraphNodeGetDependencies", "cuGraphNodeGetDependentNodes")
        )
    except DriverError:  # it is bound to another node in a way that these do not tell
        return False
    arguments: list[Any] = [
        ctypes.c_uint64(one.where), ctypes.c_uint32(one.value), ctypes.c_uint32(one.words),
    ]  # fmt: skip
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(argument) for argument in arguments))
    params = _KernelParams(function=function, arguments=ctypes.addressof(pointers))
    params.grid[:] = [1, 1, 1]
    params.block[:] = [_THREADS if one.words > 1 else 1, 1, 1]
    node = ctypes.c_void_p()
    call(
        "cuGraphAddKernelNode_v2", ctypes.byref(node), ctypes.c_void_p(graph), _array(before),
        ctypes.c_size_t(len(before)), ctypes.byref(params),
    )  # fmt: skip
    if after:
        here = _array([node.value] * len(after))
        call(
            "cuGraphAddDependencies", ctypes.c_void_p(graph), here, _array(after), ctypes.c_size_t(len(after))
        )
    call("cuGraphDestroyNode", ctypes.c_void_p(one.node))
    return True


def _array(nodes: Sequence[int | None]) -> Any:
    return (ctypes.c_void_p * len(nodes))(*nodes)
