"""Memory around a step: what device and host hold, an optimiser's state, and running out of it.

From outside: ``device``, ``host``, ``optimizer_state``, ``out_of_memory``, ``pinned``,
``reserved``.
"""
