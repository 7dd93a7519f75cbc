"""What PyTorch itself writes about memory and time: snapshots of the CUDA allocator."""

from lowtide.formats.pytorch.snapshot import SNAPSHOT_FORMAT

__all__ = ["SNAPSHOT_FORMAT"]
