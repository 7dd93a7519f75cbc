"""From a step with costs and a budget to a Plan: a Program that was searched, simulated and checked.

Takes a :class:`~lowtide.graph.Graph`, the costs of its operators and a request; gives a
:class:`~lowtide.plan.result.plan.Plan`, or an InfeasibleError that names the smallest budget. Nothing here
imports torch. The folders in the order of the pipeline:

- ``budget``, ``request``: what the user asks for, and what the device has.
- ``time_shares``: how the time limit of a search is shared out.
- ``program/``: what a Program is, and what it takes: live bytes, seconds, copies.
- ``check/``: whether a Program may run; shares no code with the planners.
- ``address/``: where in one arena each piece of memory lies.
- ``problem/``: the step in plain numbers, and schedules over it.
- ``bounds/``: what no schedule can beat.
- ``recompute/``: schedules that recompute.
- ``offload/``: what waits on the host besides.
- ``result/``: the Plan, told, read and validated.
- ``make/``: the whole search: one plan, a loop over tiles, many budgets.
- ``baselines/``: planners of others, for comparison.

From outside: ``budget``, ``request``, ``time_shares``.
"""
