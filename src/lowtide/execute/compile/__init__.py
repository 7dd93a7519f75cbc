"""A captured function at its first call: rehearsed, planned, verified, and remembered by its shapes.

Takes the module that Dynamo gives and the first arguments; gives a function that a Program runs.
``aot`` has AOTAutograd trace it once (``traced``), ``family`` for many shapes at a time, and ``partition`` is
what that asks for; ``warm_up`` runs a first call that sets something up, and ``user_code`` tells errors of
the user's code in the user's terms.

From outside: ``aot``, ``bits``, ``family``, ``first_call``, ``planned``, ``shape_cache``, ``sharded``,
``trial``, ``user_code``, ``verify``, ``warm_up``.
"""
