"""Seeds of faults. `make chaos` runs as many more as one likes."""

from __future__ import annotations

import pytest

from tests.virtual.__main__ import told
from tests.virtual.run import broken_laws
from tests.virtual.scenario import scenario

ONE_SHARD = (0, 1, 3, 7, 9, 10, 12, 15, 16, 90, 102, 109, 115, 121, 124, 135, 141, 151, 154, 156, 163, 177)
"""Together they go from line to line in nearly every way in which the first two hundred do, and have each kind of fault."""
THREE_SHARDS = (8, 14, 17, 53, 59, 68, 71, 113, 125, 137, 176)
"""Together they have each kind of fault, step and node that those of three shards have among the first two hundred."""
SEEDS = ONE_SHARD + THREE_SHARDS
AT_ONCE = 5


@pytest.mark.parametrize("first", range(0, len(SEEDS), AT_ONCE))
def test_no_seed_breaks_a_law(first: int) -> None:
    for seed in SEEDS[first : first + AT_ONCE]:
        if broken_laws(scenario(seed)):
            pytest.fail(told(seed), pytrace=False)
