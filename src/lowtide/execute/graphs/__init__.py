"""Forward and backward of a planned step, each replayed as one CUDA graph, in memory of their own.

Goes in: an Interpreter (``runtime/``) and its plan. Comes out: the same results without a launch from Python.
Addresses are fixed while a part is captured, and each allocation gets one that no other has. Only then are
pages of memory put behind the addresses: two of them share a page where they are never live together.

- ``pages.py``: which page is behind which address.
- ``driver.py``: addresses and pages, by CUDA's driver.
- ``segments.py``: has PyTorch's allocator take its addresses there; compiled in ``_segments.c``.
- ``recorder.py``: what lives how long while a part is captured.
- ``operator_parts.py``: operators that are captured in parts.
- ``part.py``: one captured part.
- ``beside.py``: copies to the host and random numbers of a captured part.
- ``stopwatch.py``: whether graphs are faster.
- ``reasons.py``: why a step is not captured.
- ``replay.py``: when a part is captured, replayed or run as always.
- ``room.py``: what a plan leaves for all this.

From outside: ``replay``, ``room``.
"""
