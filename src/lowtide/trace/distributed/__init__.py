"""Steps that several processes compute together: their collectives, and what stands for those in one of them.

Takes the graph of a captured step; gives it with one operator for each collective. While the step is tried
out, ``stand_ins`` keeps this process from waiting for others.

From outside: ``collectives``, ``exchange``, ``gradient_sums``, ``stand_ins``, ``wires``.
"""
