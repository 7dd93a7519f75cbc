"""Addresses: where in one arena each piece of memory of a step lies.

Takes a Program, or a graph in program order, as allocations (``allocations``: who takes how many bytes from
which event to which); gives an AddressPlan (``types``), the best of our own greedy placement (``first_fit``)
and OmniMalloc's search (``omnimalloc_search``), with its distance to the live bytes (``boxes``); ``names``
has a name for each allocation. Whether a result is valid is for ``plan/check/addresses.py`` to say, which
shares no code with this folder.

From outside: ``allocations``, ``names``, ``place``, ``types``.
"""
