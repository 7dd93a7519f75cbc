"""From a PyTorch function to a captured step: a Graph with the calls that run its operators.

Takes a function and example arguments; gives a :class:`~lowtide.trace.step.joint.Joint`. Nothing is run but
on fake tensors. The folders:

- ``distributed/``: collectives of a step that several processes compute together.
- ``eager/``: every operator is the one that eager PyTorch runs, with the layout it really gives.
- ``step/``: the joint forward-and-backward graph of AOTAutograd as a Graph.
- ``shapes/``: a step that was traced with symbols for sizes, for the sizes of each call.
- ``operators/``: operators on a part of their inputs, for tiles.
- ``tiles/``: parts of a step captured for a box of it.

From outside: ``refusal``.
"""
