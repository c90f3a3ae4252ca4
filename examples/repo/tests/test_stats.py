"""Figures of a text."""

import unittest

from textkit.stats import common, figures, syllables
from textkit.synth import documents


class Stats(unittest.TestCase):
    """What is counted."""

    def test_syllables_are_groups_of_vowels(self) -> None:
        """With a silent e at the end, but not in -le."""
        self.assertEqual([syllables(word) for word in ("banana", "cake", "table", "the", "rhythm")], [3, 1, 2, 1, 1])

    def test_variety_is_the_share_of_distinct_words(self) -> None:
        """Repetition lowers it."""
        self.assertEqual(figures("a b a b.").variety, 0.5)

    def test_short_sentences_read_more_easily(self) -> None:
        """Flesch's formula."""
        self.assertGreater(figures("I am. We go.").ease, figures("I am we go.").ease)

    def test_a_text_without_words_is_refused(self) -> None:
        """There is nothing to divide by."""
        with self.assertRaises(ValueError):
            figures("...")

    def test_common_words_are_in_a_fixed_order(self) -> None:
        """By count, then by the alphabet."""
        self.assertEqual(common("b a b c a d", most=3), [("a", 2), ("b", 2), ("c", 1)])

    def test_ignored_words_are_left_out(self) -> None:
        """As stop words are."""
        self.assertEqual(common("the cat the hat", most=1, ignore=frozenset({"the"})), [("cat", 1)])

    def test_figures_agree_with_each_other(self) -> None:
        """For any text."""
        for text in documents(120, 1200, seed=4):
            found = figures(text)
            self.assertGreaterEqual(found.words, found.sentences)
            self.assertGreater(found.variety, 0)
            self.assertLessEqual(found.variety, 1)
