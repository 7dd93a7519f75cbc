"""Compiled kernels for the groups of a step.

Takes a captured step; ``compile_groups`` compiles each distinct group once, with Inductor. Before a step is
captured, ``ways`` chooses how its operators run: ``layout`` for convolutions, whose gradients
``rounding`` holds against float64, ``padding`` for products. ``compiler`` says whether there is one at all.

From outside: ``compile_groups``, ``compiler``, ``ways``.
"""
