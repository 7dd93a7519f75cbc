"""From a captured step to a Plan: its costs measured, what the device holds, plans that were made before.

Takes a Joint and a request; gives a Plan.

From outside: ``kept``, ``other_shapes``, ``plan_step``, ``splitting``, ``step_costs``.
"""
