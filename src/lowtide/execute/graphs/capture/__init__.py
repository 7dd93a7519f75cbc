"""How one part of a step is captured.

- ``part_capture.py``: graphs, one after the other, and what the host does between them.
- ``recorder.py``: what lives how long while a part is captured.
- ``operator_parts.py``: operators that are captured in parts.
- ``memsets.py``: small memsets of a graph as kernels.

From outside: ``part_capture``, ``recorder``, ``memsets``.
"""
