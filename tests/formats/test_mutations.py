"""Damaged files: every reader answers with a step or a FormatError, and with nothing else.

The mutations are the same in every run. A longer run: ``make fuzz MUTATIONS=100000``.
"""

import pytest

from tests.fuzz import CASES, survive

MUTATIONS = 120
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", CASES)
def test_mutated_documents_are_read_or_refused(name, part):
    refused = survive(name, range(MUTATIONS)[part * MUTATIONS // PARTS : (part + 1) * MUTATIONS // PARTS])
    assert refused > 0
