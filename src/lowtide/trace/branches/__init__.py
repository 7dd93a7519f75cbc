"""Branches on values: while Dynamo traces a step, ``if (mask == 0).all():`` goes the way that eager goes.

Takes what Dynamo has captured up to a branch; gives the way, and has Dynamo ask at each call whether it is
still the same one. ``condition`` computes the value, ``branches`` tells Dynamo.

From outside: ``branches``.
"""
