"""Programs: straight lines of instructions, and what they take.

Takes a Graph and the seconds and workspaces of its operators; gives Programs (``instructions``), those that
need no search (``simple``), and their live bytes and time (``simulate``, with ``memory`` and
``copy_lanes``). ``beside`` says which exchanges need not be waited for.

From outside: ``beside``, ``copy_lanes``, ``costs``, ``in_place``, ``instructions``, ``memory``,
``short_reruns``, ``simple``, ``simulate``, ``under_way``, ``updated_leaves``.
"""
