"""Steps of tiles: the part of a step that a box of its result needs, captured and differentiated by itself.

Takes a Joint and boxes; gives a Joint for each different tile, and the step with a loop in the place of the
region.

From outside: ``differentiate``, ``loop``, ``nested``, ``outside``, ``owned``, ``tiling``.
"""
