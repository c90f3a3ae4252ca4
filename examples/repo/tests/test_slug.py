"""Slugs."""

import random
import unittest

from textkit.slug import fold, slug, unique_slug
from textkit.synth import documents


class Slugs(unittest.TestCase):
    """From titles to short names."""

    def test_accents_are_folded(self) -> None:
        """Letters without an ASCII form are left out."""
        self.assertEqual(fold("Crème Straße 東"), "Creme Strasse ")

    def test_words_are_joined_with_hyphens(self) -> None:
        """Whatever stands between them."""
        self.assertEqual(slug("What's new -- in 3.11?"), "whats-new-in-3-11")

    def test_a_title_that_just_fits_is_kept_whole(self) -> None:
        """The limit itself is allowed."""
        self.assertEqual(slug("abc def", longest=7), "abc-def")

    def test_a_long_title_is_cut_between_words(self) -> None:
        """No half words."""
        self.assertEqual(slug("abc def ghi", longest=9), "abc-def")

    def test_a_long_first_word_is_cut(self) -> None:
        """Better a half word than none."""
        self.assertEqual(slug("abcdefgh", longest=5), "abcde")

    def test_unique_slugs_are_numbered(self) -> None:
        """From the second one on, within the limit."""
        taken: set[str] = set()
        self.assertEqual([unique_slug("a b c", taken, 5) for _ in range(3)], ["a-b-c", "a-b-2", "a-b-3"])

    def test_a_slug_is_its_own_slug(self) -> None:
        """For titles cut out of any text."""
        for title in _titles(5500):
            name = slug(title, longest=40)
            self.assertEqual(slug(name, longest=40), name)

    def test_a_slug_is_short(self) -> None:
        """Numbered or not."""
        taken: set[str] = set()
        for title in _titles(5500):
            self.assertLessEqual(len(unique_slug(title, taken, longest=30)), 30)


def _titles(count: int) -> list[str]:
    draw = random.Random(2)
    text = " ".join(documents(20, 1000, seed=2))
    starts = [draw.randrange(len(text) - 100) for _ in range(count)]
    return [text[start : start + 100] for start in starts]
