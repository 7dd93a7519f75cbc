"""What a step computes at its full size, without allocating it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Call:
    kind: str
    arguments: tuple
    output: Tensor

    @property
    def bytes(self) -> int:
        return self.output.numel() * self.output.element_size()


class Recorder(TorchDispatchMode):
    """Keeps every operator that runs inside, with its first output."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) else result
        self.calls.append(Call(func.overloadpacket.__name__, args, first))
        return result

    def named(self, kind: str) -> list[Call]:
        return [call for call in self.calls if call.kind == kind]
