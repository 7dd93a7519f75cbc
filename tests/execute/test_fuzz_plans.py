"""A few of the cases of ``make fuzz-plans``."""

from tests.fuzz_plans import run


def test_what_is_accepted_runs_right():
    tally = run(300, seed=77)
    assert not tally.failures
    assert {kind for kind in tally.cases if "refused" not in kind} == {"symbols", "torch", "figures", "files"}
    for kind in ("symbols", "torch"):  # otherwise nothing was tried
        assert 0.2 < tally.cases[f"{kind} refused"] / tally.cases[kind] < 0.95
    assert sum(tally.refused.values()) < 0.2 * tally.cases["symbols"]
