"""Storages on random ways to the host and back."""

from lowtide.plan.offload.trips import Trip


def some_trips(problem, draw):
    """Storages that are away for a while between two of their readers."""
    found = []
    for s, readers in enumerate(problem.readers):
        made = problem.producer[s]
        late = draw.choice(readers) if readers else -1
        early = max([r for r in readers if r < late], default=made)
        if 0 <= made <= early < late - 2 and not problem.kept[s] and draw.random() < 0.5:
            gone = draw.randint(early + 1, late - 1)
            found.append(Trip(s, gone, draw.randint(gone + 1, late), late))
    return found
