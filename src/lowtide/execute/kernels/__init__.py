"""Compiled kernels for the groups of a step.

Takes a captured step; ``compile_groups`` compiles each distinct group once, with Inductor. ``layout`` chooses
the layout of convolutions before a step is captured.

From outside: ``compile_groups``, ``layout``.
"""
