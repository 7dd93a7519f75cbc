"""Offload: which storages and parameters wait on the host, and when they leave and come back.

Takes a Problem, a budget and the rates of the link; gives a plan that recomputes and offloads.

From outside: ``parameters``, ``search``.
"""
