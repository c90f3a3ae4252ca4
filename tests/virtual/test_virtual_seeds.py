"""Seeds of faults. `make chaos` runs as many more as one likes."""

from __future__ import annotations

import pytest

from tests.virtual.__main__ import told
from tests.virtual.run import broken_laws
from tests.virtual.scenario import scenario

ONE_SHARD = (33, 48, 49, 55, 57, 60, 63, 88, 115, 117, 139, 141, 151, 153, 169, 175, 180, 181, 187, 189, 192, 195)
"""Together they go from line to line in nearly every way in which the first two hundred do, and have each kind of fault."""
THREE_SHARDS = (47, 56, 62, 68, 98, 101, 104, 113, 125, 140, 143, 158, 197)
"""Together they have each kind of fault, step and node that those of three shards have among the first two hundred."""
SEEDS = ONE_SHARD + THREE_SHARDS
AT_ONCE = 5


@pytest.mark.parametrize("first", range(0, len(SEEDS), AT_ONCE))
def test_no_seed_breaks_a_law(first: int) -> None:
    for seed in SEEDS[first : first + AT_ONCE]:
        if broken_laws(scenario(seed)):
            pytest.fail(told(seed), pytrace=False)
