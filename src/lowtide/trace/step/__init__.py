"""A captured step: AOTAutograd's joint graph as a Graph, and ``lowtide.capture``.

Takes an fx graph and the leaves of the function; gives a ``Joint``: the Graph with a call for each
operator.

From outside: ``boundary``, ``builder``, ``capture``, ``checkpoints``, ``ending``, ``group``, ``joint``,
``leaves``, ``marks``, ``one_graph``, ``sizes``, ``split_convolutions``.
"""
