"""Lowtide in the training loops of other libraries; none of them is imported here.

Takes a class of theirs as a base; gives one whose training step stays inside a budget.

From outside: ``hugging_face``, ``lightning``.
"""
