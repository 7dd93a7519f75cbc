"""How the time limit of a search is shared out: every share in one table, with its reason.

Unless a line says otherwise, a share is one of the time limit that the search it belongs to was given. Shares
are deadlines. Work is counted in moves and nodes: where the deadlines are met, shares change nothing.
"""

from __future__ import annotations

# A step is measured, then planned.
MEASURING = 0.5
"""Calling operators again to measure them, where their costs are not known: a search needs the rest."""

LAYOUT = 0.25
"""Timing convolutions in both layouts, with fused kernels, and as much for padded products: a few distinct
ones are most of a step."""

# A step that may be cut into tiles: a plan without tiles, then tiles.
WHOLE = 0.45
"""A plan without tiles, where tiles are looked for beside it: tiles need the larger half."""
WHOLE_AUTO = 0.6
"""The same where tiles are only looked for if nothing else fits: most steps need none."""
TILES_AT_LEAST = 0.38
"""For tiles, however long the plan without them took: they may be all that fits."""
WHOLE_AND_TILES = 0.95
"""For both together: what has begun may take a little longer."""

SPLIT = 0.5
"""All of that once more with all convolutions split, where nothing fits: most measurements are known."""
SPLIT_SOME = 0.25
"""The same with some of them split, because nothing fits or because that may be faster: all may follow."""

# The search for tiles: ways to cut are tried quickly, the best is planned again.
TILE_PROBE = 0.1
"""Of the time that is left, for one way to cut: the best of them gets the rest."""
TILE_PROBE_AROUND = 0.3
"""The same where most of the step is around the tiles: planning that takes longer."""
TILE_SHORTEST = 0.02
"""For a way to cut where no time is left and no plan is found: one that fits is worth it."""
TILE_PLANNING = 0.1
"""For planning a way to cut once its tiles are captured; a way that leaves less time is not begun."""
TILE_PATIENCE = 8
"""Time limits, with capturing and measuring, after which the search ends without a plan."""
TILE_CONTENT = 2
"""The same where a plan is found."""
TILE_COMPILING = 4
"""Time limits that compiling the groups of tiles may take, once a plan is found."""

# One step with loops: the bodies first, then what is around them.
LOOP_BODIES = 0.8
"""The steps of tiles: they run most often. One that needs no search leaves its part to the others."""
LOOP_SHORTEST = 0.1
"""Bodies that are left when others took longer."""

# Recomputation: the portfolio.
ENDING = 0.96
"""Nothing new is begun after this: what has begun may take a little longer."""
RESERVE = 0.3
"""Kept for the lowest peak and a proof that there is no plan, where nothing is found before."""
PROOF = 0.1
"""A proof that there is no plan."""
LOWEST = 0.18
"""The lowest peak where there is no plan: less than a search at that peak has for it, so that it is found."""
CUT_PROGRAMS = 0.6
"""The first cut programs: they give the bound, and on small steps the optimum."""
CUT_PROGRAMS_LARGE = 0.4
"""The same for large steps: they are seldom solved, and annealing needs the time."""
CUT_PROGRAMS_AGAIN = 0.25
"""Cut programs once more, with cuts where the best plan touches the budget."""
BLOCKS = 0.15
"""One cut program of repeated blocks: it is soon solved, or not at all."""
BLOCKS_REPAIR = 0.25
"""Annealing that repairs schedules of repeated blocks."""
ANNEALING = 0.3
"""Left for annealing: repairs are not begun once less is left."""
SHORTEST_PATH = 0.75
"""The shortest path is given up after this where nothing is found: other methods may find something."""

# Offload: what is offloaded is chosen first, then recomputation beside it.
OFFLOAD_ENDING = 0.92
"""Nothing new is begun after this: each attempt is longer than one of recomputation alone."""
OFFLOAD_RESERVE = 0.12
"""Kept for the lowest peak where nothing is found before."""
OFFLOAD_ALONE = 0.2
"""Recomputation alone, for a plan to compare with."""
OFFLOAD_ALONE_LARGE = 0.5
"""The same for large steps without repeated blocks: there it is often the best plan."""
OFFLOAD_BOUND = 0.3
"""Cut programs that make the bound grow."""
OFFLOAD_CUTS_FIRST = 0.3
"""The first cut program: without it there is no bound."""
OFFLOAD_CUTS = 0.15
"""Each cut program after it, and each of repeated blocks."""
OFFLOAD_BLOCKS = 0.2
"""No other way to choose once for repeated blocks is begun after this."""
OFFLOAD_BLOCKS_MOST = 0.5
"""All plans by repeated blocks: the bound, and recomputation alone, need the rest."""
OFFLOAD_CHOICE = 0.1
"""A cut program for a slower link or a smaller budget: a variation of what is known."""
OFFLOAD_PLAN = 0.1
"""Recomputation beside what is offloaded."""
OFFLOAD_FEWER = 0.05
"""The same once more, with fewer storages offloaded: it starts from a schedule."""
OFFLOAD_LOWEST = 0.2
"""The lowest peak where nothing is found with offload."""
OFFLOAD_LAST = 0.1
"""A plan from that lowest peak on."""

# Budgets that are too small.
SMALLEST = 0.5
"""To look for the smallest budget that an error names, where it is not known."""
SMALLEST_SECONDS = 2.0
"""Seconds for the same, at most."""
