"""Tiles: which part of a step is run in loops, along which axes, in how many tiles.

Takes a Joint and a budget; gives the fastest Plan in tiles that was found, and the step as it runs it.

From outside: ``plan_tiles``.
"""
