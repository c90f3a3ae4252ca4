"""Two hundred seeds of faults, and those that have found a defect. `make chaos` runs as many more as one likes."""

from __future__ import annotations

import pytest

from tests.virtual.__main__ import AT_ONCE, told
from tests.virtual.run import broken_laws
from tests.virtual.scenario import scenario

SEEDS = 200


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_no_seed_breaks_a_law(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        if broken_laws(scenario(seed)):
            pytest.fail(told(seed), pytrace=False)
