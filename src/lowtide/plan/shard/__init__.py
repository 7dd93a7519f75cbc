"""How a step is split over devices: one choice an operator and input, so that time is least.

Takes numbers alone: what each choice takes, and what two choices take together. ``trace/shards`` makes them.

From outside: ``choose``.
"""
