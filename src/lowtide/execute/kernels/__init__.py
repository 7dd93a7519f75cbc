"""Compiled kernels for the groups of a step.

Takes a captured step; ``compile_groups`` compiles each distinct group once, with Inductor. Before a step is
captured, ``ways`` chooses how its operators run: ``layout`` for convolutions, ``padding`` for products.

From outside: ``compile_groups``, ``ways``.
"""
