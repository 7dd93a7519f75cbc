"""Simulated annealing over schedules: the kernel in C, the same kernel in Python, rounds of it.

Takes a Problem, a budget and a Schedule to start from; gives a cheaper Schedule, or the same.

From outside: ``kernel``, ``rounds``.
"""
