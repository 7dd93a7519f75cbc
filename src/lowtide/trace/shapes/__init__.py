"""A step that was traced with symbols for sizes, made for the sizes of each call.

Takes what AOTAutograd has traced and the arguments of a call; gives a ``Joint`` for their shapes.

``numbers`` does the same for numbers that a step computes with.

From outside: ``concrete``, ``numbers``, ``size_arithmetic``, ``template``.
"""
