"""Damaged files: every command answers with its result or a typed error, and with nothing else.

The mutations are the same in every run. A longer run: ``make fuzz``.
"""

import pytest

from tests.fuzz_commands import CASES, survive

MUTATIONS = {
    "families": 8,
    "chain": 80,
    "plan": 60,
    "run": 40,
    "shards": 40,
    "program": 60,
    "loop": 40,
    "costs": 30,
    "device": 30,
}


def test_every_case_is_tried():
    assert MUTATIONS.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_commands_survive_damaged_files(name):
    assert survive(name, range(MUTATIONS[name])) > 0
