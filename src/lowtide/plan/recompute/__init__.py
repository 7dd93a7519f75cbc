"""Schedules that recompute: the cheapest that could be found inside a budget, with its proof.

Takes a Problem and a budget; gives a ``Found`` with a Schedule and its bound. ``portfolio`` runs the
others: an exact shortest path for small problems, greedy, annealing, mixed-integer programs.

From outside: ``found``, ``portfolio``, ``refusal``, ``smallest_budget``, ``state``.
"""
