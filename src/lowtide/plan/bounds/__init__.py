"""Lower bounds: what no valid schedule can beat, in bytes and in seconds.

Takes a Problem and a budget; gives proven bounds, from relaxations and mixed-integer programs that HiGHS
solves.

From outside: ``communication``, ``cut``, ``first_heavy``, ``highs``, ``lower_bounds``, ``model``,
``relaxation``, ``repeated_blocks``.
"""
