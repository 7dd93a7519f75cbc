"""A captured function at its first call: rehearsed, planned, verified, and remembered by its shapes.

Takes the module that Dynamo gives and the first arguments; gives a function that a Program runs.
``partition`` is what AOTAutograd asks for; ``user_code`` tells errors of the user's code in the user's
terms. Where torch captures a step in several graphs, ``subgraphs`` plans them together.

From outside: ``bits``, ``first_call``, ``partition``, ``planned``, ``shape_cache``, ``subgraphs``,
``untouched``, ``user_code``.
"""
