"""Near-duplicates."""

import unittest

from textkit.similar import jaccard, near_duplicates, shingles
from textkit.synth import COPY_EVERY, documents


class Similar(unittest.TestCase):
    """Comparing documents."""

    def test_jaccard_is_the_share_in_common(self) -> None:
        """Of all that either has."""
        self.assertEqual(jaccard({1, 2, 3}, {2, 3, 4}), 0.5)

    def test_empty_sets_are_alike(self) -> None:
        """They do not differ."""
        self.assertEqual(jaccard(set(), set()), 1.0)

    def test_shingles_are_runs_of_words(self) -> None:
        """Three by default."""
        self.assertEqual(shingles("A b c d"), {"a b c", "b c d"})

    def test_copies_are_found(self) -> None:
        """Every twentieth made-up document is one."""
        made = {f"d{number:03}": text for number, text in enumerate(documents(60, 300, seed=6))}
        found = near_duplicates(made)
        copies = {f"d{number:03}" for number in range(COPY_EVERY - 1, 60, COPY_EVERY)}
        self.assertEqual({right for _, right, _ in found}, copies)

    def test_pairs_are_the_same_on_any_number_of_processes(self) -> None:
        """In the same order, too."""
        made = {f"d{number:03}": text for number, text in enumerate(documents(110, 300, seed=7))}
        self.assertEqual(near_duplicates(made, 0.01, jobs=1), near_duplicates(made, 0.01, jobs=3))
