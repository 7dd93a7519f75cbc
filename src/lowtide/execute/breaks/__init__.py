"""A step that torch captures in several graphs: each is planned, and they share one budget.

Takes the graphs as torch hands them over; gives functions that Programs run. ``subgraphs`` has them all,
``subgraph`` is one, ``graph_plans`` has its plans, ``split`` parts one where torch cannot trace it,
``forward_record`` notes what is on the device meanwhile, and ``boundary`` has gradients pass as in eager;
``late`` has those that nobody expected. ``called_graphs`` is what is planned, and ``alike`` finds graphs that
differ in numbers alone. ``together`` is what the graphs have in common, and ``attempt`` a call that can be
taken back. ``live`` plans the graphs of a function that nobody can rehearse.
Of a step in one graph, ``beside_loss`` has the results that nobody differentiates.

From outside: ``beside_loss``, ``live``, ``subgraphs``.
"""
