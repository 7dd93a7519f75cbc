"""The planning problem in plain numbers, and schedules over it.

Takes a Graph with costs; gives a ``Problem`` of operators, storages and whole-number seconds. A
``Schedule`` says which operators are recomputed before which; ``lower`` turns one into a Program.

From outside: ``lower``, ``pauses``, ``precedence``, ``problem``, ``reorder``, ``schedule``.
"""
