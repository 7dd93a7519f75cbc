"""Addresses: where in one arena each piece of memory of a step lies.

Takes a Program, or a graph in program order, as allocations (``allocations``: who takes how many bytes from
which event to which); gives an AddressPlan (``types``) with its distance to the live bytes (``boxes``): the
best of our own greedy placement (``first_fit``), of placement from the ground up (``skyline``,
``noisy_skyline``) and of OmniMalloc's branch and bound (``omnimalloc_search``), which starts over in many
ways (``restarts``).
``reorder`` looks for other orders of a Program's independent instructions (``independent``) that take less;
``names`` has a name for each allocation. Whether a result is valid is for ``plan/check/addresses.py`` to say,
which shares no code with this folder.

From outside: ``allocations``, ``names``, ``place``, ``reorder``, ``types``.
"""
