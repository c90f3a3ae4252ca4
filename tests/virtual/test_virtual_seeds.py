"""Seeds of faults. `make chaos` runs as many more as one likes."""

from __future__ import annotations

import pytest

from tests.virtual.__main__ import AT_ONCE, told
from tests.virtual.run import broken_laws
from tests.virtual.scenario import scenario

SEEDS = (*range(30), 41, 77, 88, 90, 102, 109, 110, 115, 118, 120, 121, 124, 135, 141, 146, 151, 154, 156, 160, 163, 177)
"""The first ones, and those that together with some of them go from line to line in every way in which the first two hundred do."""


@pytest.mark.parametrize("first", range(0, len(SEEDS), AT_ONCE))
def test_no_seed_breaks_a_law(first: int) -> None:
    for seed in SEEDS[first : first + AT_ONCE]:
        if broken_laws(scenario(seed)):
            pytest.fail(told(seed), pytrace=False)
