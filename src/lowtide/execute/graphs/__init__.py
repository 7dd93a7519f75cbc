"""Forward and backward of a planned step, each replayed as CUDA graphs, in memory of their own.

Goes in: an Interpreter (``runtime/``) and its plan. Comes out: the same results without a launch from Python.
A step is captured twice: once to list what its operators ask for, and, when every request has a place in one
arena, to run there.

- ``arena/``: what is asked for, the places, and the memory behind them.
- ``capture/``: how one part is captured, as graphs between which processes communicate.
- ``part.py``: one captured part.
- ``step_capture.py``: captures both parts.
- ``captured_step.py``: both parts.
- ``common_memory.py``: what graphs of all shapes share, and which may be replayed.
- ``beside/``: copies to the host, random numbers and communications of a captured part.
- ``stopwatch.py``: whether graphs are faster.
- ``reasons.py``: why a step is not captured.
- ``replay.py``: when a part is captured, replayed or run as always.
- ``room.py``: what a plan leaves for all this.

From outside: ``common_memory``, ``replay``, ``room``.
"""
