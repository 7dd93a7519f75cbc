"""The whole search, from a graph with costs and a budget to a Plan.

``make_plan`` plans a step, ``plan_loop`` one in tiles, ``sweep`` many budgets; ``share_budget`` divides one
budget among the graphs of a step, which ``paused`` has wait for each other; ``other_sizes`` takes plans over
from other shapes; ``search`` finds schedules, ``candidates`` are the Programs made of them.

``cheapest`` chooses how a step is split over devices; ``retimed`` tells a plan anew by how fast they are now.

From outside: ``cheapest``, ``make_plan``, ``other_sizes``, ``paused``, ``plan_loop``, ``retimed``,
``share_budget``, ``sweep``.
"""
