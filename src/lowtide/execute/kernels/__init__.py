"""Compiled kernels for the groups of a step.

Takes a captured step; compiles each distinct group once, with Inductor.

From outside: ``compile_groups``.
"""
