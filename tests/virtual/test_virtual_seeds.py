"""Seeds of faults. `make chaos` runs as many more as one likes."""

from __future__ import annotations

import pytest

from tests.virtual.__main__ import told
from tests.virtual.run import broken_laws
from tests.virtual.scenario import scenario

SEEDS = (0, 1, 3, 7, 9, 10, 11, 12, 15, 16, 20, 23, 29, 90, 102, 109, 115, 121, 124, 135, 141, 151, 154, 156, 163, 177)
"""Together they go from line to line in every way in which the first two hundred do, and have each kind of fault."""
AT_ONCE = 5


@pytest.mark.parametrize("first", range(0, len(SEEDS), AT_ONCE))
def test_no_seed_breaks_a_law(first: int) -> None:
    for seed in SEEDS[first : first + AT_ONCE]:
        if broken_laws(scenario(seed)):
            pytest.fail(told(seed), pytrace=False)
