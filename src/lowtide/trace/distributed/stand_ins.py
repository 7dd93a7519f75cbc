"""While a step is tried out, collectives give what this process can compute alone.

A rank that plans runs the step as often as it likes, and measures its operators as often as the clock asks
for. Others must not wait for it. So inside of :func:`alone` nothing is sent: each collective gives a tensor
of the shape, type and strides of its result, made from its own input, in the memory that the real one takes.
Two runs then still give the same bits, so that a planned step can be held against eager PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from lowtide.distributed_internals import is_distributed, several_processes
from lowtide.errors import CaptureError
from lowtide.torch_internals import TorchDispatchMode
from lowtide.trace.distributed.collectives import is_collective, name_of
from lowtide.trace.distributed.exchange import exchanged
from lowtide.trace.distributed.wires import wire_of

__all__ = ["StandIns", "alone", "nothing_sent"]


@contextlib.contextmanager
def alone(targets: Iterable[Any], arguments: Iterable[Any]) -> Iterator[None]:
    """Inside, a step that calls these functions with these arguments waits for no other process."""
    talks = any(map(is_collective, targets))
    mode: Any = StandIns
    with mode() if talks or any(map(is_distributed, arguments)) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def nothing_sent() -> Iterator[None]:
    """Inside, forward of a step may not talk to other processes, which would take it for another call."""
    mode: Any = _NothingSent
    with mode() if several_processes() else contextlib.nullcontext():
        yield


class _Apart(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at operators that talk to other processes; others run as they are."""

    leaves_calls_alone = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile what is called inside."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operator."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # it calls operators on the tensors of this process, which come here again
        name = name_of(func)
        if name is None or name in _LOCAL:
            return func(*args, **(kwargs or {}))
        return self.talk(func, name, args, kwargs or {}, traced=bool(types))

    def talk(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], *, traced: bool) -> Any:
        """One that talks to other processes, or is ``traced``."""
        raise NotImplementedError


class _NothingSent(_Apart):  # type: ignore[no-untyped-call]
    def talk(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], *, traced: bool) -> Any:  # noqa: ARG002
        if traced:
            return func(*args, **kwargs)
        raise CaptureError(
            f"the step calls {func} in code that torch does not capture. Forward runs while it is planned, "
            "as often as the budget of each process asks for, and processes would meet in different calls. "
            "Take what talks to other processes out of the step, or out of what breaks the graph "
            "(docs/integrations.md)"
        )


class StandIns(_Apart):  # type: ignore[no-untyped-call]
    """Answers for other processes, in this thread and in its backward."""

    def talk(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], *, traced: bool) -> Any:  # noqa: ARG002
        """What this process can compute alone."""
        if name not in _STAND_INS:
            raise CaptureError(
                f"the step calls {func}, which talks to other processes in a way that cannot be tried out by "
                "one of them. Supported are the collectives of DTensor and torch.distributed's functional "
                "all_reduce, all_gather, reduce_scatter, all_to_all_single and broadcast; leave this part out"
            )
        return _STAND_INS[name](*args, **kwargs)


_LOCAL = frozenset({"_wrap_tensor_autograd"})
"""Operators beside the collectives that send nothing: this one marks a result that is not there yet."""


def _copy(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _gathered(tensor: torch.Tensor, group_size: int, _: Any) -> torch.Tensor:
    found = torch.cat([tensor] * group_size)
    return found if tensor.is_cuda else found.clone()  # on the CPU it is gathered beside the result


def _scattered(tensor: torch.Tensor, _: str, group_size: int, __: Any) -> torch.Tensor:
    whole = tensor if tensor.is_cuda else tensor.clone()  # on the CPU it is reduced as a whole
    return _copy(whole[: tensor.shape[0] // group_size])


def _exchanged(tensor: torch.Tensor, received: Sequence[int], *_: Any) -> torch.Tensor:
    """As many rows as come from all processes: its own, again and again."""
    count = sum(received) if received else tensor.shape[0]
    if not count or not tensor.shape[0]:
        return tensor.new_zeros((count, *tensor.shape[1:]))
    return tensor[torch.arange(count, device=tensor.device) % tensor.shape[0]]


class _Silent:
    """A wire over which nothing comes."""

    def __init__(self, place: int) -> None:
        self.place = place

    def swap(
        self, _: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        for __, one in receives:
            one.zero_()

    def begin_swap(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> Callable[[], None]:
        self.swap(sends, receives)
        return lambda: None

    def add_up(self, x: torch.Tensor) -> None:
        """It has all there is."""

    def begin_sum(self, _: torch.Tensor) -> Callable[[], None]:
        return lambda: None


def _given(
    tensor: torch.Tensor,
    dim: int,
    sends: Sequence[int],
    receives: Sequence[int],
    length: int,
    _: Any,
    wire: str,
) -> torch.Tensor:
    """Zeros in place of what others would send."""
    return exchanged(tensor, dim, sends, receives, length, _Silent(wire_of(wire).place))


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_STAND_INS: dict[str, Callable[..., torch.Tensor]] = {
    "all_reduce": _copy,
    "broadcast": _copy,
    "all_gather_into_tensor": _gathered,
    "reduce_scatter_tensor": _scattered,
    "all_to_all_single": _exchanged,
    "exchange": _given,
    "add_up": _copy,
    "wait_tensor": _waited,
}
