"""While a step is traced: the kernels, layouts, casts and in-place forms that eager PyTorch has.

Takes what torch traces; gives it with what differs from eager PyTorch put right.

From outside: ``dynamo``, ``gradients``, ``in_place_calls``, ``is_compiling``, ``kernels``, ``layouts``,
``library``, ``nothing_ran``, ``rewrite``, ``updates``.
"""
