"""A step that was traced with symbols for sizes, made for the sizes of each call.

Takes what AOTAutograd has traced and the arguments of a call; gives a ``Joint`` for their shapes.

From outside: ``concrete``, ``size_arithmetic``, ``template``.
"""
