"""Calls of single operators: the quickest way to each, views by no operator, random numbers once more.

Takes the operators of a Joint; knows nothing of Programs.

From outside: ``bindings``, ``random_state``, ``views``.
"""
