"""The report: one typed document of all that is known about a step, and the page that draws it.

``make`` collects graphs, profiles, plans, runs, sweeps and splits into a ``Report`` (``types``); ``html``
puts one into the page. ``run_view`` has every detail of one way to run the step: ``tables`` rows for
operators and tensors, ``moments`` the runs of operators one after the other, tiles and groups included,
``memory`` who takes memory from when to when and at which address, ``decisions`` what becomes of each tensor
and why, ``lanes`` copies beside the computation, ``loops`` tiles and what they read. ``shards`` has a step
over devices, ``tradeoff`` all budgets with bounds and rivals; ``thin`` says which rows of a large table are
kept.

``page.html`` is the page without data. It is built from ``web/`` by ``npm run build``.
"""
