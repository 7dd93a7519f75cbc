"""What is on the device while the checker plays a Program: tensors, the storages they are on, bytes."""

from __future__ import annotations

__all__ = ["Held", "Storage"]


class Storage:
    """Memory with the tensors that are on it."""

    __slots__ = ("bytes", "copy", "fixed", "tensors", "version")

    def __init__(self, size: int, version: int = 0, *, fixed: bool = False, copy: bool = False) -> None:
        self.bytes = size
        self.version = version
        self.fixed = fixed
        """Whether somebody else has it too: nothing may be written over it."""
        self.copy = copy
        """Whether it is what backward has of a leaf that the step updates."""
        self.tensors: set[int] = set()


class Held:
    """Tensors that are held, and the bytes of their storages."""

    def __init__(self) -> None:
        self.place = self.live = self.peak = self.peak_at = 0
        self.held: dict[int, Storage] = {}
        self.spoilt: set[int] = set()
        """Held tensors whose value an operator in place has written over."""

    def new(self, size: int, version: int = 0) -> Storage:
        """Memory that is taken now."""
        self.live += size
        return Storage(size, version)

    def place_on(self, tensor: int, storage: Storage) -> None:
        """Hold a tensor on a storage."""
        self.held[tensor] = storage
        storage.tensors.add(tensor)

    def let_go(self, tensor: int) -> None:
        """Hold a tensor no more; its storage is free once no tensor on it is held."""
        storage = self.held.pop(tensor)
        self.spoilt.discard(tensor)
        storage.tensors.discard(tensor)
        if not storage.tensors:
            self.live -= storage.bytes

    def mark(self, passing: int) -> None:
        """Remember the most bytes that were live, with so many that pass by."""
        if self.live + passing > self.peak:
            self.peak, self.peak_at = self.live + passing, self.place
