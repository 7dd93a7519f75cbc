"""What PyTorch itself writes about memory and time: snapshots of its CUDA allocator, profiler traces."""

from lowtide.formats.pytorch.profiler import PROFILER_FORMAT
from lowtide.formats.pytorch.snapshot import SNAPSHOT_FORMAT

__all__ = ["PROFILER_FORMAT", "SNAPSHOT_FORMAT"]
