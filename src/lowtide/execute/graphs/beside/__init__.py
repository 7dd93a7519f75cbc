"""What a captured part does beside its operators.

- ``beside.py``: all of it, for the parts of one Program.
- ``same_copies.py``: copies that have the same memory of the host in every replay.
- ``redraws.py``: random operators that run again.
- ``wires.py``: communications with other processes, between graphs.

From outside: ``beside``, ``wires``.
"""
