"""A captured function at its first call: rehearsed, planned, verified, and remembered by its shapes.

Takes the module that Dynamo gives and the first arguments; gives a function that a Program runs.
``aot`` has AOTAutograd trace it once, and ``partition`` is what that asks for; ``user_code`` tells errors of
the user's code in the user's terms. Where torch captures a step in several graphs, ``subgraphs`` plans them
together.

From outside: ``aot``, ``bits``, ``first_call``, ``planned``, ``shape_cache``, ``subgraphs``, ``trial``,
``user_code``.
"""
