"""One arena for all that a captured step allocates: what is asked for, the places, the memory behind them.

Goes in: what PyTorch's allocator asks for while operators are captured. Comes out: addresses, the same for
the same requests.

- ``pages.py``: pages of memory by their numbers.
- ``driver.py``: addresses of the device, by CUDA's driver.
- ``layout.py``: where in the arena everything lies.
- ``segments.py``: has PyTorch's allocator take its segments there; compiled in ``_segments.c``.
- ``memory.py``: requests are listed, or answered.
- ``errors.py``: why something cannot be captured.

From outside: ``pages``, ``driver``, ``layout``, ``segments``, ``memory``, ``errors``.
"""
