"""Plans run on PyTorch: ``fit`` and ``torch.compile(backend="lowtide")``.

Takes a user's function and a request; captures it, measures it, plans it and runs the Program. The folders
in the order of the pipeline:

- ``compile/``: the captured function at its first call: rehearsed, planned, verified; one for each shape.
- ``planning/``: a captured step with costs and what the device holds, as a Plan.
- ``tiling/``: which tiles a step is cut into.
- ``runtime/``: runs Programs.
- ``graphs/``: replays a planned step as CUDA graphs.
- ``memory/``: what the device and the host hold and could still give.
- ``compare/``: eager and planned steps side by side, with their timelines; what steps of training take.
- ``shards/``: a step that is split over processes.

From outside: ``backend``, ``fit``.
"""
