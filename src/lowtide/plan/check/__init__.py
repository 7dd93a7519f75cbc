"""The checker: whether a Program is valid for a graph by every rule of docs/valid-programs.md.

Takes a Graph, a Program and a budget; gives its peak, or a PlanError with the number of the rule. It
imports the instructions of Programs and nothing else of ``plan``, so that it cannot share a mistake with a
planner.

``addresses`` checks address plans in the same way, and ``communication`` whether Programs of several
processes wait for each other for ever.

From outside: ``addresses``, ``checker``, ``communication``, ``graph``, ``play``, ``rules``, ``tiles``,
``time``.
"""
