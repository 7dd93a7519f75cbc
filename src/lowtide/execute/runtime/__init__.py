"""Runs Programs on PyTorch: operators, drops, copies to the host and back, loops over tiles.

Takes a Joint and a Program; gives forward and backward, with the values, gradients, buffers and random
states of eager PyTorch.

From outside: ``copies``, ``fits``, ``handover``, ``in_place``, ``interpreter``,
``parameter_offload``, ``prepare``, ``snapshot``, ``tile_loop``, ``witness``.
"""
