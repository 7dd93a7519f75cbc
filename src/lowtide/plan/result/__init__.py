"""Plans: a Program with what it is for, what it takes and what is proven about it.

Gives the ``Plan`` that is kept and shown, explains one in words, validates one from a file, puts one into
another order, shows one in a notebook or as a step, and explains a budget that is too small. ``measured_run``
is a plan that was run, with what it took; ``shard_plan`` is a step that is split over devices.

From outside: ``decisions``, ``infeasible``, ``measured_run``, ``plan``, ``played``, ``reordered``,
``shard_plan``, ``shown``, ``validate``.
"""
