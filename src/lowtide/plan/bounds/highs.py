"""The solver of mixed-integer programs: silent, and so run that Ctrl-C reaches it."""

from __future__ import annotations

import threading
from typing import Any

import highspy

__all__ = ["new_solver", "run_solver"]

_POLL_SECONDS = 0.1


def new_solver(**options: float) -> highspy.Highs:
    """A solver with these options that prints nothing, and is not content with nearly the optimum."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    for name, value in {"mip_rel_gap": 0.0, "random_seed": 0, **options}.items():
        solver.setOptionValue(name, value)
    return solver


def run_solver(solver: highspy.Highs) -> None:
    """Run the solver to its end, or to an interrupt: then it stops within about half a second.

    An interrupt is raised between instructions of Python in the main thread, and the solver has none; so it
    runs in a thread of its own, and asks from time to time whether to stop.
    """
    stop, done = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def asked(event: Any) -> None:
        if stop.is_set():
            event.interrupt()

    def work() -> None:
        try:
            solver.run()
        except BaseException as error:  # raised where somebody waits for it
            failed.append(error)
        finally:
            done.set()

    for kind in (solver.cbMipInterrupt, solver.cbSimplexInterrupt):
        kind.subscribe(asked)
    thread = threading.Thread(target=work, name="lowtide-solver")
    try:
        thread.start()
        while not done.wait(_POLL_SECONDS):
            pass
    except BaseException:
        stop.set()
        if thread.is_alive():
            done.wait()
        raise
    if failed:
        raise failed[0]
