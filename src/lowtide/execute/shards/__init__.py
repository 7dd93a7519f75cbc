"""Steps that are split over devices, on torch.distributed.

Takes a user's function and a mesh; gives a step that all processes call alike. In the order of what happens:
``meshes`` joins the processes, ``meeting`` has them agree, ``choose`` splits the captured step, ``split``
gives the part of a process and proves that none waits for ever, ``mesh_step`` runs it over ``wires``, and
``faults`` says who is to blame where one fails.

From outside: ``axes``, ``choose``, ``mesh_step``, ``meshes``, ``ranks``, ``split``, ``tried``, ``values``.
"""
