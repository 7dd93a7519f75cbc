"""Steps that are split over devices, on torch.distributed.

Takes a captured step and Shards; gives a model with this process's parts of the parameters, and its step.

From outside: ``compare``, ``ranks``.
"""
